"""Seeds of rounding on a GPU: the stream of tensors/philox.py, with its place in the GPU's memory.

A CUDA graph records the kernel that draws, so each replay draws anew, and nothing waits for the host. The stream is
that of the seed of torch's generator on the device: after the same `torch.manual_seed` every device draws the keys that
a CPU does, and what ranks of one model compute alike they round alike. Torch's generators are never advanced, so the
masks of dropout are those of exact training.

    torch.manual_seed(s), torch.cuda.manual_seed(s)    start the stream of s
    torch.cuda.get_rng_state()                         carries the place in the stream with the state
    torch.cuda.set_rng_state(state)                    goes to that place
    the generator's own set_state, manual_seed         go on with the stream of the seed that it then has

The host knows that place as far as it has drawn itself; replays in between go on from where they are.
"""

import threading
from collections.abc import Iterable
from functools import wraps

import torch
from torch import Tensor

from ....tables import FewbitError
from ...tensors.graphs import is_capturing
from ...tensors.philox import Place, Places
from ..reference import keys as reference
from .codegen.keys import keys_source
from .launching import Loaded, available, load

_PLACE = "_fewbit_rounding"  # attribute of torch's state tensor: the place in the stream
_BEGIN = "begin"  # in place of it, in a state from before anything was drawn, as a step's first checkpoint may have

Device = int | str | torch.device


def draw(x: Tensor, count: int) -> Tensor:
    """Return the next `count` seeds, int64 (count,), beside `x`."""
    device = x.get_device()
    if not available(device):
        if is_capturing(device):
            raise FewbitError("rounding at random in a CUDA graph takes fewbit's kernels, which do not run on this GPU")
        return reference.draw(x, count)
    seeds = torch.empty(count, dtype=torch.int64, device=x.device)
    stream_of(device).draw(seeds)
    return seeds


class DeviceStream:
    """The stream of a device, with its place as far as the host has drawn, and the kernels that draw.

    They run in the order of their calls, whichever of torch's streams are the current ones: those do not wait for each
    other, and two of them would draw the same keys, or keys of the seed before.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._draw, self._move = load(keys_source(), ("draw", "move"), device)
        self._lock = threading.Lock()
        self._place: Place = (-1, 0)
        self._left = Places()  # the streams of other seeds
        self._recorded = 0  # keys of draws in graphs, which their capture does not draw
        self._last: torch.Stream | None = None  # the one that the kernel before runs on
        self._done = torch.cuda.Event()  # that kernel is
        self.restart()

    @property
    def place(self) -> Place:
        """Return the position in the stream; while a graph is captured, to go to in this graph."""
        seed, drawn = self._place
        if self._is_capturing():
            return seed, drawn + self._recorded
        return self._place if seed == (asked := self._seed()) else self._left.of(asked)

    def restart(self) -> None:
        """Begin the stream of the seed that torch's generator of the device has.

        Nothing while a graph is captured, as torch does: each replay would begin it again, and round by one noise.
        """
        with self._lock:
            if not self._is_capturing():
                self._begin((self._seed(), 0))

    def go_to(self, place: Place) -> None:
        """Continue from `place`: of the same seed by as many keys as the host is beyond it."""
        with self._lock:
            if place[0] != self._place[0]:
                self._begin(place)
                return
            further = place[1] - self._place[1] - (self._recorded if self._is_capturing() else 0)
            self._launch(self._move, 0, further, 0)
            self._count(further)

    def draw(self, seeds: Tensor) -> None:
        """Write the next seeds."""
        with self._lock:
            if not self._is_capturing() and self._place[0] != (seed := self._seed()):
                self._begin(self._left.of(seed))  # torch's generator was moved by its own methods
            self._launch(self._draw, seeds.data_ptr(), seeds.numel())
            self._count(seeds.numel())

    def _count(self, keys: int) -> None:
        """Note that the place is so many keys further: on the device, or in the graph that is captured."""
        if self._is_capturing():
            self._recorded += keys
        else:
            self._place = (self._place[0], self._place[1] + keys)

    def _is_capturing(self) -> bool:
        return is_capturing(self._device)

    def _seed(self) -> int:
        return torch.cuda.default_generators[self._device].initial_seed()

    def _begin(self, place: Place) -> None:
        seed, drawn = place
        self._left.leave(self._place)
        self._launch(self._move, seed - (seed >> 63 << 64), drawn, 1)  # seed as an int64
        self._place = place

    def _launch(self, kernel: Loaded, *arguments: int) -> None:
        """Run a kernel after the one before; in a graph alone, which may not wait for what runs outside of it."""
        if self._is_capturing():
            kernel.launch(1, *arguments)
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != stream:
            stream.wait_event(self._done)
        kernel.launch(1, *arguments)
        self._done.record(stream)
        self._last = stream


_streams: dict[int, DeviceStream] = {}
_beginning = threading.Lock()


def stream_of(device: int) -> DeviceStream:
    """Return the stream of a device, begun at first use: once, or two threads would draw the same keys."""
    if device not in _streams:
        with _beginning:
            if device not in _streams:
                _streams[device] = DeviceStream(device)
    return _streams[device]


# ---- torch's seeds and states ----------------------------------------------------------------------------------------


def _accompany_torch() -> None:
    """Make the streams follow the seeds and states of torch's CUDA generators."""
    seed_one, seed_all = torch.cuda.manual_seed, torch.cuda.manual_seed_all
    state_of_torch, restore_torch = torch.cuda.get_rng_state, torch.cuda.set_rng_state

    @wraps(seed_one)
    def manual_seed(seed: int) -> None:
        seed_one(seed)
        _restart([torch.cuda.current_device()] if _is_initialized() else [])

    @wraps(seed_all)
    def manual_seed_all(seed: int) -> None:
        seed_all(seed)
        _restart(list(_streams) if _is_initialized() else [])  # a list: another thread may begin one

    @wraps(state_of_torch)
    def get_rng_state(device: Device = "cuda") -> Tensor:
        state, stream = state_of_torch(device), _streams.get(_index(device))
        setattr(state, _PLACE, _BEGIN if stream is None else stream.place)
        return state

    @wraps(restore_torch)
    def set_rng_state(new_state: Tensor, device: Device = "cuda") -> None:
        restore_torch(new_state, device)
        place = getattr(new_state, _PLACE, None)
        if place == _BEGIN:
            _restart([_index(device)] if _is_initialized() else [])
        elif place is not None and torch.cuda.is_initialized() and available(_index(device)):
            stream_of(_index(device)).go_to(place)

    ours = {"manual_seed": manual_seed, "manual_seed_all": manual_seed_all}
    ours |= {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}
    for name, function in ours.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.random, name, function)


def _is_initialized() -> bool:
    """Return whether streams may be moved: none in a forked process, a DataLoader's worker, which has no GPU."""
    return bool(_streams) and torch.cuda.is_initialized()


def _restart(devices: Iterable[int]) -> None:
    for device in devices:
        if device in _streams:
            _streams[device].restart()


def _index(device: Device) -> int:
    """Return the number of a device; the current one's where it has none."""
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


_accompany_torch()
