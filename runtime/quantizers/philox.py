"""Philox4x32-7: random numbers by their place in the tensor, the same on every device.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter of 128
bits and a key of 64 into 128 random bits, in rounds of multiplying and mixing: seven are the fewest of this generator
that pass the authors' tests (BigCrush), and take a third less time than their usual ten. Nothing is carried from one
number to the next, so any thread can draw its own. Here, in plain torch, is the specification; kernels must give these
bits.

Eight consecutive codes, a group of the packing, share a counter: 16 bits for each code, element 0 of the group the
lowest 16 bits of word 0.

Keys come from a stream of this module's own. It never moves the state of torch's generators: the masks of dropout are
those of exact training, and gradient checkpointing recomputes them. `torch.manual_seed` restarts it.
"""

from functools import wraps
from itertools import count

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


class KeyStream:
    """The keys of rounding: a function of the seed that torch was given last, and of how many were drawn since.

    Each seed has a count of its own, which goes on when ``torch.random.fork_rng`` gives a seed back.
    """

    _SEEDS = 1024  # counts that are remembered; the oldest goes first

    def __init__(self) -> None:
        self._drawn: dict[int, count[int]] = {}

    def restart(self, seed: int) -> None:
        """Begin again the keys of `seed`."""
        self._drawn.pop(seed, None)
        if len(self._drawn) >= self._SEEDS:
            self._drawn.pop(next(iter(self._drawn)), None)
        self._drawn[seed] = count()

    def next(self) -> int:
        """Return the next key, from 0 to 2^63 − 1; no generator of torch is moved."""
        seed = torch.default_generator.initial_seed()
        drawn = self._drawn.get(seed)
        if drawn is None:
            self.restart(seed)
            drawn = self._drawn[seed]
        return _mixed(_mixed(seed) + next(drawn)) >> 1


def _mixed(number: int) -> int:
    """Return 64 well-mixed bits of `number`, modulo 2^64 (splitmix64: Steele, Lea and Flood, 2014)."""
    z = (number + 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


_WORD = 2**64 - 1
_keys = KeyStream()


def _watch_seeding() -> None:
    """Let `torch.manual_seed` restart the keys.

    Torch has no hook for it, and its state alone does not tell: after ``manual_seed(0)`` it is the same as after a
    forward pass without dropout that was seeded so. A generator that is seeded by its own method restarts nothing
    unless the seed is new.
    """
    original = torch.random.manual_seed

    @wraps(original)
    def manual_seed(seed: int) -> torch.Generator:
        generator = original(seed)
        _keys.restart(generator.initial_seed())
        return generator

    torch.manual_seed = torch.random.manual_seed = manual_seed


_watch_seeding()


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return a key from 0 to 2^63 − 1: the next of the stream, or one drawn from `generator`, which that moves.

    One stream serves tensors on every device: after the same `torch.manual_seed` the same keys come, and no device is
    waited for.
    """
    if generator is None:
        return _keys.next()
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=generator.device, generator=generator))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four words of random bits for each counter of four words, under a key of two.

    Args:
        counter: int64, each element from 0 to 2^32 − 1; the lowest word first.
        key: each from 0 to 2^32 − 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2^64: the sign of int64 is just the highest bit
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def random_halves(seed: int, groups: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each of the 8 codes of `groups` groups: int32 (groups, 8), from 0 to 65,535."""
    index = torch.arange(groups, device=device)
    zero = torch.zeros_like(index)
    words = philox((index & MASK, index >> 32, zero, zero), (seed & MASK, seed >> 32))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).to(torch.int32)
