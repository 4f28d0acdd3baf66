"""Ways to compute a step that change its memory as a whole, a file each; a new one needs its line in `WAYS`."""

from .chunked_loss import ChunkedLossWay
from .tiles import Tiles
from .way import Way

# In the order in which they are tried, each beside those before it: what costs no time comes first.
WAYS: tuple[Way, ...] = (ChunkedLossWay(), Tiles())
METHODS_OF_STEPS = frozenset(way.method for way in WAYS)
