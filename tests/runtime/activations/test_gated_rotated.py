"""Gated units with rotated copies: what they are made of, their bytes, means and errors, in all that makes them."""

import copy
import pickle

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.functional import swiglu
from fewbit.nn import GatedMLP
from fewbit.runtime import ops
from fewbit.runtime.activations.gated_modules import SwiGLU
from glu_cases import UNITS, grads, kept_bytes, pair, relative, same
from torch.nn import functional as F

ROTATED = {"quantizer": "rotated"}
KEEPS = ("parts", "inputs")


@pytest.mark.parametrize("shape", [(37, 200), (9,), (), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_forward_is_torch_s_and_gradients_have_its_shape(dtype, shape):
    gate, up = pair(shape, dtype)
    y = swiglu(gate, up, **ROTATED)
    assert same(y, F.silu(gate) * up)
    assert all(g.shape == gate.shape and g.dtype == dtype and g.isfinite().all() for g in grads(y, (gate, up)))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_bytes_are_those_of_the_quantizer(needs):
    """Of 200 elements a row two groups, of 128 and 64, and a rest of 8; a key of 8 bytes for both copies."""
    gate, up = (x.detach().requires_grad_(need) for x, need in zip(pair((6, 200)), needs, strict=True))
    kept, _ = kept_bytes(lambda g, u: swiglu(g, u, bits=3, copy_bits=(2, 5), **ROTATED), gate, up)
    rows, scales = 6 * 200 // 8, 6 * 3 * 2
    assert kept == needs[0] * (rows * (3 + 2) + scales) + needs[1] * (rows * 5 + scales) + 8


def test_what_they_are_made_of(backend):
    """With the copies of one key, and the code of the few-bit activation alone, on each backend."""
    gate, up = (backend.put(x.detach()).requires_grad_() for x in pair((5, 200)))
    torch.manual_seed(5)
    y = swiglu(gate, up, copy_bits=(3, 2), **ROTATED)
    torch.manual_seed(5)
    key, offsets, bits = ops.draw_seeds(up, 1), [0, 1], [3, 2]
    tensors = [up.detach(), F.silu(gate.detach())]
    buffers = ops.rotated_quantize_buffers(tensors, key, offsets, bits, [True] * 2, 128)
    copies = ops.rotated_dequantize_buffers(buffers, key, offsets, bits, [200] * 2, 128, torch.float32)
    w = torch.randn(5, 200, generator=torch.Generator().manual_seed(9)).to(y)
    level = torch.autograd.grad(fewbit.functional.silu(gate), gate, torch.ones_like(gate))[0]
    d_gate, d_up = grads(y, (gate, up))
    torch.testing.assert_close(d_gate, w * copies[0] * level)
    assert same(d_up, w * copies[1])


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_at_two_bits_they_err_less_than_groups(name, keep):
    """Of copies of normal numbers .133 of the square is left, and .5 in groups: together .52 of the deviation."""
    ours, act = UNITS[name]
    inputs = pair((64, 256))
    exact = grads(act(inputs[0]) * inputs[1], inputs)
    errors = []
    for quantizer in ("groups", "rotated"):
        y = ours(*inputs, bits=8, copy_bits=2, keep=keep, quantizer=quantizer)
        errors.append([relative(a, b) for a, b in zip(grads(y, inputs), exact, strict=True)])
    assert all(rotated < 0.75 * groups for groups, rotated in zip(*errors, strict=True))


def test_a_block_s_gradients_are_torch_s_on_average_its_product_and_input_too():
    mlp, x = GatedMLP(64, 128, bits=8, copy_bits=2, input_bits=2, **ROTATED), torch.randn(16, 64)
    parameters, draws = [*mlp.parameters()], 200
    exact = grads(mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)), parameters)
    found = [grads(mlp(x), parameters) for _ in range(draws)]
    for i, wanted in enumerate(exact):
        mean = torch.stack([one[i] for one in found]).double().mean(0)
        assert relative(mean, wanted) < 2 * relative(found[0][i], wanted) / draws**0.5 + 0.003  # the code's of 8 bits


@pytest.mark.parametrize("keep", KEEPS)
def test_plain_hooked_and_compiled_blocks_agree(keep):
    mlp, x = GatedMLP(64, 128, keep=keep, input_bits=3, **ROTATED), torch.randn(4, 8, 64).requires_grad_()
    inputs = [x, *mlp.parameters()]

    def gradients(run):
        torch.manual_seed(3)
        return grads(run(x), inputs)

    plain = gradients(mlp)
    compiled = gradients(torch.compile(mlp, backend="aot_eager", fullgraph=True))
    assert all(map(same, compiled, plain))
    mlp.input_bits = None  # a hooked block draws for its input when that is saved, first
    plain = gradients(mlp)
    mlp.down_proj.register_forward_hook(lambda *_: None)
    for a, b in zip(plain, gradients(mlp), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", [SwiGLU, lambda **options: GatedMLP(16, 32, **options)])
def test_modules_say_so_are_copied_and_hostile_pickles_refused(make):
    module = make(**ROTATED)
    assert "quantizer='rotated'" in repr(module) and "quantizer" not in repr(make())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.plan == module.plan and other.plan.is_rotated
    module.plan = module.plan._replace(is_rotated=3)
    with pytest.raises(FewbitError, match=r"^is_rotated tells whether copies are rotated, not 3$"):
        pickle.loads(pickle.dumps(module))


def test_an_unknown_quantizer_is_refused():
    with pytest.raises(FewbitError, match=r"^quantizer is 'groups' or 'rotated', not 'turned'$"):
        swiglu(*pair(8), quantizer="turned")
