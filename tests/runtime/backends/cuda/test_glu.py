"""The gated linear unit's CUDA kernels without a GPU: compiled for GPUs, and run on the CPU beside the reference.

What runs is the module that launches them, with the launch itself replaced: g++ built the same source.
"""

import math

import pytest
import torch
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.backends.cuda import glu as cuda
from fewbit.runtime.backends.cuda.codegen.compiler import compile_source
from fewbit.runtime.backends.cuda.codegen.glu import glu_source
from fewbit.runtime.backends.reference import glu as reference
from fewbit.runtime.convert import formulas  # noqa: F401  (which names formula:swish)
from fewbit.runtime.tensors.table_registry import table_of
from glu_cases import same
from host_kernels import needs_gxx, needs_nvrtc, start_glu

HALVES = ("float16", "bfloat16")
ALL = (True, True, True)


def key_of(function, bits):
    return plan_of(function, (), bits, 4, "parts", None).table


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
    code, usages = compile_source(glu_source(table_of(key_of(function, bits)), dtype, function, (), *copies), arch)
    assert code
    assert {usage.kernel for usage in usages} == {"glu_forward", "glu_backward"}
    assert sum(usage.spilled + usage.stack for usage in usages) == 0
    assert max(usage.registers for usage in usages) <= 80


@pytest.fixture
def launched(monkeypatch):
    """CPU tensors go through the CUDA module, whose launches run on the CPU; the names of the kernels."""
    names = []

    def launch(name, x, plan, *arguments):
        names.append(name)
        start_glu(str(x.dtype).removeprefix("torch."), plan, name, 2, *arguments)

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(cuda, "available", lambda: True)
    return names


def numbers(n, dtype, seed):
    """Normal ones of all sizes, a constant group, an infinity and a NaN far behind."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=draw) * 10 ** (3 * torch.rand(n, generator=draw) - 2)
    x[256:512] = 0.3
    x[600:601] = math.inf
    x[900:901] = math.nan
    return x.to(dtype)


def assert_within_a_rounding(ours, theirs):
    """g++'s exp and torch's may differ by a last place of float32: of the result, one of its own at most."""
    step = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=2 * step, atol=torch.finfo(ours.dtype).tiny, equal_nan=True)


@needs_gxx
@pytest.mark.parametrize("n", [1, 7, 256, 1000, 5003])
@pytest.mark.parametrize(
    ("function", "dtype", "bits", "copies"),
    [
        ("relu", torch.float32, 1, (4, 4)),
        ("relu", torch.bfloat16, 1, (3, 5)),
        ("relu", torch.float16, 1, (1, 8)),
        ("silu", torch.float32, 3, (4, 4)),
        ("silu", torch.bfloat16, 3, (4, 4)),
        ("silu", torch.float16, 4, (6, 2)),
        ("sigmoid", torch.bfloat16, 2, (7, 4)),
    ],
    ids=str,
)
def test_kernels_are_the_reference(n, function, dtype, bits, copies, launched):
    gate, up, grad = (numbers(n, dtype, seed) for seed in range(3))
    plan = (function, (), key_of(function, bits), *copies)
    ours = cuda.forward(gate, up, (2**40 + 1, 2**62 + 5), *plan, False)
    theirs = reference.forward(gate, up, (2**40 + 1, 2**62 + 5), *plan, False)
    assert same(ours[1], theirs[1]) and same(ours[2], theirs[2]) and same(ours[4][:2], theirs[4][:2])
    if function == "relu":  # no exp: the copy of act(gate) too, bit for bit
        assert all(map(same, ours, theirs))
    else:
        assert_within_a_rounding(ours[0], theirs[0])
    for wanted in (ALL, (True, False, False), (False, True, False), (False, False, True)):
        results = cuda.backward(grad, theirs[1:], *plan, False, wanted)
        assert all(map(same, results, reference.backward(grad, theirs[1:], *plan, False, wanted)))
    assert launched == ["glu_forward"] + 4 * ["glu_backward"]


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
    assert launched == []
