"""GatedMLP: the forward bits, what is kept, gradients, LoRA and frozen weights, compile, checkpoint, autocast."""

import copy
import pickle

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.memory import profile
from fewbit.nn import GatedMLP
from glu_cases import grads, kept_bytes, relative, same
from torch import nn
from torch._C import _autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HIDDEN, WIDE, TOKENS = 64, 256, (4, 32)
N = 4 * 32  # tokens
PARTS = N * WIDE * 11.25 / 8


def block(dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    return GatedMLP(HIDDEN, WIDE, dtype=dtype, **options)


def tokens(dtype=torch.float32, requires_grad=True):
    return (
        torch.randn(*TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_(requires_grad)
    )


def eager(mlp, x):
    gate, up = mlp.gate_up_proj(x).chunk(2, -1) if mlp.fused else (mlp.gate_proj(x), mlp.up_proj(x))
    return mlp.down_proj(F.silu(gate) * up)


class Lora(nn.Module):
    """A frozen projection and a trained one of low rank beside it, as peft's."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(base.in_features, 4, bias=False)
        self.B = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


def with_lora(mlp):
    for name in list(mlp._modules):
        setattr(mlp, name, Lora(getattr(mlp, name)))
    return mlp


# Before torch 2.7 a profile does not see what hooked projections keep, and its own hooks make all of them that.
seen = pytest.mark.skipif(not hasattr(_autograd, "_top_saved_tensors_default_hooks"), reason="torch does not tell")


class TestForward:
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("keep", ["parts", "inputs", "exact"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_is_eager_torch_s_bit_for_bit(self, dtype, keep, fused):
        mlp, x = block(dtype, keep=keep, fused=fused, bias=True), tokens(dtype)
        assert same(mlp(x), eager(mlp, x))
        with torch.no_grad():
            assert same(mlp(x), eager(mlp, x))

    def test_any_number_of_dimensions(self):
        mlp = block()
        for shape in ((HIDDEN,), (0, HIDDEN), (2, 3, 4, HIDDEN)):
            x = torch.randn(shape, requires_grad=True)
            y = mlp(x)
            assert same(y, eager(mlp, x))
            assert grads(y, (x,))[0].shape == shape


class TestKept:
    @pytest.mark.parametrize("fused", [False, True])
    def test_by_default_x_and_the_parts(self, fused):
        assert profile(block(fused=fused), tokens()).total == N * HIDDEN * 4 + PARTS

    @seen
    def test_x_in_few_bits(self):
        groups = 0.5  # bits: no group reaches over the 64 features of a token
        assert profile(block(input_bits=4), tokens()).total == N * HIDDEN * (4 + groups) / 8 + PARTS

    def test_leanest_and_exact(self):
        assert profile(block(keep="inputs"), tokens()).total == N * HIDDEN * 4 + N * WIDE * 8.25 / 8
        assert profile(block(keep="exact"), tokens()).total == N * HIDDEN * 4 + N * WIDE * 8

    def test_frozen_projections_keep_what_d_x_needs(self):
        mlp = block().requires_grad_(False)
        assert profile(mlp, tokens()).total == PARTS  # nothing of x
        assert profile(mlp, tokens(requires_grad=False)).total == 0

    @seen
    def test_a_trained_down_projection_alone_keeps_h_alone(self):
        mlp = block().requires_grad_(False)
        mlp.down_proj.requires_grad_(True)
        assert profile(mlp, tokens(requires_grad=False)).total == N * WIDE * 8.25 / 8  # up and act(gate): no code, no x

    def test_a_trained_gate_projection_alone(self):
        mlp = block().requires_grad_(False)
        mlp.gate_proj.requires_grad_(True)
        assert profile(mlp, tokens(requires_grad=False)).total == N * HIDDEN * 4 + N * WIDE * (3 + 4.125) / 8

    @seen
    def test_with_lora(self):
        """x and h as before, and what the low ranks keep, of 4 features: of gate, up and down."""
        mlp = with_lora(block())
        assert profile(mlp, tokens()).total == N * HIDDEN * 4 + PARTS + 3 * N * 4 * 4
        eager_bytes = kept_bytes(lambda x: eager(mlp, x), tokens())[0]
        assert eager_bytes > 3 * N * WIDE * 4


class TestGradients:
    @pytest.mark.parametrize("make", [lambda m: m, with_lora], ids=["plain", "lora"])
    @pytest.mark.parametrize("fused", [False, True])
    def test_exact_are_torch_s(self, fused, make):
        mlp, x = make(block(keep="exact", fused=fused, bias=True)), tokens()
        inputs = [x, *(p for p in mlp.parameters() if p.requires_grad)]
        for a, b in zip(grads(mlp(x), inputs), grads(eager(mlp, x), inputs), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("make", [lambda m: m, with_lora], ids=["plain", "lora"])
    @pytest.mark.parametrize("options", [{}, {"keep": "inputs"}, {"input_bits": 8}, {"fused": True}], ids=str)
    def test_many_bits_are_near(self, options, make):
        mlp, x = make(block(bits=8, copy_bits=8, **options)), tokens()
        inputs = [x, *(p for p in mlp.parameters() if p.requires_grad)]
        if make is with_lora:
            for module in mlp.modules():
                if isinstance(module, Lora):
                    nn.init.normal_(module.B.weight)
        for a, b in zip(grads(mlp(x), inputs), grads(eager(mlp, x), inputs), strict=True):
            assert relative(a, b) < 2 * 6 / 255  # two copies of eight bits, each within a step of 6/255 deviations

    def test_plain_and_hooked_blocks_agree(self):
        mlp, x = block(), tokens()
        inputs = [x, *mlp.parameters()]
        torch.manual_seed(3)
        plain = grads(mlp(x), inputs)
        mlp.down_proj.register_forward_hook(lambda *_: None)
        torch.manual_seed(3)
        for a, b in zip(plain, grads(mlp(x), inputs), strict=True):
            torch.testing.assert_close(a, b)

    def test_a_second_backward_pass(self):
        for mlp in (block(), with_lora(block())):
            x = tokens()
            y = mlp(x).sum()
            first = torch.autograd.grad(y, x, retain_graph=True)[0]
            assert same(first, torch.autograd.grad(y, x)[0])


class TestSettings:
    @pytest.mark.parametrize("make", [lambda m: m, with_lora], ids=["plain", "lora"])
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoint(self, make, reentrant):
        mlp, x = make(block()), tokens()
        inputs = [p for p in mlp.parameters() if p.requires_grad]
        results = []
        for run in (mlp, lambda x: checkpoint(mlp, x, use_reentrant=reentrant)):
            torch.manual_seed(1)
            for p in inputs:
                p.grad = None
            run(x).square().sum().backward()
            results.append([p.grad for p in inputs])
        for a, b in zip(*results, strict=True):
            assert same(a, b)

    def test_a_checkpointed_block_keeps_its_input_alone(self):
        for mlp in (block(), with_lora(block())):
            kept, _ = kept_bytes(lambda x, m=mlp: checkpoint(m, x, use_reentrant=False), tokens())
            assert kept <= N * HIDDEN * 4

    def test_autocast_computes_and_keeps_bfloat16(self):
        mlp, x = block(), tokens()
        with torch.autocast("cpu", torch.bfloat16):
            y = mlp(x)
            assert same(y, eager(mlp, x)) and y.dtype == torch.bfloat16
        exact = block(keep="exact")
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = (grads(run(x), [x, *exact.parameters()]) for run in (exact, lambda x: eager(exact, x)))
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("keep", ["parts", "inputs"])
    @pytest.mark.parametrize("options", [{}, {"fused": True}, {"input_bits": 4}], ids=str)
    def test_compiles_whole(self, options, keep):
        mlp, x = block(bits=8, copy_bits=8, keep=keep, **options), tokens()
        compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
        kept, y = kept_bytes(compiled, x)
        torch.testing.assert_close(y, eager(mlp, x))
        inputs = [x, *mlp.parameters()]
        tolerance = 0.5 if "input_bits" in options else 2 * 6 / 255
        for a, b in zip(grads(y, inputs), grads(eager(mlp, x), inputs), strict=True):
            assert relative(a, b) < tolerance
        assert kept < 3 * N * HIDDEN * 4 + N * WIDE * 32 / 8 + 3 * WIDE * HIDDEN * 4  # not gate, up, h

    def test_vmap_over_models(self):
        mlp, x = block(), tokens().detach()
        stacked = {name: torch.stack([p, p]) for name, p in mlp.named_parameters()}
        y = torch.func.vmap(lambda p: torch.func.functional_call(mlp, p, (x,)))(stacked)
        torch.testing.assert_close(y[0], eager(mlp, x))

    def test_copies_and_pickles(self):
        mlp, x = block(input_bits=5, bits=2), tokens()
        for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
            assert same(other(x), mlp(x)) and repr(other) == repr(mlp)

    def test_a_pickle_without_a_layout_is_read(self):
        mlp, x = block(fused=True), tokens()
        del mlp.layout
        assert same(pickle.loads(pickle.dumps(mlp))(x), eager(block(fused=True), x))

    def test_double_backward_is_refused(self):
        x = tokens()
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(block()(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "arctan"}, "activation is one of silu, "),
        ({"intermediate_size": 0}, "intermediate_size is an integer not below 1, not 0"),
        ({"input_bits": 9}, "input_bits is an integer from 1 to 8, not 9"),
        ({"activation": "quick_gelu", "keep": "inputs"}, "only keep='parts' takes quick_gelu"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(FewbitError, match=message):
        GatedMLP(**{"hidden_size": 8, "intermediate_size": 8, **arguments})


def test_repr_tells_what_is_kept():
    assert "silu, bits=3, copy_bits=4, input_bits=4" in repr(fewbit.nn.GatedMLP(8, 16, input_bits=4))
