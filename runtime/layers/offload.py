"""Swapping (ActNN, Section 5.2, L4): compressed tensors are stored in host memory until the backward pass.

    forward     each tensor is copied to pinned host memory on a separate stream, while the next layers compute
    backward    the tensors of the layers needed next are prefetched

A `Swapper` is shared by the layers of a model. Copies never block the compute stream: it waits only for the event of
the copy that it needs. CPU tensors are copied synchronously within host memory, so that everything except streams and
pinned memory works, and is tested, without a GPU.

Codes that several layers share (query, key and value) are moved once and fetched once: they stay on the device from the
first use in the backward pass to the last. Uncompressed saved tensors are not moved: they are also held elsewhere, so
moving them would free nothing.

In compiled code the copies are ops of the graph, of all parts, and the compute stream waits for them.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import ops
from ..quantizers import Compressed
from ..tensors.traits import is_abstract, total_bytes
from .base import observed
from .saver import Saver, Whole, as_saver, put_together, take_apart

SMALLEST = 4096  # bytes: smaller tensors are not moved, because a copy costs more than it frees


class Progress:
    """The state of the moves of one tensor; only the graph holds a strong reference.

    Attributes:
        written: event of the copy to host memory; None if the copy is complete.
        host: weak reference to the tensor in host memory, which the graph holds.
        fetched: the tensor on its device, and the event of its copy.
        layers: number of layers that save it.
        asked: number of them that have used it since it was fetched.
        queued: whether it is in the queue for prefetching.
    """

    host: weakref.ref[Tensor]
    written: Any
    layers: int
    asked: int
    queued: bool

    def __init__(self, host: Tensor, written: Any) -> None:
        self.host, self.written = weakref.ref(host), written
        self.fetched: tuple[Tensor, Any] | None = None
        self.layers, self.asked, self.queued = 1, 0, True


@dataclass(frozen=True, eq=False)
class Moved:
    """A tensor in host memory."""

    host: Tensor
    device: torch.device
    progress: Progress


class Swapper:
    """Moves tensors to host memory and back, ahead of need.

    Args:
        ahead: number of saved tensors to prefetch.
        smallest: least bytes of a tensor that is moved.
    """

    ahead: int
    smallest: int

    def __init__(self, ahead: int = 2, smallest: int = SMALLEST) -> None:
        self.ahead, self.smallest = ahead, smallest
        self._streams: dict[torch.device, Any] = {}
        self._moved: deque[weakref.ref[Progress]] = deque()  # in the order of the forward pass
        self._recent: list[tuple[Compressed, Swapped]] = []  # the inputs moved last
        self._lock = threading.Lock()  # replicas of `DataParallel` share the queue

    def found(self, compressed: Compressed) -> "Swapped | None":
        """Return the swapped form of `compressed`, counting one more layer, if it is among the last two moved."""
        recent = sorted(self._recent, key=lambda entry: entry[0] is compressed)
        if not recent or recent[-1][0] is not compressed:
            return None
        self._recent = recent
        swapped = recent[-1][1]
        for tensor in swapped.tensors:
            if isinstance(tensor, Moved):
                tensor.progress.layers += 1
        return swapped

    def note(self, compressed: Compressed, swapped: "Swapped") -> None:
        """Record `swapped` as the swapped form of `compressed`, until two others or a backward pass."""
        self._recent = [*self._recent[-1:], (compressed, swapped)]

    def forget(self) -> None:
        """Drop the record."""
        self._recent = []

    def out(self, x: Tensor) -> Tensor | Moved:
        """Return `x` moved to host memory, or `x` itself if it is small."""
        if total_bytes([x]) < self.smallest:
            return x
        with self._lock:
            while self._moved and self._moved[0]() is None:  # its graph is gone
                self._moved.popleft()
            host, event = self._copied(x, torch.device("cpu"))
            progress = Progress(host, event)
            self._moved.append(weakref.ref(progress))
        return Moved(host, x.device, progress)

    def back(self, moved: Moved) -> Tensor:
        """Return the tensor on its device, and prefetch the ones needed next."""
        with self._lock:
            progress = moved.progress
            if progress.fetched is None:
                self._fetch(progress, moved.host, moved.device)
            assert progress.fetched is not None
            x, event = progress.fetched
            progress.asked += 1
            if progress.asked == progress.layers:
                progress.fetched, progress.asked = None, 0
            if event is not None:
                stream = torch.cuda.current_stream(x.device)
                stream.wait_event(event)
                x.record_stream(stream)  # its memory was allocated on the other stream
            if not progress.queued:  # by another layer that shares it, or in an earlier backward pass
                return x
            while self._moved:  # it, and later or freed ones, leave the queue
                last = self._moved.pop()()
                if last is not None:
                    last.queued = False
                if last is progress:
                    break
            for one in reversed([reference() for reference in list(self._moved)[-self.ahead :]]):
                host = None if one is None else one.host()
                if one is not None and one.fetched is None and host is not None:
                    self._fetch(one, host, moved.device)
            return x

    def _fetch(self, progress: Progress, host: Tensor, device: torch.device) -> None:
        if progress.written is not None:
            self._stream(device).wait_event(progress.written)
        progress.fetched = self._copied(host, device)

    def _copied(self, x: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Return a copy of `x` on `device`, and the event of the copy (None if it is complete)."""
        if is_abstract(x):
            return torch.empty_like(x), None  # the host copy is abstract too
        cuda = x.device if x.device.type == "cuda" else device
        if cuda.type != "cuda":
            return x.to(device, copy=True), None
        stream = self._stream(cuda)
        if x.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(cuda))  # x is being computed there
        with torch.cuda.stream(stream):
            copy = torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=device.type == "cpu")
            copy.copy_(x, non_blocking=True)
            if x.device.type == "cuda":
                x.record_stream(stream)  # its memory is not reused before it is copied
            event = torch.cuda.Event()
            event.record(stream)
        return copy, event

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Swapper":
        copy = memo[id(self)] = Swapper(self.ahead, self.smallest)
        return copy

    def __reduce__(self) -> Any:
        return Swapper, (self.ahead, self.smallest)


@dataclass(frozen=True, repr=False)
class SwappingSaver(Saver):
    """Compresses through `saver` and moves the compressed tensors to host memory."""

    sees_held: ClassVar[bool] = True
    saver: Saver
    swapper: Swapper

    def __repr__(self) -> str:
        return f"{self.saver!r} in host memory"

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` in few bits, in host memory."""
        return self._swapped(self.saver.compress(x))

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x`, row by row, in few bits, in host memory."""
        return self._swapped(as_saver(self.saver).compress_rows(x))

    def compress_once(self, x: Tensor, rows: bool = False) -> Compressed:
        """Return `x` in few bits, in host memory; shared wherever `saver` gives the same codes to two layers."""
        compressed = as_saver(self.saver).compress_once(x, rows)
        if is_compiling():  # the compiler merges equal calls
            return self._swapped(compressed)
        swapped = self.swapper.found(compressed)
        if swapped is None:
            swapped = self._swapped(compressed)
            if isinstance(swapped, Swapped):
                self.swapper.note(compressed, swapped)
        return swapped

    def _swapped(self, compressed: Compressed) -> Compressed:
        if isinstance(compressed, Whole):
            return compressed
        if is_compiling():
            return InHostMemory(_with_parts(compressed, ops.to_host))
        tensors: list[Tensor] = []
        skeleton = take_apart(compressed, tensors)
        return Swapped(partial(put_together, skeleton), tuple(self.swapper.out(t) for t in tensors), self.swapper)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Pass the gradient on to `saver`."""
        self.swapper.forget()
        self.saver.observe(gradient, rstd)

    @property
    def has_dynamic_sizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the sizes of the codes depend on values."""
        return as_saver(self.saver).has_dynamic_sizes

    @property
    def is_traced(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether torch's compiler traces it."""
        return as_saver(self.saver).is_traced

    def with_codes_of(self, x: Tensor, way: int) -> Saver:
        """Return the saver of `x` in this graph, in host memory."""
        return replace(self, saver=as_saver(self.saver).with_codes_of(x, way))

    def observed_in_graph(self, compressed: Any, gradient: Tensor, rstd: Tensor | None = None) -> Any:
        """Pass the gradient on to `saver`."""
        parts = compressed if isinstance(compressed, tuple) else (compressed,)
        codes = tuple([part.codes if isinstance(part, InHostMemory) else part for part in parts])
        codes = observed(self.saver, codes, gradient, rstd)
        found = [
            replace(part, codes=c, gradient=gradient) if isinstance(part, InHostMemory) else c
            for part, c in zip(parts, codes, strict=True)
        ]
        return tuple(found) if isinstance(compressed, tuple) else found[0]


@dataclass(frozen=True, eq=False)
class Swapped:
    """A compressed tensor whose parts are in host memory."""

    put_together: Callable[[list[Tensor]], Compressed]
    tensors: tuple[Tensor | Moved, ...]
    swapper: Swapper

    @property
    def nbytes(self) -> int:
        """Bytes, on the device and in host memory together."""
        return total_bytes([t.host if isinstance(t, Moved) else t for t in self.tensors])

    def decompress(self) -> Tensor:
        """Return the tensor on its device."""
        # In reverse order of moving, as in prefetching.
        back = [self.swapper.back(t) if isinstance(t, Moved) else t for t in reversed(self.tensors)]
        return self.put_together(back[::-1]).decompress()


@dataclass(frozen=True, eq=False)
class InHostMemory:
    """A compressed tensor whose parts a compiled graph has copied to host memory.

    Attributes:
        codes: the compressed tensor, with its parts there.
        gradient: of the layer's output, in the backward pass: the parts return to its device.
    """

    codes: Compressed
    gradient: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self.codes.nbytes

    def decompress(self) -> Tensor:
        """Return the tensor on its device."""
        gradient = self.gradient
        assert gradient is not None, "observed before"
        return _with_parts(self.codes, lambda part: ops.to_device_of(part, gradient)).decompress()


def _with_parts(codes: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `PerGroup`'s codes with another copy of what lies on the tensor's device."""
    return replace(codes, packed=function(codes.packed), minimum=function(codes.minimum), range=function(codes.range))
