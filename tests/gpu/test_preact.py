"""Pre-activation layers on a GPU: forward torch's bits, backward as in plain torch. Without a GPU skipped."""

import copy
from unittest.mock import patch

import pytest
import torch
from backends import needs_gpu
from fewbit import PreActConv2d
from fewbit.runtime.backends.cuda import preact as cuda
from torch.nn import functional as F

pytestmark = [pytest.mark.gpu, needs_gpu]


def step(layer, x, gradient):
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    out = layer(leaf)
    out.backward(gradient)
    return out.detach(), {"x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(16, 24, 9, 7), (8, 64, 56, 56), (33, 300, 2, 2)])
@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_a_step(dtype, layout, shape, slope):
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    layer = PreActConv2d(shape[1], 8, 1, bits=4, negative_slope=slope, device="cuda", dtype=dtype)
    with torch.no_grad():
        layer.norm.weight.normal_()
        layer.norm.weight[::5] = 0
        layer.norm.bias.normal_()
    plain = copy.deepcopy(layer)
    A = F.leaky_relu(copy.deepcopy(layer).norm(x), slope) if slope else F.relu(copy.deepcopy(layer).norm(x))
    expected = layer.linear(A)
    gradient = torch.randn_like(expected)
    out, gradients = step(layer, x, gradient)
    assert torch.equal(out, expected)
    with patch.object(cuda, "serves", lambda x: False):
        _, theirs = step(plain, x, gradient)
    precision = torch.finfo(dtype).eps
    for name, one in theirs.items():
        # Roundings of the dtype, and of sums in another order.
        scale = one.float().abs().max().item()
        torch.testing.assert_close(gradients[name].float(), one.float(), rtol=0, atol=max(1e-4, 4 * precision) * scale)


def test_a_layer_waits_for_nothing():
    layer, x = PreActConv2d(8, 8, 3, padding=1, device="cuda"), torch.randn(4, 8, 16, 16, device="cuda")
    layer(x).sum().backward()  # compiles and loads
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
