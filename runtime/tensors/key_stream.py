"""The stream of keys for stochastic rounding, independent of torch's CPU generator, which it never advances.

    torch.manual_seed(s)            starts the stream of s
    next_key()                      returns its next key; a GPU has a stream of its own (backends/cuda/keys.py)
    torch.get_rng_state()           carries the position in the stream with the state
    torch.set_rng_state(state)      restores that position

So the masks of dropout are those of exact training, a seed makes a training reproducible, and a recomputation by
gradient checkpointing is rounded as the forward pass was, because checkpoints save and restore torch's state.

Torch has no hook for these three functions, so they are wrapped when this module is imported. Torch's state alone would
not suffice: after ``manual_seed(0)`` it is the same as after a forward pass without dropout that was seeded so. A
generator seeded by its own method starts a stream if the seed differs.
"""

import threading
from functools import wraps

import torch
from torch import Tensor

_PLACE = "_fewbit_rounding"  # attribute of torch's state tensor: the position in the stream
_WORD = 2**64 - 1  # cuts Python's integers, which do not overflow, to 64 bits

Place = tuple[int, int]  # a seed, and the number of its keys drawn so far


class KeyStream:
    """Keys as a function of torch's last seed and of the number of keys drawn since."""

    def __init__(self) -> None:
        self._place: Place = (-1, 0)
        self._lock = threading.Lock()

    @property
    def place(self) -> Place:
        """Return the position in the stream."""
        seed = torch.default_generator.initial_seed()
        return self._place if self._place[0] == seed else (seed, 0)

    def go_to(self, place: Place) -> None:
        """Continue from `place`."""
        self._place = place

    def next(self) -> int:
        """Return the next key, from 0 to 2^63 − 1."""
        with self._lock:
            seed, drawn = self.place
            self._place = (seed, drawn + 1)
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
