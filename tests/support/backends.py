"""The backends that tests of kernels cross, by the fixture `backend` of tests/runtime/conftest.py.

    cpu         the CPU's kernels
    host-cuda   the CUDA kernels, built by g++ and run on the CPU by the modules that launch them on a GPU
    cuda        on a GPU; `make gpu` runs these tests where there is one

Each is held against plain torch (backends/reference), bit for bit where nothing but arithmetic is at work.
"""

import functools
from dataclasses import dataclass, field
from importlib import import_module

import pytest
import torch
from fewbit.quantizers import FixedPoint, Outlier, PerGroup, Rotated
from fewbit.runtime.backends.cuda import activation, fixed_point, glu, outlier, per_group, preact, rotated, rounding
from fewbit.runtime.backends.cuda.codegen.compiler import has_compiler
from fewbit.runtime.backends.cuda.codegen.fixed_point import ELEMENTS_PER_BLOCK
from fewbit.runtime.tensors.levels import table_of
from fewbit.runtime.tensors.packing import SampleBits
from host_kernels import (
    HostKernels,
    needs_gxx,
    start_fixed_point,
    start_glu,
    start_outlier,
    start_per_group,
    start_rotated,
    start_rounding,
)
from quantizer_cases import OUTLIER_PARTS, reference, same_bits

_FOLDERS = {"cpu": "cpu", "host-cuda": "cuda", "cuda": "cuda"}
_FAMILIES = ("per_group", "fixed_point", "outlier", "rotated")
_PARTS = {
    PerGroup: ("packed", "minimum", "range"),
    FixedPoint: ("packed",),
    Outlier: OUTLIER_PARTS,
    Rotated: ("packed", "scale"),
}


def _why_no_gpu():
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    return "" if has_compiler() else "a GPU without cuda-core: pip install 'cuda-core[cu13]', or cu12"


needs_gpu = pytest.mark.skipif(bool(_why_no_gpu()), reason=_why_no_gpu())
BACKENDS = [
    "cpu",
    pytest.param("host-cuda", marks=needs_gxx),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
]


@dataclass(frozen=True)
class Backend:
    """A backend, with the tensors of tests going through it.

    Attributes:
        name: one of `BACKENDS`.
        launched: names of the CUDA kernels that ran on the CPU.
    """

    name: str
    launched: list = field(default_factory=list)

    @property
    def bits(self):
        """Numbers of bits for tests of all of them: g++ builds kernels for each, which takes a second."""
        return (2, 3, 4) if self.name == "host-cuda" else range(1, 9)

    def module(self, family):
        """The backend's module of a family of ops."""
        return import_module(f"fewbit.runtime.backends.{_FOLDERS[self.name]}.{family}")

    def put(self, x):
        """`x` where the backend works."""
        return x.cuda() if self.name == "cuda" and isinstance(x, torch.Tensor) else x


def backend_of(name, monkeypatch):
    """The backend of that name, serving the CPU's tensors while `monkeypatch` lasts if it is host-cuda."""
    if name != "host-cuda":
        return Backend(name)
    found = Backend(name, launched_on_host(monkeypatch))
    for family in _FAMILIES:
        monkeypatch.setattr(f"fewbit.runtime.quantizers.{family}.cpu", found.module(family))
    monkeypatch.setattr("fewbit.runtime.layers.preact.function.has_kernels", lambda x: False)
    return found


def launched_on_host(monkeypatch):
    """Let the modules that launch CUDA kernels serve the CPU's tensors, by g++'s kernels; the names of those that ran.

    Two blocks at most, so that a block takes several parts of the work.
    """
    launched = []

    def launch_per_group(name, x, rows, blocks, *arguments):
        if blocks:
            launched.append(name)
            bits = rows.bits if isinstance(rows.bits, int) else None
            start_per_group(_name(x), bits, name, min(blocks, 2), *arguments)

    def launch_fixed_point(name, like, bits, elements, *arguments, per_block=ELEMENTS_PER_BLOCK):
        if elements:
            launched.append(name)
            start_fixed_point(_name(like), bits, name, min(-(-elements // per_block), 2), *arguments)

    def launch_outlier(name, like, bits, blocks, *arguments):
        launched.append(name)
        start_outlier(_name(like), bits, name, blocks, *arguments)

    def activation_kernel(name, table, dtype, device, function=None, parameters=()):
        return _ActivationOnHost(name, _activation_library(table, dtype, function, parameters), launched)

    def launch_glu(name, x, plan, *arguments):
        launched.append(name)
        start_glu(_name(x), plan, name, 2, *arguments)

    def launch_rounding(x, forward, bits, *arguments):
        if x.numel():
            launched.append("encode_at_random" if forward is None else "forward_at_random")
            start_rounding(_name(x), bits, forward, min(-(-x.numel() // 2048), 2), *arguments)

    def launch_rotated(name, x, bits, size, blocks, *arguments):
        if blocks:
            launched.append(name)
            start_rotated(_name(x), bits, size if size >= 64 else None, name, min(blocks, 2), *arguments)

    monkeypatch.setattr(rotated, "_launch", launch_rotated)
    monkeypatch.setattr(rotated, "serves", lambda x: True)
    monkeypatch.setattr(rounding, "_launch", launch_rounding)
    monkeypatch.setattr(rounding, "available", lambda device: True)
    monkeypatch.setattr(activation, "_kernel", activation_kernel)
    monkeypatch.setattr(activation, "available", lambda device: True)
    monkeypatch.setattr(per_group, "_launch", launch_per_group)
    monkeypatch.setattr(per_group, "serves", lambda x, G: G % 8 == 0 or x.shape[1] <= G)
    for module in (fixed_point, preact):
        monkeypatch.setattr(module, "launch", launch_fixed_point)
        monkeypatch.setattr(module, "serves", lambda x: True)
    monkeypatch.setattr(outlier, "_launch", launch_outlier)
    monkeypatch.setattr(outlier, "_most_blocks", lambda device: 2)
    monkeypatch.setattr(outlier, "serves", lambda x: True)
    monkeypatch.setattr(glu, "_launch", launch_glu)
    monkeypatch.setattr(glu, "available", lambda device: True)
    return launched


@functools.cache
def _activation_library(table, dtype, function, parameters):
    return HostKernels(table_of(table), dtype, function, parameters)


@dataclass(frozen=True)
class _ActivationOnHost:
    """A table's kernel as the module that launches it holds one."""

    name: str
    kernels: HostKernels
    launched: list

    @property
    def bits(self):
        return self.kernels.bits

    def launch(self, x, *pointers):
        if x.numel():
            self.launched.append(self.name)
            self.kernels.run(self.name, 2, *pointers, x.numel())


def _name(x):
    return str(x.dtype).removeprefix("torch.")


def assert_like_the_reference(backend, quantizer, x, seed=None, **arguments):
    """What a quantizer makes of `x` is what it makes in plain torch, bit for bit, there and back.

    The kernels' names are left in `backend.launched`.
    """
    backend.launched.clear()

    def draw():
        return {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}

    there = {name: v if name == "sample_bits" else backend.put(v) for name, v in arguments.items()}
    if isinstance(given := arguments.get("sample_bits"), SampleBits):
        there["sample_bits"] = SampleBits(backend.put(given.bits), given.room)
    ours = quantizer.compress(backend.put(x), **there, **draw())
    decoded = ours.decompress()
    with reference():
        plain = quantizer.compress(x, **arguments, **draw())
        expected = plain.decompress()
    for part in _PARTS[type(quantizer)]:
        assert same_bits(getattr(ours, part).cpu(), getattr(plain, part)), part
    assert same_bits(decoded.cpu(), expected)
    if backend.name == "host-cuda" and x.numel() and not isinstance(quantizer, Rotated):  # whose rows may not be served
        assert backend.launched
