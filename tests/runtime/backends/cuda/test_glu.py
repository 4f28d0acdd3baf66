"""The gated linear unit's CUDA kernels compiled for GPUs, and what they leave to the reference.

What they compute: tests/runtime/test_glu_ops.py.
"""

import math

import pytest
import torch
from backends import launched_on_host
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.backends.cuda import glu as cuda
from fewbit.runtime.backends.cuda.codegen.glu import glu_source
from fewbit.runtime.backends.reference import glu as reference
from fewbit.runtime.convert import formulas  # noqa: F401  (which names formula:swish)
from fewbit.runtime.tensors.table_registry import table_of
from glu_cases import same
from host_kernels import needs_nvrtc, registers_without_spills

HALVES = ("float16", "bfloat16")
ALL = (True, True, True)


def key_of(function, bits):
    return plan_of(function, (), bits, 4, "parts", None).table


@pytest.mark.sample(2)
@needs_nvrtc
@pytest.mark.parametrize(
    ("function", "bits", "copies", "dtype", "arch"),
    [
        *(("silu", 3, (4, 4), dtype, arch) for dtype in HALVES for arch in ("sm_80", "sm_90", "sm_100")),
        ("silu", 3, (4, 4), "float32", "sm_90"),
        ("gelu_tanh", 3, (4, 4), "bfloat16", "sm_100"),
        ("gelu", 4, (8, 3), "float32", "sm_80"),
        ("relu", 1, (2, 2), "float16", "sm_90"),
        ("sigmoid", 2, (5, 6), "bfloat16", "sm_80"),
    ],
    ids=str,
)
def test_kernels_compile_and_do_not_spill(function, bits, copies, dtype, arch):
    source = glu_source(table_of(key_of(function, bits)), dtype, function, (), *copies)
    assert max(registers_without_spills(source, arch, {"glu_forward", "glu_backward"}).values()) <= 80


@pytest.fixture
def launched(monkeypatch):
    """CPU tensors go through the CUDA module, whose launches run on the CPU; the names of the kernels."""
    return launched_on_host(monkeypatch)


def numbers(n, dtype, seed):
    """Normal ones of all sizes, a constant group, an infinity and a NaN far behind."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=draw) * 10 ** (3 * torch.rand(n, generator=draw) - 2)
    x[256:512] = 0.3
    x[600:601] = math.inf
    x[900:901] = math.nan
    return x.to(dtype)


def test_what_they_do_not_serve_is_the_reference_s(launched):
    key = key_of("silu", 3)
    for dtype, plan, derived in (
        (torch.float64, ("silu", (), key, 4, 4), False),
        (torch.float32, ("silu", (), "", 4, 4), True),
        (torch.float32, ("silu", (), key, 4, 0), False),
        (torch.float32, ("formula:swish", (), key, 4, 4), False),
    ):
        gate, up = numbers(300, dtype, 0), numbers(300, dtype, 1)
        assert all(
            map(
                same,
                cuda.forward(gate, up, (1, 2), *plan, derived),
                reference.forward(gate, up, (1, 2), *plan, derived),
            )
        )
    assert not {"glu_forward", "glu_backward"} & {*launched}
