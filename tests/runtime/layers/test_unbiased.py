"""At ActNN's levels the gradient of every activation is unbiased, its output torch's, its codes a few bits."""

import copy
import pickle

import fewbit
import pytest
import torch
from activation_cases import define
from fewbit import layers, memory
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TORCH = [
    *(nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.Softplus(beta=3), nn.Mish()),
    *(nn.ELU(), nn.ELU(alpha=0.5), nn.SELU(), nn.CELU(alpha=2.0), nn.Hardswish(), nn.LogSigmoid(), nn.Softsign()),
    *(nn.Tanhshrink(), nn.SiLU(inplace=True), nn.ELU(inplace=True), nn.Mish(inplace=True)),
]
TRANSFORMERS = ["gelu", "gelu_new", "gelu_fast", "gelu_python", "quick_gelu", "silu", "mish", "relu2", "laplace"]
EXACT = [nn.ReLU(), nn.LeakyReLU(0.1), nn.ReLU6(), nn.Hardtanh(), nn.Hardsigmoid(), nn.Threshold(0.5, 0.0)]
COPIES = 256  # of one input, each rounded by itself


def at_level(module, bits, level="L2", **more):
    """The module at a level, in a model whose first layer it is not."""
    model = nn.Sequential(nn.Identity(), copy.deepcopy(module))
    report = fewbit.convert(model, bits, level=level, **more)
    return model, report


def draws(model, x, upstream):
    """The gradient of each copy of x."""
    many = x.expand(COPIES, -1).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(many * 1), many, upstream.expand(COPIES, -1))
    return gradient.double()


def check_unbiased(module, bits, **more):
    torch.manual_seed(0)
    x, upstream = torch.randn(1024) * 2, torch.randn(1024)
    model, _ = at_level(module, bits, **more)
    seen = draws(model, x, upstream)
    exact = draws(nn.Sequential(nn.Identity(), module), x, upstream)[0]
    # Along directions: signs at random, and those of the gradient, along which a table's bias would not cancel.
    signs = torch.randint(2, (32, 1024)).double() * 2 - 1
    directions = torch.cat([signs, upstream.double().sign()[None], (upstream * x).double().sign()[None]])
    along = seen @ directions.T
    deviation = along.std(0) / COPIES**0.5
    off = (along.mean(0) - directions @ exact).abs()
    assert (off <= 4.5 * deviation + 1e-5 * exact.norm()).all(), (off / deviation).max()
    assert (deviation > 0).all()


@pytest.mark.sample(12)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("module", TORCH, ids=str)
def test_the_gradient_is_unbiased(module, bits):
    check_unbiased(module, bits)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_gradient_of_transformers_activations_is_unbiased(name, bits):
    check_unbiased(pytest.importorskip("transformers.activations").ACT2FN[name], bits)


@pytest.mark.parametrize("level", ["L3", "L4", "L5"])
def test_at_every_level(level):
    check_unbiased(nn.GELU(), 2, level=level)
    check_unbiased(nn.SiLU(), 1.5, level=level)


def test_of_timm_in_place():
    check_unbiased(define("timm.layers.activations", "Swish", lambda self, x: x.mul_(x.sigmoid()), inplace=True)(), 2)


def test_fused_formulas():
    pytest.importorskip("transformers.activations")
    from transformers.activations import NewGELUActivation

    check_unbiased(NewGELUActivation(), 2, fused=True)


@pytest.mark.parametrize("module", [*TORCH, *EXACT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_torchs_bit_for_bit_and_in_place_stays_in_place(module, dtype):
    model, report = at_level(module, 4)
    assert len(report.replaced) == 1
    x = (torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    for grad in (True, False):
        y = x.clone().requires_grad_(grad) * 1
        with torch.set_grad_enabled(grad):
            z = model(y)
        assert torch.equal(z, module(x.clone()))
        assert (z is y) == getattr(module, "inplace", False)


@pytest.mark.parametrize("module", EXACT, ids=str)
def test_exact_tables_stay(module):
    model, report = at_level(module, 4)
    assert report.replaced[0].bits <= 2 and report.replaced[0].error == 0
    assert not any("without bias" in note for note in report.notes)
    assert not isinstance(model[1], layers.Activation)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("module", [nn.GELU(), nn.Tanh(), nn.SiLU(inplace=True)], ids=str)
def test_the_bytes_are_those_of_the_codes(module, bits):
    model, _ = at_level(module, bits)
    x = torch.randn(64, 256, requires_grad=True)
    kept = memory.profile(model, x * 1).total
    assert kept == 64 * 256 * min(8, bits + 1) / 8  # derivatives have one bit more than layers


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [2, 4])
def test_the_gradient_of_a_network_is_unbiased(bits):
    """Over 300 draws, along 64 directions at random and that of the gradient itself."""
    exact = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)).double()
    model, x, w = copy.deepcopy(exact), torch.randn(64, 32).double(), torch.randn(64, 8).double()
    report = fewbit.convert(model, bits, level="L2")
    assert sum("rounding='stochastic'" in row.now for row in report.replaced) == 2

    def gradient(one):
        one.zero_grad()
        (one(x * 1) * w).sum().backward()
        return torch.cat([p.grad.flatten() for p in one.parameters()])

    true = gradient(exact)
    draws = torch.stack([gradient(model) for _ in range(300)])
    directions = torch.cat([torch.randn(64, len(true)).double(), true[None]])
    along = draws @ directions.T
    z = (along.mean(0) - directions @ true) / (along.std(0) / 300**0.5)
    assert z.abs().max() < 4.5 and 0.4 < z.square().mean() < 2


class TestConversion:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def test_the_report_says_so(self):
        report = fewbit.convert(self.model(), level="L2")
        (row,) = [row for row in report.replaced if row.name == "1"]
        assert row.now == "GELU(approximate='none', bits=5, rounding='stochastic')" and row.bits == 5
        assert any("rounded at random, without bias" in note for note in report.notes)

    def test_names_state_and_revert(self):
        model = self.model()
        names, state, modules = dict(model.named_modules()).keys(), list(model.state_dict()), list(model)
        hook = model[1].register_forward_hook(lambda *_: calls.append(1))
        calls = []
        fewbit.convert(model, level="L2")
        assert dict(model.named_modules()).keys() == names and list(model.state_dict()) == state
        model(torch.randn(3, 16)).sum().backward()
        assert calls == [1]
        hook.remove()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.manual_seed(3)
            twin(torch.randn(3, 16)).sum().backward()
            fewbit.revert(twin)
            assert [type(m) for m in twin] == [type(m) for m in self.model()]
        fewbit.convert(model, 2, level="L3")
        fewbit.convert(model, 8, level="L2", exclude="1")
        assert model[1].bits == 3
        assert fewbit.revert(model) is model and all(a is b for a, b in zip(model, modules, strict=True))

    def test_tables_without_a_level_and_tables_of_the_user(self):
        model = self.model()
        fewbit.convert(model, level="L2")
        fewbit.convert(model, 3, include=nn.GELU)
        assert (model[1].rounding, model[3].rounding) == ("deterministic", "stochastic")
        fewbit.convert(model, level="L2", tables={"gelu": fewbit.load_table("gelu", 2)})
        assert isinstance(model[1], fewbit.GELU) and model[1].bits == 2
        fewbit.convert(model, level="L1")
        assert isinstance(model[1], fewbit.GELU)

    def test_functions_that_a_module_holds(self):
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True)
        original, x = layer.activation, torch.randn(2, 5, 16)
        expected = layer(x)
        fewbit.convert(layer, level="L2")
        assert layer.activation.rounding == "stochastic"
        assert torch.equal(layer(x), expected)
        layer(x).sum().backward()
        pickle.loads(pickle.dumps(layer))(x)
        assert fewbit.revert(layer).activation is original

    def test_a_derivative_without_bounds_is_rounded_by_groups(self):
        squared = pytest.importorskip("transformers.activations").ACT2FN["relu2"]
        model = nn.Sequential(nn.Identity(), squared)
        report = fewbit.convert(model, level="L2")
        assert isinstance(model[1], layers.Activation) and report.replaced[0].bits == 5
        model = nn.Sequential(nn.Identity(), squared)
        report = fewbit.convert(model, 4, rounding="stochastic")
        assert model[1] is squared and "grows without limit" in report.left[0].why

    def test_deterministic_tables_by_option(self):
        for convert in (
            lambda model: fewbit.convert(model, level="L2", rounding="deterministic"),
            lambda model: fewbit.convert(model, fewbit.ActNN("L2", rounding="deterministic")),
        ):
            model = self.model()
            report = convert(model)
            assert (model[1].rounding, model[1].bits) == ("deterministic", 5)
            assert not any("without bias" in note for note in report.notes)
        with pytest.raises(fewbit.FewbitError, match="rounding is 'deterministic' or 'stochastic', not 'up'"):
            fewbit.convert(self.model(), level="L2", rounding="up")

    def test_without_a_level_by_option(self):
        check = nn.Sequential(nn.Identity(), nn.GELU())
        report = fewbit.convert(check, 2, rounding="stochastic")
        assert check[1].rounding == "stochastic" and any("without bias" in note for note in report.notes)

    def test_at_l4_codes_wait_in_host_memory(self):
        model = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 4))
        fewbit.convert(model, 2, level="L4")
        moved = []
        swapper = model[1].swapper
        out = swapper.out
        swapper.out = lambda x: moved.append(x.numel()) or out(x)
        model(torch.randn(64, 16)).sum().backward()
        assert 64 * 512 * 2 / 8 in moved
        assert model[0].weight.grad is not None

    def test_ones_of_your_own_are_left(self):
        model = nn.Sequential(nn.Linear(4, 4), layers.Activation(nn.GELU(), bits=2))
        own = model[1]
        report = fewbit.convert(model)
        assert model[1] is own and [row.why for row in report.left] == ["it is a few-bit activation of your own"]

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_under_checkpoints(self, reentrant):
        model, exact = self.model(), self.model()
        fewbit.convert(model, 8, level="L2")
        x = torch.randn(64, 16, requires_grad=True)
        for one in (model, exact):
            checkpoint(one, x, use_reentrant=reentrant).square().mean().backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert (ours.grad - theirs.grad).norm() < 0.05 * theirs.grad.norm()

    def test_hooks_on_saved_tensors_do_not_spoil_the_derivative(self):
        model = nn.Sequential(nn.Identity(), nn.GELU())
        fewbit.convert(model, 8, level="L2")
        x = torch.randn(64, 256, requires_grad=True)
        (exact,) = torch.autograd.grad(F.gelu(x).sum(), x)
        with fewbit.compress_saved_tensors(fewbit.quantizers.PerGroup(bits=1)):
            y = model(x * 1)
        (ours,) = torch.autograd.grad(y.sum(), x)
        assert (ours - exact).abs().max() < 0.02
