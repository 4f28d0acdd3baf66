"""Where the numbers of pages come from: README, docs and plots/results beside the files that were measured.

    python -m fewbit.plots.numbers                      every number, with its file and the commit that measured it
    python -m fewbit.plots.numbers plots/results/*.md   those of some pages

A `Source` makes texts of files, such as a row of a table or `−.46 ± 1.12`, and its page has to hold them: a test. What
no text covers is listed without a file; a table's number without one needs a reason in `elsewhere.py`: a test, too.
"""

from .docs import DOCS
from .elsewhere import PRINTED, reason
from .memory import MEMORY
from .pages import Number, Source, missing, numbers_of
from .prose import PROSE
from .speed import SPEED
from .training import TRAINING
from .variants import VARIANTS

SOURCES = (*TRAINING, *VARIANTS, *MEMORY, *SPEED, *DOCS, *PROSE)

__all__ = ["PRINTED", "SOURCES", "Number", "Source", "missing", "numbers_of", "reason"]
