"""The keys of rounding: a stream beside torch's generator on the CPU, which it never moves.

    torch.manual_seed(s)            begins the stream of s
    next_key()                      its next key
    torch.get_rng_state()           the place in the stream comes with the state, and
    torch.set_rng_state(state)      goes back to it

So the masks of dropout are those of exact training, a seed makes a training reproducible, and what gradient
checkpointing recomputes is rounded as it was in the forward pass, because checkpoints save and restore torch's state.

Torch has no hook for its three functions, so they are wrapped when this module is imported. Its state alone would not
do: after ``manual_seed(0)`` it is the same as after a forward pass without dropout that was seeded so. A generator that
is seeded by its own method begins a stream if the seed is another.
"""

import threading
from functools import wraps

import torch
from torch import Tensor

_PLACE = "_fewbit_rounding"  # attribute of a state of torch's: the place in the stream
_WORD = 2**64 - 1

Place = tuple[int, int]  # a seed, and how many of its keys were drawn


class KeyStream:
    """Keys that are a function of the seed that torch was given last, and of how many were drawn since."""

    def __init__(self) -> None:
        self._place: Place = (-1, 0)
        self._lock = threading.Lock()

    @property
    def place(self) -> Place:
        """Where the stream is."""
        seed = torch.default_generator.initial_seed()
        return self._place if self._place[0] == seed else (seed, 0)

    def go_to(self, place: Place) -> None:
        """Go on from `place`."""
        self._place = place

    def next(self) -> int:
        """Return the next key, from 0 to 2^63 − 1."""
        with self._lock:
            seed, drawn = self.place
            self._place = (seed, drawn + 1)
        return _mixed(_mixed(seed) + drawn) >> 1


def _mixed(number: int) -> int:
    """Return 64 well-mixed bits of `number`, modulo 2^64 (splitmix64: Steele, Lea and Flood, 2014)."""
    z = (number + 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


_stream = KeyStream()
next_key = _stream.next


def _accompany_torch(stream: KeyStream) -> None:
    """Let the stream follow the seeds and states of torch's generator on the CPU."""
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
