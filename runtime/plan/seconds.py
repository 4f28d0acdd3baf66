"""Estimates the time that a plan adds to a step: measured on this machine, or by a roofline for another.

Quantizers.of(step)     runs quantizers on a tensor of the step's dtype
Measured(step)          runs the step a few times too, exactly and with hooks
Roofline(step, device)  for a GPU that is not there, on the meta device: bytes over bandwidth, operations over speed
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.names import nearest_hint
from ..quantizers import Compressed, Outlier, PerGroup, Rotated
from ..saved.hooks import compress_saved_tensors
from ..tensors.traits import DTYPES, tensors_among
from .gradient_error import outliers_of
from .places import ByCall
from .problem import GROUPS, OUTLIERS, ROTATED
from .step import Step

ELEMENTS = 1 << 20  # of the tensor that quantizers are timed with
_TYPICAL = 4  # bits of the step that tells how long quantizers take within it
COPIED = 1 << 26  # bytes of a copy to host memory that is timed
RUNS = 3  # of a step with and without a change, of which the fastest count: whatever else runs only adds
CALL = 30e-6  # seconds of Python that a tensor takes in hooks, there and back

Changed = Callable[[], AbstractContextManager[None]]  # a model is changed within its block


class Speeds:
    """Seconds of a step and of what a plan may add to it: here a unit, and nothing, where nobody asks for times.

    Attributes:
        step: of an exact step.
        modules, attentions: of the forward pass of a module, and of one `scaled_dot_product_attention` in it, by name.
    """

    step: float = 1.0
    modules: Mapping[str, float] = {}
    attentions: Mapping[str, float] = {}

    def forward(self, module: str) -> float:
        """Of the forward pass of a module, by name."""
        return self.modules.get(module, 0.0)

    def attention(self, module: str) -> float:
        """Of one `scaled_dot_product_attention` that a module calls, in the forward pass."""
        return self.attentions.get(module, 0.0)

    def codes(self, elements: int, bits: int, itemsize: int = 4, method: str = GROUPS) -> float:
        """To quantize and dequantize a tensor once each, in codes of one of these methods."""
        return 0.0

    def transfer(self, nbytes: int) -> float:
        """To copy bytes to host memory and back, as far as nothing else hides it."""
        return 0.0

    def added(self, step: Step, changed: Changed, estimate: float = 0.0) -> float:
        """That an exact step takes longer while its model is changed; below 0 if it is faster."""
        return 0.0


class Scaled(Speeds):
    """Times of a batch that is larger by a factor than the one that was measured, of which bytes are given."""

    def __init__(self, speeds: Speeds, factor: float) -> None:
        self.step = speeds.step * factor
        self.modules = {name: seconds * factor for name, seconds in speeds.modules.items()}
        self.attentions = {name: seconds * factor for name, seconds in speeds.attentions.items()}
        self.codes, self.transfer = speeds.codes, speeds.transfer
        self.added = lambda *args, **keywords: speeds.added(*args, **keywords) * factor


@dataclass(frozen=True)
class Quantizers:
    """Times of quantizers on this machine, each timed when it is asked for first.

    Attributes:
        device, dtype: of the tensors.
        factor: by which they take longer than alone, on memory that is ready and in the cache.
    """

    device: torch.device
    dtype: torch.dtype
    factor: float = 1.0
    _per_element: dict[PerGroup | Outlier | Rotated, float] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Step) -> "Quantizers":
        """Return those for the tensors of a step."""
        dtypes = [p.dtype for p in step.model.parameters() if p.dtype in DTYPES]
        return cls(step.device, dtypes[0] if dtypes else torch.float32)

    def within(self, factor: float) -> "Quantizers":
        """Return the same where they take `factor` times as long as alone, or as long."""
        return replace(self, factor=max(1.0, factor))

    def codes(self, elements: int, bits: int, method: str = GROUPS) -> float:
        """To quantize and dequantize a tensor once each."""
        quantizer = {GROUPS: PerGroup, OUTLIERS: outliers_of, ROTATED: Rotated}[method](bits)
        if quantizer not in self._per_element:
            x = torch.linspace(-3, 3, ELEMENTS, device=self.device).sin().to(self.dtype).view(64, -1)
            quantizer.compress(x).decompress()
            times = []
            for _ in range(3):
                start = now_on(self.device)
                quantizer.compress(x).decompress()
                times.append(now_on(self.device) - start)
            self._per_element[quantizer] = median(times) / ELEMENTS
        return CALL + elements * self._per_element[quantizer] * self.factor


class Measured(Speeds):
    """Times of this machine.

    Quantizers are faster alone than in a step. So steps with hooks around them, which save all in 4 bits, tell by which
    factor.

    Args:
        step: on real tensors; it has run before.
        runs: of the step, exactly and with hooks in turn; of each the lower median counts.
    """

    def __init__(self, step: Step, runs: int = 2) -> None:
        self._device = step.device
        self._host: float | None = None  # bytes a second, measured when it is asked for first
        stopwatch, exact, hooked = _Stopwatch(step.model, partial(now_on, step.device)), [], []
        sizes: list[int] = []  # of each tensor that is saved, its elements

        def noted(x: Tensor, quantizer: PerGroup) -> Compressed:
            sizes.append(x.numel())
            return quantizer.compress(x)

        with step.apart():
            for _ in range(runs):  # in turn, for a machine's speed drifts
                exact.append(step_seconds(step, stopwatch))
                sizes.clear()
                around = compress_saved_tensors(ByCall(noted, PerGroup(_TYPICAL)))
                hooked.append(step_seconds(step, around))
        self.step = median_low(exact)
        self.modules = {name: median_low(times) for name, times in stopwatch.modules.items()}
        self.attentions = {name: median_low(times) for name, times in stopwatch.attentions.items()}
        # These hooks compute attention again, too.
        of_attentions = sum(map(sum, stopwatch.attentions.values())) / runs
        added = median_low(hooked) - self.step - of_attentions - CALL * len(sizes)
        quantizers = Quantizers.of(step)
        alone = sum(quantizers.codes(elements, _TYPICAL) - CALL for elements in sizes)
        self._quantizers = quantizers.within(added / alone) if alone else quantizers

    def codes(self, elements: int, bits: int, itemsize: int = 4, method: str = GROUPS) -> float:
        """To quantize and dequantize a tensor once each."""
        return self._quantizers.codes(elements, bits, method)

    def transfer(self, nbytes: int) -> float:
        """To copy bytes to host memory and back, half of it hidden; on the CPU there is no other memory."""
        if self._device.type != "cuda":
            return 0.0
        if self._host is None:
            self._host = host_bandwidth(self._device, partial(now_on, self._device))
        return nbytes / self._host

    def added(self, step: Step, changed: Changed, estimate: float = 0.0) -> float:
        """That an exact step takes longer while its model is changed: the least of `RUNS` each, in turn."""
        plain, other = [], []
        with step.apart():
            for _ in range(RUNS):
                plain.append(step_seconds(step))
                with changed():
                    other.append(step_seconds(step))
        return min(other) - min(plain)


def now_on(device: torch.device) -> float:
    """Return the seconds of a clock, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def host_bandwidth(device: torch.device, now: Callable[[], float], nbytes: int = COPIED) -> float:
    """Return the bytes a second that are copied to pinned host memory and back, measured.

    Args:
        device: whose memory is copied.
        now: a clock that waits for the device.
        nbytes: of a copy.
    """
    x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    times = []
    for _ in range(4):
        start = now()
        host.copy_(x, non_blocking=True)
        x.copy_(host, non_blocking=True)
        times.append(now() - start)
    return 2 * nbytes / median(times[1:])


def step_seconds(step: Step, around: AbstractContextManager[Any] | None = None) -> float:
    """Return the seconds of a step, whose forward pass runs within a context."""
    with around or nullcontext():
        start = now_on(step.device)
        loss, output = step.forward()
    torch.autograd.grad(loss, step.parameters, allow_unused=True)
    del loss, output
    return now_on(step.device) - start


class _Stopwatch(TorchFunctionMode):
    """Times the modules of a model, and its attentions, within a block.

    Attributes:
        modules, attentions: seconds of each call, by name of the module.
    """

    def __init__(self, model: nn.Module, now: Callable[[], float]) -> None:
        super().__init__()
        self._model, self._now = model, now
        self._hooks: list[Any] = []
        self.modules: defaultdict[str, list[float]] = defaultdict(list)
        self.attentions: defaultdict[str, list[float]] = defaultdict(list)
        self._running: list[tuple[str, float]] = []

    def __enter__(self) -> "_Stopwatch":
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            self._hooks.append(module.register_forward_hook(partial(self._leave, name)))
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, name: str, *_: object) -> None:
        self._running.append((name, self._now()))

    def _leave(self, name: str, *_: object) -> None:
        started, start = self._running.pop()
        assert started == name
        self.modules[name].append(self._now() - start)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention or not self._running:
            return func(*args, **(kwargs or {}))
        start = self._now()
        output = func(*args, **(kwargs or {}))
        self.attentions[self._running[-1][0]].append(self._now() - start)
        return output


# ---- a GPU that is not there -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What a data sheet says of a GPU, and the share of it that training reaches.

    Attributes:
        memory: bytes.
        bandwidth: bytes a second, of its memory.
        flops: operations a second of dense matrix products in bfloat16.
        host: bytes a second to host memory, in one direction.
        efficiency: share of `flops` and of `bandwidth` that is reached.
    """

    memory: int
    bandwidth: float
    flops: float
    host: float
    efficiency: float = 0.5


_GIB = 1 << 30
# Codes beside those of groups: outliers are sought first; turning took 1.3 times as long on an H100.
_LONGER = {GROUPS: 1.0, OUTLIERS: 2.0, ROTATED: 1.3}


DEVICES = {
    "t4": Device(16 * _GIB, 320e9, 65e12, 12e9),
    "rtx3090": Device(24 * _GIB, 936e9, 71e12, 25e9),
    "rtx4090": Device(24 * _GIB, 1008e9, 165e12, 25e9),
    "l40s": Device(48 * _GIB, 864e9, 362e12, 25e9),
    "a100": Device(80 * _GIB, 2039e9, 312e12, 25e9),
    "h100": Device(80 * _GIB, 3350e9, 989e12, 55e9),
    "h200": Device(141 * _GIB, 4800e9, 989e12, 55e9),
}


def device_of(name: str) -> Device:
    """Return the GPU of a name in `DEVICES`; raise FewbitError if there is none."""
    if not (isinstance(name, str) and name in DEVICES):
        raise FewbitError(
            f"{shown(name)} is no GPU that fewbit knows: {', '.join(DEVICES)}{nearest_hint(name, DEVICES)}"
        )
    return DEVICES[name]


class Roofline(Speeds):
    """Times by operations and bytes, for a device that is not there.

    An operation takes as long as its arithmetic or its memory traffic, whichever is longer.

    Args:
        step: on any tensors, such as those of the meta device; its forward pass runs once to count.
        device: the GPU.
    """

    def __init__(self, step: Step, device: Device) -> None:
        self._device = device
        counting = _Counting(device)
        with step.apart(), torch.no_grad(), counting:
            step.output()
        root = type(step.model).__name__
        names = {name: "" if name in (root, "Global") else name.removeprefix(f"{root}.") for name in counting.modules}
        self.modules = {names[name]: seconds for name, seconds in counting.modules.items()}
        self.attentions = {names[name]: seconds for name, seconds in counting.attentions.items()}
        self.step = 3 * self.forward("")  # a backward pass takes twice a forward pass

    def codes(self, elements: int, bits: int, itemsize: int = 4, method: str = GROUPS) -> float:
        """To quantize and dequantize a tensor: it is read and written once each, its codes as well."""
        alone = 2 * elements * (itemsize + bits / 8) / (self._device.bandwidth * self._device.efficiency)
        return _LONGER[method] * alone

    def transfer(self, nbytes: int) -> float:
        """To copy bytes to host memory and back; half of it is hidden behind computation."""
        return nbytes / self._device.host

    def added(self, step: Step, changed: Changed, estimate: float = 0.0) -> float:
        """That an exact step takes longer while its model is changed: the estimate of who changes it."""
        return estimate


# Operations that read of their input what they return.
_ROWS = frozenset(("embedding", "index", "index_select", "gather"))


class _Counting(TorchDispatchMode):
    """Adds up the times of operations by the modules that they are in.

    Attributes:
        modules, attentions: seconds by `ModuleTracker`'s names, of all operations and of attention alone.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.modules: defaultdict[str, float] = defaultdict(float)
        self.attentions: defaultdict[str, float] = defaultdict(float)
        self._device = device
        self._tracker = ModuleTracker()

    def __enter__(self) -> "_Counting":
        self._tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._tracker.__exit__(*details)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = flop_registry.get(func._overloadpacket)
        operations = flops(*args, **(kwargs or {}), out_val=result) if flops else 0
        name = func._overloadpacket.__name__
        given = tensors_among((args, kwargs))
        storages = {x.untyped_storage()._cdata for x in given}
        written = sum(x.nbytes for x in tensors_among(result) if x.untyped_storage()._cdata not in storages)
        if name in _ROWS:
            moved = 2 * written
        else:  # a view reads and writes nothing
            moved = written + sum(x.nbytes for x in given) if written or name.endswith("_") else 0
        seconds = max(operations / self._device.flops, moved / self._device.bandwidth) / self._device.efficiency
        for name in self._tracker.parents:
            self.modules[name] += seconds
            if "attention" in str(func):
                self.attentions[name] += seconds
        return result
