"""Estimates times for a GPU that is not there, on the meta device: bytes over bandwidth, operations over speed."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.names import nearest_hint
from ..tensors.traits import tensors_among
from .problem import GROUPS, OUTLIERS, ROTATED
from .seconds import Changed, Speeds
from .step import Step


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


GIB = 1 << 30
# Codes beside those of groups: outliers are sought first; turning took 1.3 times as long on an H100.
_LONGER = {GROUPS: 1.0, OUTLIERS: 2.0, ROTATED: 1.3}


DEVICES = {
    "t4": Device(16 * GIB, 320e9, 65e12, 12e9),
    "rtx3090": Device(24 * GIB, 936e9, 71e12, 25e9),
    "rtx4090": Device(24 * GIB, 1008e9, 165e12, 25e9),
    "l40s": Device(48 * GIB, 864e9, 362e12, 25e9),
    "a100": Device(80 * GIB, 2039e9, 312e12, 25e9),
    "h100": Device(80 * GIB, 3350e9, 989e12, 55e9),
    "h200": Device(141 * GIB, 4800e9, 989e12, 55e9),
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
        self._modules = {names[name]: seconds for name, seconds in counting.modules.items()}
        self._attentions = {names[name]: seconds for name, seconds in counting.attentions.items()}

    @property
    def step(self) -> float:
        """Of an exact step: a backward pass takes twice a forward pass."""
        return 3 * self.forward("")

    def forward(self, module: str) -> float:
        """Of the forward pass of a module."""
        return self._modules.get(module, 0.0)

    def attention(self, module: str) -> float:
        """Of one `scaled_dot_product_attention` that a module calls."""
        return self._attentions.get(module, 0.0)

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
        moved = _moved_bytes(func._overloadpacket.__name__, (args, kwargs), result)
        seconds = max(operations / self._device.flops, moved / self._device.bandwidth) / self._device.efficiency
        for name in self._tracker.parents:
            self.modules[name] += seconds
            if "attention" in str(func):
                self.attentions[name] += seconds
        return result


def _moved_bytes(name: str, inputs: Any, result: Any) -> int:
    """Return the bytes that an operation reads and writes: none, if it returns a view."""
    given, made = tensors_among(inputs), tensors_among(result)
    storages = {x.untyped_storage()._cdata for x in given}
    written = sum(x.nbytes for x in made if x.untyped_storage()._cdata not in storages)
    if name in _ROWS:
        return 2 * written
    is_view = not written and not name.endswith("_")
    return 0 if is_view else written + sum(x.nbytes for x in given)
