"""Random bits of rounding: Philox4x32-7, by position in the tensor, alike on every device; and the stream of its keys.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter of 128
bits and a key of 64 into 128 random bits, in rounds of multiplying and mixing: seven rounds are the fewest of this
generator that pass the authors' tests (BigCrush), and take a third less time than their usual ten. No state is carried
from one number to the next, so any thread can draw its own. This file is the specification, in plain torch; kernels
must give these bits.

Eight consecutive codes, a group of the packing, share a counter: 16 bits for each code, the lowest 16 bits of word 0
for element 0 of the group. What `torch.compile` saves is rounded by fewer: `rotated_halves`.

The stream of keys is independent of torch's CPU generator, which it never advances:

    torch.manual_seed(s)            starts the stream of s
    next_key()                      returns its next key; a GPU has a stream of its own (backends/cuda/keys.py)
    torch.get_rng_state()           carries the position in the stream with the state
    torch.set_rng_state(state)      restores that position

So the masks of dropout are those of exact training, a seed makes a training reproducible, and a recomputation by
gradient checkpointing is rounded as the forward pass was, because checkpoints save and restore torch's state.

Torch has no hook for these three functions, so they are wrapped when this module is imported. Torch's state alone would
not suffice: after ``manual_seed(0)`` it is the same as after a forward pass without dropout that was seeded so. The
methods of a generator itself, `manual_seed` and `set_state`, change its seed unseen: the stream of that seed goes on
from where it was left. Megatron's tracker moves a generator to another seed and back in each layer, and would round
all layers and steps by the same bits.
"""

import threading
from functools import wraps

import torch
from torch import Tensor

from ...tables import FewbitError
from .graphs import is_capturing

# ---- keys ------------------------------------------------------------------------------------------------------------

_PLACE = "_fewbit_rounding"  # attribute of torch's state tensor: the position in the stream
_MOST_SEEDS = 1024  # whose places are kept
_WORD = 2**64 - 1  # cuts Python's integers, which do not overflow, to 64 bits

Place = tuple[int, int]  # a seed, and the number of its keys drawn so far


class Places:
    """Where the streams of the last seeds were left; without a lock, which a forked process might find taken."""

    def __init__(self) -> None:
        self._drawn: dict[int, int] = {}

    def of(self, seed: int) -> Place:
        """Return where to go on with the stream of `seed`."""
        return seed, self._drawn.get(seed, 0)

    def leave(self, place: Place) -> None:
        """Note where a stream is left."""
        seed, drawn = place
        if drawn:
            self._drawn[seed] = drawn
        else:
            self._drawn.pop(seed, None)
        if len(self._drawn) > _MOST_SEEDS:
            oldest, *_ = self._drawn
            self._drawn.pop(oldest, None)


class KeyStream:
    """Keys as a function of the seed of torch's generator and of the number of keys drawn by that seed."""

    def __init__(self) -> None:
        self._places = Places()
        self._lock = threading.Lock()

    @property
    def place(self) -> Place:
        """Return the position in the stream."""
        return self._places.of(torch.default_generator.initial_seed())

    def go_to(self, place: Place) -> None:
        """Continue from `place`."""
        self._places.leave(place)

    def next(self) -> int:
        """Return the next key, from 0 to 2^63 − 1."""
        with self._lock:
            seed, drawn = self.place
            self._places.leave((seed, drawn + 1))
        return _mixed(_mixed(seed) + drawn) >> 1


def _mixed(number: int) -> int:
    """Return 64 mixed bits of `number`, modulo 2^64 (splitmix64: Steele, Lea and Flood, 2014)."""
    z = (number + 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


_stream = KeyStream()
next_key = _stream.next


def _accompany_torch(stream: KeyStream) -> None:
    """Make the stream follow the seeds and states of torch's CPU generator."""
    seed_torch, state_of_torch, restore_torch = (
        torch.random.manual_seed,
        torch.random.get_rng_state,
        torch.random.set_rng_state,
    )

    @wraps(seed_torch)
    def manual_seed(seed: int) -> torch.Generator:
        generator = seed_torch(seed)
        stream.go_to((generator.initial_seed(), 0))
        return generator

    @wraps(state_of_torch)
    def get_rng_state() -> Tensor:
        state = state_of_torch()
        setattr(state, _PLACE, stream.place)
        return state

    @wraps(restore_torch)
    def set_rng_state(new_state: Tensor) -> None:
        restore_torch(new_state)
        place = getattr(new_state, _PLACE, None)
        if place is not None:
            stream.go_to(place)

    for function in (manual_seed, get_rng_state, set_rng_state):
        setattr(torch, function.__name__, function)
        setattr(torch.random, function.__name__, function)


_accompany_torch(_stream)


# ---- bits ------------------------------------------------------------------------------------------------------------

NEAREST = -1  # in place of a key, where codes are rounded to nearest
ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
GOLDEN_RATIO = 40503  # (√5 − 1)/2 of 2^16

Seed = int | Tensor
"""A key: a number, or int64 () on the device that draws from it, where nobody waits for its value."""


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return a key from 0 to 2^63 − 1: the next of the stream (philox.py), or one drawn from `generator`.

    After the same `torch.manual_seed` the keys are those that GPUs draw (backends/cuda/keys.py).
    """
    return next_key() if generator is None else int(seed_from(generator))


def seed_from(generator: torch.Generator) -> Tensor:
    """Return a key drawn from `generator`, int64 (1,) on its device, which is not waited for."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=generator.device, generator=generator)


def seed_beside(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a key drawn from `generator`, int64 (1,): on the device of `x` if it is drawn there, else on the CPU.

    Raises:
        FewbitError: a CUDA graph is being captured, all of whose replays would round by that one key.
    """
    drawn = seed_from(generator)
    if drawn.device == x.device:
        return drawn
    if is_capturing():
        raise FewbitError(f"a CUDA graph would round by one key in all its replays: give a generator on {x.device}")
    return drawn.cpu()


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Seed, Seed]) -> tuple[Tensor, ...]:
    """Return four words of random bits for each counter of four words, under a key of two.

    Args:
        counter: int64, each element from 0 to 2^32 − 1; the lowest word first.
        key: two words, each from 0 to 2^32 − 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2^64: the sign of int64 is its highest bit
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def random_halves(seed: Seed, groups: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each of the 8 codes of `groups` groups: int32 (groups, 8), from 0 to 65,535."""
    index = torch.arange(groups, device=device)
    zero = torch.zeros_like(index)
    words = philox((index & MASK, index >> 32, zero, zero), (seed & MASK, seed >> 32))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).to(torch.int32)


def rotated_halves(seed: Seed, groups: int, group_size: int, device: torch.device) -> Tensor:
    """Return 16 bits for each element of `groups` groups of the quantizer: int32 (groups, G), from 0 to 65,535.

    Only the first of a group is drawn, group g's as `random_halves` has it for code g. From element to element it is
    rotated by the golden ratio: each is uniform, and those of a group lie evenly.
    """
    first = random_halves(seed, -(-groups // 8), device).view(-1)[:groups].unsqueeze(1)
    return first + torch.arange(group_size, device=device) * GOLDEN_RATIO & 0xFFFF
