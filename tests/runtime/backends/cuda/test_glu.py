"""What the gated linear unit's CUDA kernels leave to the reference.

What they compute: tests/runtime/test_glu_ops.py.
"""

import math

import pytest
import torch
from backends import launched_on_host
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.backends.cuda import glu as cuda
from fewbit.runtime.backends.reference import glu as reference
from fewbit.runtime.convert import formulas  # noqa: F401  (which names formula:swish)
from glu_cases import same


def key_of(function, bits):
    return plan_of(function, (), bits, 4, "parts", None).table


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
