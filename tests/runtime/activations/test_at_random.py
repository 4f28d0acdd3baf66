"""Tables of kind `stochastic` in activations: exact forward, a gradient without bias."""

import copy
import dataclasses

import fewbit
import numpy as np
import pytest
import torch
from fewbit import FewbitError
from fewbit.fewbit_gen import parse_activation
from fewbit.runtime import ops
from fewbit.runtime.backends.cpu import rounding as cpu
from fewbit.runtime.tensors.levels import OFF, position, prepare_rounding, register_table
from fewbit.runtime.tensors.packing import unpack
from fewbit.tables.shipped import shipped_activations, shipped_tables
from rounding_cases import SPECIAL, TABLES, numbers
from torch.nn import functional as F

CPU = torch.device("cpu")


@pytest.mark.sample(2)
@pytest.mark.parametrize("activation", shipped_activations())
def test_lines_are_near_the_position_between_levels(activation):
    for table in shipped_tables(activation):
        if table.kind != "stochastic" or table.levels.size == 1:
            continue
        t = prepare_rounding(register_table(table), CPU)
        x = torch.cat([torch.linspace(-60, 60, 100_001), t.jumps, torch.nextafter(t.jumps, torch.tensor(torch.inf))])
        inside = x.clamp(t.low, t.high)
        cell = ((inside - t.low) * t.inverse).int().clamp(0, t.last)
        for jump in t.jumps:
            cell += inside > jump
        v = (t.slope[cell] * inside + t.base[cell]).double().numpy()
        exact = position(table)(x.double().numpy())
        off = np.abs(v - exact)
        if table.levels.size > 32:
            # A line across a bend of v, at a level between unequal gaps, is off by up to a quarter of what f' changes
            # in a cell, divided by the smaller gap; cells are as narrow as they get.
            change = np.abs(np.diff(parse_activation(activation).derivative(t.low + np.arange(t.last + 2) / t.inverse)))
            gaps = np.pad(np.diff(table.levels), 1, mode="edge")
            at = exact.astype(int)
            smallest = np.minimum(np.minimum(gaps[at], gaps[at + 1]), gaps[np.minimum(at + 2, gaps.size - 1)])
            off = np.maximum(0, off - np.quantile(change, 0.9999) / (4 * smallest))
        settled = parse_activation(activation).reach <= 40
        within = np.abs(x.numpy()) <= (np.inf if settled else 40)
        assert off[within].max() <= 2 * OFF + 1e-5 * table.levels.size


class TestModule:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(("name", "bits"), TABLES)
    def test_has_no_bias(self, name, bits):
        """The mean over 4,000 draws is f', within five deviations and what interpolation leaves."""
        table = TABLES[name, bits]
        x = torch.linspace(-6, 6, 97)
        levels = torch.tensor(table.levels)
        key, draws = register_table(table), 4000
        codes = [unpack(cpu.encode_at_random(x, key, seed), table.bits, 97) for seed in range(draws)]
        q = levels[torch.stack(codes).long()]
        f = torch.from_numpy(parse_activation(name).derivative(x.double().numpy()))
        gap = torch.tensor(np.diff(table.levels).max())
        room = 5 * q.std(0) / draws**0.5 + 2 * OFF * gap
        assert ((q.mean(0) - f).abs() <= room).all()

    def test_forward_is_torchs_and_gradients_are_levels_beside_the_derivative(self):
        table = fewbit.load_table("gelu", 3, "stochastic")
        act = fewbit.GELU(table=table)
        x = numbers(4000)[len(SPECIAL) :].view(30, 133).requires_grad_()
        y = act(x)
        assert torch.equal(y, F.gelu(x))
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        below, above = table.around(x.detach().numpy())
        near = np.minimum(np.abs(grad.numpy() - below), np.abs(grad.numpy() - above))
        assert (near <= 1e-6).mean() > 0.999  # beside a boundary an element may be rounded from the other side

    def test_draws_anew_and_again_from_the_same_seed(self):
        act, x = fewbit.SiLU(table=TABLES["silu", 2]), torch.randn(1000, requires_grad=True)

        def gradient():
            return torch.autograd.grad(act(x).sum(), x)[0]

        torch.manual_seed(5)
        first, second = gradient(), gradient()
        torch.manual_seed(5)
        assert torch.equal(gradient(), first) and not torch.equal(first, second)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_other_dtypes(self, dtype):
        x = torch.randn(50, dtype=dtype, requires_grad=True)
        y = fewbit.Tanh(table=TABLES["tanh", 3])(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(y, torch.tanh(x)) and grad.dtype == dtype
        levels = torch.tensor(TABLES["tanh", 3].levels, dtype=torch.float32 if dtype.itemsize == 2 else dtype)
        assert torch.isin(grad, levels.to(dtype)).all()

    def test_layouts_and_no_elements(self):
        act = fewbit.GELU(table=TABLES["gelu", 2])
        levels = torch.tensor(TABLES["gelu", 2].levels, dtype=torch.float32)
        for x in (
            torch.randn(6, 7).t(),
            torch.randn(1, 7).expand(6, 7),
            torch.randn(8, 9)[::2, 1::3],
            torch.empty(0, 3),
        ):
            leaf = x.detach().requires_grad_()
            y = act(leaf)
            (grad,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
            assert torch.equal(y, F.gelu(x)) and grad.shape == x.shape and torch.isin(grad, levels).all()

    def test_in_place(self):
        act = fewbit.SiLU(inplace=True, table=TABLES["silu", 2])
        x = torch.randn(40, requires_grad=True)
        hidden = x * 1
        y = act(hidden)
        assert y.data_ptr() == hidden.data_ptr() and torch.equal(y, F.silu(x))
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.isin(grad, torch.tensor(TABLES["silu", 2].levels, dtype=torch.float32)).all()

    def test_keeps_its_codes_alone(self):
        x = torch.randn(64, 64)
        model = torch.nn.Sequential(torch.nn.Identity(), fewbit.GELU(table=TABLES["gelu", 3]))
        assert fewbit.memory.profile(model, x.requires_grad_()).total == 64 * 64 * 3 // 8

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiled_is_eager(self, dynamic):
        act = fewbit.GELU(table=TABLES["gelu", 2])
        compiled = torch.compile(act, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for n in (16, 24):
            x = torch.randn(n, 9, requires_grad=True)
            results = []
            for module in (act, compiled):
                torch.manual_seed(3)
                y = module(x)
                results.append((y, torch.autograd.grad(y.sum(), x)[0]))
            assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])

    def test_copies_and_a_model_converted_with_its_table(self):
        table = TABLES["gelu", 2]
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        fewbit.convert(model, tables={"gelu": table})
        assert model[1].table == table and copy.deepcopy(model)[1].table == table
        model(torch.randn(3, 4)).sum().backward()
        assert model[0].weight.grad.isfinite().all()

    def test_second_derivatives_are_refused(self):
        x = torch.randn(5, requires_grad=True)
        with pytest.raises(RuntimeError, match="second"):
            torch.autograd.grad(fewbit.GELU(table=TABLES["gelu", 2])(x).sum(), x, create_graph=True)


class TestRefused:
    def test_ops_of_other_kinds(self):
        at_random, shared = register_table(TABLES["gelu", 2]), register_table(fewbit.load_table("gelu", 2))
        x = torch.randn(8)
        for call in (
            lambda: ops.encode(x, at_random),
            lambda: ops.activation(x, "gelu", [], at_random),
            lambda: ops.encode_at_random(x, shared, torch.tensor([1])),
            lambda: ops.encode_at_random(x, at_random, torch.tensor([1.0])),
        ):
            with pytest.raises(FewbitError):
                call()

    def test_transforms(self):
        act = fewbit.GELU(table=TABLES["gelu", 2])
        with pytest.raises(FewbitError, match="no transform"):
            torch.func.grad(lambda x: act(x).sum())(torch.randn(4))

    def test_a_table_without_a_derivative(self):
        unknown = dataclasses.replace(TABLES["gelu", 2], activation="nobody knows")
        x = torch.randn(4, requires_grad=True)
        with pytest.raises(FewbitError, match="needs the derivative of nobody knows"):
            fewbit.GELU(table=unknown)(x)


class TestRounding:
    """The keyword `rounding`."""

    X = torch.linspace(-3, 3, 4000)

    def levels_of(self, function):
        """The distinct gradients of equal elements, in two draws."""
        x = self.X.clone().requires_grad_()
        return [torch.autograd.grad(function(x).sum(), x)[0] for _ in range(2)]

    @pytest.mark.parametrize(
        "function",
        [
            fewbit.GELU(bits=2, rounding="stochastic"),
            fewbit.GELU("tanh", bits=2, rounding="stochastic"),
            fewbit.Softplus(beta=5, bits=1, rounding="stochastic"),
            fewbit.ELU(0.5, inplace=False, bits=2, rounding="stochastic"),
            fewbit.FewBit("x*sigmoid(1.7*x)", bits=2, rounding="stochastic"),
            torch.compile(fewbit.GELU(bits=2, rounding="stochastic"), fullgraph=True, backend="aot_eager"),
            lambda x: fewbit.functional.silu(x, bits=2, rounding="stochastic"),
            lambda x: fewbit.functional.gelu(x, bits=2, rounding="stochastic"),
            lambda x: fewbit.functional.activation(x, "tanh(x)", bits=2, rounding="stochastic"),
        ],
        ids=lambda f: repr(f) if isinstance(f, torch.nn.Module) else "",
    )
    def test_stochastic_draws_anew(self, function):
        one, two = self.levels_of(function)
        assert not torch.equal(one, two)

    def test_deterministic_is_the_default(self):
        one, two = self.levels_of(fewbit.GELU(bits=2))
        assert torch.equal(one, two)
        assert fewbit.GELU().rounding == fewbit.GELU(rounding="deterministic").rounding == "deterministic"
        assert fewbit.GELU(rounding="stochastic").rounding == "stochastic"
        assert "rounding" not in repr(fewbit.GELU()) and "rounding" in repr(fewbit.GELU(rounding="stochastic"))

    def test_what_is_exact_is_not_rounded(self):
        assert fewbit.ReLU(rounding="stochastic").rounding == "deterministic"
        one, two = self.levels_of(lambda x: fewbit.functional.leaky_relu(x, 0.1, rounding="stochastic"))
        assert torch.equal(one, two)

    def test_by_the_block(self):
        with fewbit.few_bit(bits=2, rounding="stochastic"):
            one, two = self.levels_of(F.gelu)
        assert not torch.equal(one, two)
        with pytest.raises(FewbitError, match="rounding is 'deterministic' or 'stochastic', not 'none'"):
            fewbit.few_bit(rounding="none")

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: fewbit.GELU(rounding="up"), "rounding is 'deterministic' or 'stochastic', not 'up'"),
            (lambda: fewbit.SquaredReLU(rounding="stochastic"), "grows without limit"),
            (lambda: fewbit.FewBit(torch.sin, rounding="stochastic"), "needs a derivative with a formula"),
            (
                lambda: fewbit.GELU(table=TABLES["gelu", 2], rounding="deterministic"),
                "kind stochastic is not rounded",
            ),
            (
                lambda: fewbit.GELU(table=fewbit.load_table("gelu"), rounding="stochastic"),
                "kind shared is not rounded",
            ),
        ],
    )
    def test_what_cannot_be_is_one_line(self, make, says):
        with pytest.raises(FewbitError, match=says) as raised:
            make()
        assert "\n" not in str(raised.value)
