"""Gated linear units on a GPU: forward torch's bits, and all else the reference's for equal seeds. Skipped without."""

import pytest
import torch
from backends import needs_gpu
from fewbit.functional import swiglu
from fewbit.nn import GatedMLP
from glu_cases import pair, relative
from torch.nn import functional as F

pytestmark = [pytest.mark.gpu, needs_gpu]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("keep", ["parts", "inputs", "exact"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_is_torch_s_and_gradients_are_near(dtype, keep):
    gate, up = (x.detach().cuda().requires_grad_() for x in pair((64, 1000), dtype))
    y, exact = swiglu(gate, up, bits=8, copy_bits=8, keep=keep), F.silu(gate) * up
    step = torch.finfo(dtype).eps if dtype == torch.float32 else 0  # in float32 a library's exp may differ by a place
    torch.testing.assert_close(y, exact, rtol=4 * step, atol=0)
    assert relative(torch.autograd.grad(y.sum(), gate)[0], torch.autograd.grad(exact.sum(), gate)[0]) < 6 / 255


def test_a_block_trains():
    mlp = GatedMLP(64, 256, bits=8, copy_bits=8, device="cuda")
    x = torch.randn(128, 64, device="cuda", requires_grad=True)
    exact = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    w = torch.randn_like(exact)
    ours, theirs = (torch.autograd.grad(y, [x, *mlp.parameters()], w) for y in (mlp(x), exact))
    assert all(relative(a, b) < 12 / 255 for a, b in zip(ours, theirs, strict=True))
