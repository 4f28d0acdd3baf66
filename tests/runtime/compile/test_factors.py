"""Factors of gradients with tables: an activation before frozen weights keeps codes of its derivative alone."""

import copy

import fewbit
import numpy as np
import pytest
import torch
from compiled import exactly, few_bits, forward_of, gradient_error, gradients, kept_bytes, op_by_op
from fewbit.runtime.compile.curves import Curve, arguments_of
from fewbit.runtime.compile.factors import table_of
from fewbit.runtime.compile.nodes import packet
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner
from fewbit.runtime.compile.report import report_by
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, INNER = 64, 128, 256


def gelu_of_gpt2(x):
    return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3))))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


SMOOTH = {
    "gelu": F.gelu,
    "gelu of GPT-2": gelu_of_gpt2,
    "silu": F.silu,
    "quick gelu": quick_gelu,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "log sigmoid": F.logsigmoid,
}


class BeforeFrozen(nn.Module):
    """An activation between a layer that is trained and one that is not."""

    def __init__(self, function):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, 32).requires_grad_(False)
        self.function = function
        self.register_buffer("weights", torch.randn(ROWS, 32))

    def forward(self, x):
        return (self.down(self.function(self.up(x))) * self.weights).sum()


def report_of(model, *inputs, **options):
    torch.compiler.reset()
    partitioner = FewbitPartitioner(CompileOptions.of({"smallest": 1024, **options}))
    torch.compile(model, backend=op_by_op(partitioner), fullgraph=True)(*inputs)
    return report_by(partitioner)


@pytest.mark.parametrize("function", SMOOTH.values(), ids=SMOOTH)
class TestAnActivationBeforeFrozenWeights:
    @pytest.mark.sample(1)
    def test_keeps_codes_of_its_derivative_alone(self, function):
        report = report_of(BeforeFrozen(function), torch.randn(ROWS, WIDTH))
        (saved,) = (tensor for graph in report.graphs for tensor in graph.tensors if tensor.nbytes)
        assert (saved.role, saved.bits, saved.nbytes) == ("factor", 4, ROWS * INNER // 2)

    @pytest.mark.sample(1)
    def test_has_the_gradient_of_that_table(self, function):
        model, x = BeforeFrozen(function), torch.randn(ROWS, WIDTH)
        few = few_bits(model, bits=8, smallest=1024)
        assert kept_bytes(few(x), [*model.parameters(), model.weights, x]) == ROWS * INNER
        _, near = gradients(few, x)
        _, true = gradients(exactly(copy.deepcopy(model)), x)
        assert (near - true).norm() < 0.03 * true.norm()


class TestTheTable:
    def test_is_the_compiler_s_for_that_activation(self):
        """Whatever form of f' torch writes: levels and boundaries are those of `fewbit.solve` to rounding."""
        model, x = BeforeFrozen(F.gelu), torch.randn(ROWS, WIDTH)
        table = fewbit.solve("gelu", 3, certify=False)
        z = model.up(x).detach()
        g = model.weights @ model.down.weight
        true = (g * torch.from_numpy(table(z.numpy())).float()).T @ x
        gradients(few_bits(model, bits=3, smallest=1024), x)
        assert (model.up.weight.grad - true).norm() < 1e-3 * true.norm()

    def test_codes_are_made_behind_x_and_the_factor_is_not_computed(self):
        forward = forward_of(BeforeFrozen(F.gelu), torch.randn(ROWS, WIDTH), smallest=1024)
        names = [str(node.target) for node in forward]
        assert "fewbit.encode.default" in names[: names.index("aten.erf.default")]
        assert "aten.exp.default" not in names  # of the normal density, which is in GELU's derivative alone

    def test_is_in_the_graph_and_no_process_need_know_it(self):
        from fewbit.runtime.tensors import levels

        text = levels.table_text(fewbit.solve("silu", 2, certify=False))
        codes = torch.ops.fewbit.encode(torch.randn(64), text)
        assert codes.numel() == 16

    @pytest.mark.parametrize("text", ["{", "{}", "{" * 10_000, '{"format": 1}'])
    def test_that_is_none_is_refused_in_one_line(self, text):
        with pytest.raises(fewbit.FewbitError) as caught:
            torch.ops.fewbit.encode(torch.randn(64), text)
        assert "\n" not in str(caught.value)


class TestLeftAlone:
    def test_with_tables_off(self):
        report = report_of(BeforeFrozen(F.gelu), torch.randn(ROWS, WIDTH), tables=False)
        assert "factor" not in {tensor.role for graph in report.graphs for tensor in graph.tensors if tensor.bits == 4}

    def test_single_numbers(self):
        """A level may be far from the one number: of σ'(7) = .0009 by as much as it is."""
        layer, x = nn.Linear(WIDTH, 1), torch.randn(1, WIDTH)
        with torch.no_grad():
            layer.bias += 7 - layer(x).item()
        model = nn.Sequential(layer, nn.Sigmoid())
        _, true = gradients(model, x)
        _, near = gradients(few_bits(model, smallest=0), x)
        assert torch.allclose(near, true, rtol=1e-3)

    def test_what_serves_a_weight_s_gradient_too(self):
        model = BeforeFrozen(F.gelu)
        model.down.weight.requires_grad_(True)
        report = report_of(model, torch.randn(ROWS, WIDTH))
        assert {tensor.role for graph in report.graphs for tensor in graph.tensors if tensor.nbytes} == {"nonlinear"}

    def test_factors_of_two_values(self):
        def gated(x):
            gate, up = x.chunk(2, -1)
            return torch.cat([F.silu(gate) * up, F.silu(up)], -1)

        model, x = BeforeFrozen(gated), torch.randn(ROWS, WIDTH)
        assert gradient_error(model, x, bits=8, smallest=1024) < 0.03

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        "function", [lambda x: F.relu(x).square(), lambda x: x * x, lambda x: 1 / x], ids=["relu squared", "x²", "1/x"]
    )
    def test_what_codes_of_groups_show_better(self, function):
        """2x grows without end, and 1/x² has no integral: a table over a fixed interval errs more than groups do."""
        report = report_of(BeforeFrozen(function), torch.randn(ROWS, WIDTH))
        assert "factor" not in {tensor.role for tensor in report.graphs[0].tensors if tensor.nbytes}

    @pytest.mark.parametrize("function", [lambda x: (x - 1000).sigmoid(), lambda x: ((x - 1000) / 30).tanh()])
    def test_what_turns_far_from_0(self, function):
        """There the weight has no x: the best table is 0, and so were all gradients of a temperature in kelvin."""
        model, x = BeforeFrozen(function), torch.randn(ROWS, WIDTH)
        nn.init.constant_(model.up.bias, 1000.0)
        model.down = nn.Identity()
        model.weights = torch.randn_like(function(model.up(x)))
        assert gradient_error(model, x, smallest=1024) < 0.1

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: F.gelu(x[:0]).mean(),
            lambda x: F.gelu(x) / torch.scalar_tensor(x.shape[0]),
            lambda x: torch.where(torch.ones((), dtype=torch.bool), F.gelu(x), 0.0),
            lambda x: torch.view_as_real(F.gelu(x) * 1j),
        ],
        ids=["quotient by 0", "size that varies", "truth value", "complex"],
    )
    def test_what_is_no_real_number(self, function):
        """Each is a scalar of a graph, and stopped its compilation."""
        x = torch.randn(ROWS, WIDTH)
        torch.compiler.reset()
        compiled = torch.compile(function, backend="fewbit", dynamic=True, options={"bits": 8})
        near, true = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(near).sum().backward()
        function(true).sum().backward()
        torch.testing.assert_close(near.grad, true.grad, rtol=0.1, atol=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.5),
        lambda x, y, t: F.hinge_embedding_loss(x.sum(1), t),
        lambda x, y, t: torch.where((y >= 1) & (y <= 1), x, 0).sin().sum(),
        lambda x, y, t: torch.where((y - 1).abs() <= 0, x, 0).sin().sum(),
    ],
    ids=["of angles", "of distances", "between", "no distance"],
)
def test_labels_are_compared_and_not_looked_up(loss):
    """`where(t == 1, g, 0)` is 0 but at a point, and so is the best table for it, however it is written."""

    class OfPairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(WIDTH, 32)

        def forward(self, x, y, t):
            return loss(self.up(x), y, t)

    model = OfPairs()
    inputs = torch.randn(ROWS, WIDTH), torch.randint(-1, 3, (ROWS, 32)).float(), torch.randint(0, 2, (ROWS,)) * 2.0 - 1
    _, true = gradients(model, *inputs)
    _, near = gradients(few_bits(model, smallest=0), *inputs)
    assert (near - true).norm() < 0.2 * true.norm()


def test_sizes_that_vary():
    model = BeforeFrozen(F.gelu)
    model.weights = torch.ones(1, 32)
    few = few_bits(model, bits=8, smallest=1024, dynamic=True)
    for rows in (64, 48, 80):
        x = torch.randn(rows, WIDTH)
        _, near = gradients(few, x)
        _, true = gradients(model, x)
        assert (near - true).norm() < 0.02 * true.norm()


def test_under_autocast():
    """The factor is computed in float32 of x in bfloat16, whose codes are saved."""
    model, x = BeforeFrozen(F.silu), torch.randn(ROWS, WIDTH)
    few = few_bits(model, bits=8, smallest=1024)
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_bytes(few(x), [*model.parameters(), model.weights, x]) <= ROWS * INNER + 2 * ROWS * WIDTH
        _, near = gradients(few, x)
        _, true = gradients(exactly(copy.deepcopy(model)), x)
    assert (near - true).norm() < 0.03 * true.norm()


def test_memory_in_another_order():
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3).requires_grad_(False)

        def forward(self, x):
            return self.second(F.silu(self.first(x))).square().sum()

    model, x = Convolutions(), torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    assert gradient_error(model, x, bits=8, smallest=1024) < 0.02


@pytest.mark.parametrize(
    "loss", [lambda r: r.cosh().log(), lambda r: (1 + r * r).sqrt() - 1], ids=["log-cosh", "pseudo-Huber"]
)
def test_gradients_of_a_loss_become_small_with_its_residuals(loss):
    """By a table, which has no level near 0, they were wrong by 1.2 and 2.7 times their norm.

    Weights of their sums, whose squares count, make this no sum over elements.
    """

    class Residuals(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.noise = nn.Linear(32, WIDTH), 0.03 * torch.randn(256, WIDTH)
            self.register_buffer("weights", torch.randn(8, WIDTH))

        def forward(self, x):
            losses = loss(self.layer(x) - self.layer(x).detach() - self.noise)
            return F.linear(losses, self.weights).square().mean()

    assert gradient_error(Residuals(), torch.randn(256, 32), bits="auto", smallest=0) < 0.15


@pytest.mark.parametrize(
    "loss",
    [F.softplus, lambda x: F.softplus(x) * torch.linspace(1, 2, WIDTH)],
    ids=["plain", "weighted"],
)
def test_a_sum_of_a_function_has_no_table_of_its_derivative(loss):
    """The levels are for values of any size, and these are near -7: gradients were wrong by 2.9 of their norm."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, WIDTH)
            nn.init.constant_(self.layer.bias, -7.0)

        def forward(self, x):
            return loss(self.layer(x)).mean()

    assert gradient_error(Sum(), torch.randn(256, 32), smallest=0) < 0.1


def test_functions_are_read_from_the_graph():
    found = {}

    class Looking(FewbitPartitioner):
        def __call__(self, gm, joint_inputs, **kwargs):
            node = next(n for n in gm.graph.nodes if packet(n) is torch.ops.aten.tanh)
            x = np.linspace(-3, 3, 7)
            argument = arguments_of(gm.graph)[node]
            source = arguments_of(gm.graph, through_views=True)[argument]
            table = table_of(node, argument, source, 2)
            found.update(values=Curve(node, argument)(x), table=table, argument=packet(argument))
            return super().__call__(gm, joint_inputs, **kwargs)

    layer = nn.Linear(8, 8)
    backend = op_by_op(Looking(CompileOptions()))
    torch.compile(lambda x: torch.tanh(2 * layer(x)).sum(), backend=backend, fullgraph=True)(torch.randn(4, 8))
    assert np.allclose(found["values"], np.tanh(2 * np.linspace(-3, 3, 7)))
    assert found["table"].levels.size == 4 and found["argument"] is torch.ops.aten.addmm
