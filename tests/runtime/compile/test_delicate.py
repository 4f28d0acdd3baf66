"""Models whose gradients, or whose compilation, rounding the wrong value would spoil."""

import copy
import operator
from functools import partial

import pytest
import torch
from compiled import LanguageModel, exactly, few_bits, forward_of, gradient_error, gradients, op_by_op, roles_in
from fewbit import FewbitError
from fewbit.runtime.compile.cut import Choice, saved_bytes
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner
from fewbit.runtime.compile.ranges import ranges_of
from fewbit.runtime.compile.roles import Role
from torch import nn
from torch._functorch import partitioners
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

aten = torch.ops.aten


class Model(nn.Module):
    """A loss of the outputs of two layers."""

    def __init__(self, loss, width=128):
        super().__init__()
        self.loss, self.a, self.b = loss, nn.Linear(32, width), nn.Linear(32, width)

    def forward(self, x):
        return self.loss(self.a(x), self.b(x))


def error(model, x, compiled=few_bits, **options):
    """The relative error of the gradients with 6 bits for linear operands and else the defaults; the loss is exact."""
    torch.compiler.reset()
    loss, true = gradients(exactly(model), x)
    torch.compiler.reset()
    few_loss, near = gradients(compiled(model, **{"smallest": 0, "bits": {"linear": 6}, **options}), x)
    assert torch.equal(loss, few_loss)
    return float((near - true).norm() / true.norm())


@pytest.mark.parametrize("function", [lambda x: x.logsumexp(0), lambda x: F.normalize(x * 1, dim=0)])
def test_numbers_without_dimensions_have_no_rows(function):
    """Samples of torch's own table, which ended in an IndexError."""
    x = torch.tensor(0.5, requires_grad=True)
    (slope,) = torch.autograd.grad(function(x), x)
    few = torch.compile(function, backend=op_by_op(FewbitPartitioner(CompileOptions.of({"smallest": 0}))))
    torch.compiler.reset()
    (near,) = torch.autograd.grad(few(x), x)
    assert (near - slope).abs() <= 0.01


# Comparisons of two values.
COMPARED = {
    "maximum": lambda a, b: torch.maximum(a, b).square().sum(),
    "minimum": lambda a, b: torch.minimum(a * b, a.clamp(-0.2, 0.2) * b).sum(),
    "where": lambda a, b: torch.where(a > a.mean(-1, keepdim=True), a * b, 0).sum(),
    "clamp": lambda a, b: a.clamp(max=b).square().sum(),
    "masked": lambda a, b: a.masked_fill(b > a, 0).square().sum(),
}


class Hashed(nn.Module):
    """A table whose rows the values of a layer choose."""

    def __init__(self, choose):
        super().__init__()
        self.layer, self.table, self.choose = nn.Linear(32, 64), nn.Parameter(torch.randn(100)), choose

    def forward(self, x):
        h = self.layer(x)
        return (self.table[self.choose(h)] * h).sum() + self.layer(x.cos()).square().sum()


CHOICES = {
    "cast": lambda h: (h.sigmoid() * 99).long(),
    "floor": lambda h: (h.sigmoid() * 99).floor().to(torch.int64),
    "round": lambda h: (h.tanh() * 49 + 50).round().int(),
}


@pytest.mark.deep
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_places_that_values_choose_are_not_found_again(choose):
    model, x = Hashed(choose), torch.randn(512, 32)
    error(model, x)
    near = model.table.grad.clone()
    gradients(exactly(model), x)
    assert (near - model.table.grad).norm() < 0.05 * model.table.grad.norm()


# Steps, which are not taken again.
STEPS = {
    "sign": lambda a, b: (a.sign() * b * a).sum(),
    "sign of another": lambda a, b: (torch.copysign(b, a) * b).sum() + (a * b).sum(),
    "round": lambda a, b: ((4 * a).round() * b).sum() + (a * b).sum(),
    "rounding mode": lambda a, b: (torch.div(a, 0.3, rounding_mode="trunc") * b).square().sum(),
    "division": lambda a, b: ((a.detach() // 0.3) * b).square().sum() + (a * b).sum(),
    "remainder": lambda a, b: (torch.remainder(a, 0.3) * b).square().sum(),
    "bits": lambda a, b: ((a.view(torch.int32) >> 20) % 7 * b).square().sum() + a.square().sum(),
    "bits, less a mean's": lambda a, b: (
        (a - (mean := a.mean(1, keepdim=True))).square().sum()
        + ((a.view(torch.int32) - mean.view(torch.int32)) % 7 * b).square().sum()
    ),
    "for an unknown operator": lambda a, b: (
        F.grid_sample(b.view(-1, 1, 8, 16), (8 * a.view(-1, 8, 8, 2).tanh()).round() / 8, align_corners=False).sum()
        + (a * b).sum()
    ),
}


class Largest(nn.Module):
    """The largest of a layer's outputs, which another layer reads, too."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(32, 128), nn.Linear(128, 8)

    def forward(self, x):
        h = self.layer(x)
        return self.out(h).square().mean() + h.max(1).values.sum()


@pytest.mark.deep
def test_places_of_maxima_are_saved():
    assert error(Largest(), torch.randn(512, 32)) < 0.02


@pytest.mark.deep
@pytest.mark.parametrize("bits", ["auto", 4, 2])
def test_statistics_of_normalizations_are_saved(bits):
    def divided_by_deviation(a, b):
        variance, _ = torch.var_mean(a, -1, keepdim=True)
        return (a.sum(-1, keepdim=True) * variance.rsqrt()).sum() + (a * b).sum()

    found = roles_in(Model(divided_by_deviation), torch.randn(512, 32))
    assert found[aten.rsqrt] == {Role.STATISTIC}
    most = {"auto": 0.03, 4: 0.12, 2: 0.7}[bits]
    assert error(Model(divided_by_deviation), torch.randn(512, 32), bits=bits) < most


@pytest.mark.deep
@pytest.mark.parametrize("huge", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("curve", [torch.exp, torch.sigmoid], ids=["exp", "sigmoid"])
def test_masked_scores_are_not_rounded(curve, huge):
    def attended(a, b):
        rows = torch.arange(len(a))
        p = curve((a @ b.T / 16).masked_fill(rows[:, None] < rows, huge))
        return ((p @ b) / p.sum(-1, keepdim=True)).square().sum()

    assert error(Model(attended), torch.randn(256, 32)) < 0.1


def with_an_additive_mask(a, b):
    rows = torch.arange(len(a))
    mask = (1.0 - (rows[:, None] >= rows).float()) * torch.finfo(torch.float32).min
    return (torch.sigmoid(a @ b.T / 16 + mask) @ b).square().sum()


def put_into_a_mask(a, b):
    top, places = a.topk(4, -1)
    scores = torch.full_like(a, -torch.inf).scatter(1, places, top)
    return (scores.sigmoid() * b).square().sum()


def padded_with_infinities(a, b):
    return (F.pad(a, (64, 0), value=-torch.inf).exp()[:, :128] * b).square().sum()


def masked_by_a_constant(a, b):
    return (F.softplus(torch.where(b > 0, a, torch.tensor(-1e9))) * b).square().sum()


MASK = torch.where(torch.rand(512, 128, generator=torch.Generator().manual_seed(0)) > 0.7, -1e9, 0.0)


def masked_by_an_input(a, b):
    return (F.softplus(a / 2 + MASK) * b).square().sum()


def less_a_row_of_an_input(a, b):
    return (F.softplus(a / 2 - MASK[0].neg()) * b).square().sum()


def chosen_beside_an_input(a, b):
    return (F.gelu(torch.where(b > 0, a, 2 * MASK)) * b).square().sum()


def below_an_input(a, b):
    return (F.softplus(torch.minimum(a, MASK + 5)) * b).square().sum()


@pytest.mark.parametrize(
    ("loss", "most"),
    [
        (with_an_additive_mask, 0.1),
        (below_an_input, 0.05),
        (masked_by_an_input, 0.05),
        (less_a_row_of_an_input, 0.05),
        (chosen_beside_an_input, 0.05),
        (put_into_a_mask, 0.05),
        (padded_with_infinities, 0.05),
        (masked_by_a_constant, 0.05),
    ],
)
def test_what_huge_numbers_may_be_among_is_masked(loss, most):
    assert error(Model(loss), torch.randn(512, 32)) < most


class Residuals(nn.Module):
    """A loss of predictions and of targets that are an input."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.layer = loss, nn.Linear(64, 64)

    def forward(self, x, target):
        return self.loss(self.layer(x), target)


RESIDUALS = {
    "mse": F.mse_loss,
    "huber": partial(F.huber_loss, delta=0.05),
    "smooth l1": F.smooth_l1_loss,
    "log cosh": lambda y, t: (y - t + F.softplus(-2 * (y - t))).mean(),
    "soft labels": lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
}


@pytest.mark.parametrize("loss", RESIDUALS.values(), ids=RESIDUALS)
def test_small_residuals_have_codes_of_their_own(loss):
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Residuals(loss), torch.randn(512, 64)
    target = model.layer(x).detach() + 0.01 * torch.randn(512, 64)
    assert gradient_error(model, x, target, smallest=0) < 0.15


@pytest.mark.deep
def test_sums_in_logarithms_are_exponents():
    def summed(a, b):
        return (torch.logcumsumexp(a, -1) * b).sum()

    assert Role.EXPONENT in roles_in(Model(summed), torch.randn(64, 32))[aten.logcumsumexp]
    assert error(Model(summed), torch.randn(512, 32)) < 0.05


@pytest.mark.deep
def test_below_a_budget_logits_are_not_computed_again_from_rounded_values():
    tokens = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(0))
    assert error(LanguageModel(), tokens, recompute=0.5, smallest=1024) < 0.1


# What unknown operators read is exact.
UNKNOWN = {
    "grid": lambda a, b: F.grid_sample(b.view(-1, 1, 8, 16), a.view(-1, 8, 8, 2).tanh(), align_corners=False),
    "distances": lambda a, b: torch.cdist(a, b),
    "factors": lambda a, b: torch.linalg.cholesky(a.T @ a + 100 * torch.eye(128)) @ b.T,
}


def test_an_operator_may_take_its_tensors_by_name_alone():
    """Then its call has no arguments by place, the first of which was looked at."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.ops.fewbit_tests.cosine_of(x=ctx.saved_tensors[0])

    with torch.library._scoped_library("fewbit_tests", "FRAGMENT") as library:
        library.define("cosine_of(*, Tensor x) -> Tensor")
        library.impl("cosine_of", lambda *, x: x.cos(), "CPU")
        library.impl("cosine_of", lambda *, x: torch.empty_like(x), "Meta")
        assert error(Model(lambda a, b: Sine.apply(a * b).sum()), torch.randn(64, 32)) < 0.05


def test_parts_of_an_input_are_not_rounded():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(128, 64), nn.Linear(128, 64)

        def forward(self, x):
            a, b = x.chunk(2, 0)
            return (self.a(a) * self.b(b)).sum()

    model, x = Halves(), torch.randn(512, 128)
    assert roles_in(model, x)[operator.getitem] == {Role.INPUT}
    assert error(model, x) < 0.05


def test_several_parts_of_one_value_count_each():
    """Their codes do; exactly saved they are one memory."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    value = graph.call_function(aten.sin.default, (x,))
    parts = graph.call_function(aten.split.Tensor, (value, 4))
    first, second = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    graph.output((first, second))
    value.meta["val"] = torch.empty(8, 32)
    first.meta["val"], second.meta["val"] = value.meta["val"].split(4)
    assert saved_bytes(graph, 0) == 8 * 32 * 4
    for node in (first, second):
        node.meta["fewbit"] = Choice(Role.LINEAR, 4, None, 80)
    assert saved_bytes(graph, 0) == 160


@pytest.mark.deep
def test_sizes_that_depend_on_values():
    def chosen(a, b):
        rows = a[b[:, 0] > 0]
        return (rows.sin() @ b.T).square().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert error(Model(chosen), torch.randn(512, 32)) < 0.1


def test_random_numbers_of_torch_s_own_are_refused_in_one_line():
    model, x = Model(lambda a, b: (a.sin() * b).sum(), width=100), torch.randn(512, 32)
    with torch._inductor.config.patch(fallback_random=True):
        with pytest.raises(Exception, match="fallback_random to False") as raised:
            few_bits(model, bits=4, smallest=0)(x)
        assert isinstance(raised.value.__cause__ or raised.value, FewbitError) or "FewbitError" in str(raised.value)
        few_bits(model, bits=4, smallest=0, rounding="nearest")(x).backward()


def test_torch_s_wrapper_in_c_is_refused_in_one_line():
    """It ended the process: what returns a list of one tensor was taken for what returns a tensor."""
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.raises(Exception, match="cpp_wrapper to False"):
        few_bits(Model(lambda a, b: (a.sin() * b).sum()), smallest=0)(torch.randn(512, 32))


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="torch 2.9 has no regions")
def test_regions_compiled_apart_stay_exact():
    @torch.compiler.nested_compile_region
    def region(x, weight):
        return x + F.gelu(F.layer_norm(x, (128,)) @ weight)

    called = []

    class Looking(FewbitPartitioner):
        def __call__(self, gm, joint_inputs, **kwargs):
            called.append(bool(joint_inputs))
            return super().__call__(gm, joint_inputs, **kwargs)

    def compiled(model, **options):
        return torch.compile(model, backend=op_by_op(Looking(CompileOptions.of(options))), fullgraph=True)

    model = Model(lambda a, b: region(region(a, b[:128]), b[128:256]).square().sum())
    assert error(model, torch.randn(512, 32), compiled) < 0.02
    assert set(called) == {True, False}


@pytest.mark.deep
def test_a_branch_reads_its_operands_exactly():
    def branched(a, b):
        return torch.cond(a.sum() > 0, lambda a, b: (a.softmax(-1) * b).sum(), lambda a, b: (a * b).sum(), (a, b))

    assert error(Model(branched), torch.randn(512, 32)) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", [1.0, 0.5])
def test_chosen_places_are_not_found_again(recompute):
    def routed(a, b):
        top, places = a.sigmoid().topk(4, -1)
        return (b.gather(1, places).exp() * top).sum()

    assert error(Model(routed), torch.randn(512, 32), recompute=recompute) < 0.05


def test_below_a_budget_normalizations_alone_compile():
    model = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 320))

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return F.cross_entropy(self.model(x), torch.arange(len(x)) % 320)

    assert error(Head(), torch.randn(512, 128), recompute=0.5) < 0.05


NOT_OF_ROLES = {
    "capped logits are no curves": (
        lambda a, b: F.cross_entropy(30 * torch.tanh(a / 30), b.argmax(-1)),
        [aten.addmm],
        {Role.NONLINEAR},
    ),
    "pooling reads no more than the shape": (
        lambda a, b: (F.max_pool2d(a.view(-1, 2, 8, 8).sin(), 2).flatten(1) * b[:, :32]).sum(),
        [aten.sin],
        {Role.OTHER},
    ),
    "values in place of infinities are no mask": (
        lambda a, b: (torch.softmax(a, -1).nan_to_num() @ b.T).square().sum(),
        [aten.div, aten.where],
        {Role.MASK},
    ),
    "values at large offsets are not masked": (
        lambda a, b: (a.sin()[torch.arange(64) * 16384 % 64] * b[:64]).square().sum(),
        [aten.index],
        {Role.MASK},
    ),
    "curves well away from poles are rounded": (
        lambda a, b: (F.silu(a) * F.elu(b) * F.softplus(a) / (1 + b * b)).square().mean(),
        [aten.addmm],
        {*Role} - {Role.LINEAR, Role.NONLINEAR},
    ),
}


@pytest.mark.parametrize(("loss", "operators", "roles"), NOT_OF_ROLES.values(), ids=NOT_OF_ROLES)
def test_values_have_other_roles(loss, operators, roles):
    found = roles_in(Model(loss), torch.randn(64, 32))
    assert not set().union(*(found[operator] for operator in operators)) & roles
    assert loss is not NOT_OF_ROLES["capped logits are no curves"][0] or Role.EXPONENT in found[aten.addmm]


def test_the_input_of_silu_behind_a_group_norm_is_rounded():
    layers = nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3)
    found = roles_in(nn.Sequential(*layers), torch.randn(2, 4, 16, 16))
    assert not found[aten.convolution] & {Role.EXPONENT, Role.OTHER}
    assert Role.EXPONENT not in found[aten.mul]


def test_experts_products_are_products():
    def mixed(x, weight, ends):
        return torch._grouped_mm(x.sin(), weight, offs=ends).square().sum()

    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    found = roles_in(mixed, x, weight, torch.arange(16, 65, 16, dtype=torch.int32))
    assert Role.OTHER not in found[aten.sin]


def test_integers_of_saved_ones_are_computed_again():
    def halves(a, b):
        places = a.topk(4, -1).indices // 2
        return (b.gather(1, places) * a[:, :4]).sum()

    forward = forward_of(Model(halves), torch.randn(512, 32), smallest=0)
    outputs = forward[-1].args[0]
    wide = [n for n in outputs if isinstance(n, torch.fx.Node) and n.meta["val"].dtype == torch.int64]
    assert not wide


# What divisors divide is rounded, without bias, and errs most where they are least: they are exact.
DIVIDED = {
    "quotient": lambda a, b: (a / b.abs().add(1e-3)).sum(),
    "logarithm": lambda a, b: (a * b.abs().add(1e-3).log()).sum(),
    "root": lambda a, b: (a * b.abs().add(1e-3).rsqrt()).sum(),
}


def diagonal(x):
    places = torch.arange(len(x))
    return places[:, None] == places


# Beside poles, under exponentials and inside periods gradients are near.
POLES = {
    "log of 1 - tanh²": lambda a, b: (a - (1 - (3 * b).tanh() ** 2 + 1e-6).log()).square(),
    "acos": lambda a, b: a * (3 * b).clamp(-0.9999, 0.9999).acos(),
    "root of relu": lambda a, b: a * (b.relu() + 1e-6).sqrt(),
    "atanh": lambda a, b: a * (0.999 * b.tanh()).atanh(),
    "power": lambda a, b: a * (b.abs() + 1e-5) ** 0.3,
    "odd root": lambda a, b: a * b.sign() * (b.abs() + 1e-6) ** (1 / 3),
    "reciprocal": lambda a, b: a / (b * b + 1e-3),
    "angle": torch.atan2,
    "powers of sigmoids": lambda a, b: a.sigmoid() ** b.sigmoid(),
    "xlogy": lambda a, b: torch.xlogy(a.sigmoid(), b.sigmoid()),
    "tangent": lambda a, b: a * (1.5 * b.tanh()).tan(),
    "entropy": lambda a, b: -(a * b.softmax(-1).log() * b.softmax(-1)),
}
EXPONENTS = {
    "softmax without a maximum": lambda a, b: (a @ b.T).exp() / (a @ b.T).exp().sum(-1, keepdim=True),
    "contrasts": lambda a, b: -((e := (a @ b.T).exp() * (1 - diagonal(a).float())) / e.sum(-1, keepdim=True)),
    "logcosh": lambda a, b: (a - b).cosh().log(),
    "below one more than a square": lambda a, b: a / (1 + b.exp() ** 2),
    "logistic": lambda a, b: a / (1 + (2 * b).exp()),
    "masked": lambda a, b: (e := (a @ b.T).exp().masked_fill(diagonal(a), 0)) / e.sum(-1, keepdim=True),
    "cosh": lambda a, b: a * (4 * b).cosh(),
    "sine of 50": lambda a, b: a * (50 * b).sin(),
    "frequencies": lambda a, b: (b[:, :16, None] * 2 ** torch.arange(8.0)).flatten(1).cos() * a,
    "logistic distribution": lambda a, b: (a * (3 * b).exp()).sigmoid(),
    "normal distribution": lambda a, b: ((1 - a) / (F.softplus(10 * b) + 1e-3)).erf(),
}


# Exponentials in branches, of values that are hundreds apart.
CHOSEN = {
    "elu": lambda a, b: F.elu(1000 * a) * b,
    "softplus of another slope": lambda a, b: F.softplus(5000 * a, beta=2, threshold=5) * b,
    "from above": lambda a, b: torch.where(-30 * a > 0.5, 2.0, (20 * -a).exp()) * b,
    "the lesser of two, less the larger": lambda a, b: torch.logaddexp(1000 * a, b),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", CHOSEN.values(), ids=CHOSEN)
def test_exponentials_in_branches_are_bounded_there(loss):
    """A branch is chosen by the exact value, and x read from codes may be far above 0 where it was below."""
    generator, reports = torch.Generator().manual_seed(0), []
    weights, rows = torch.randn(256, 128, generator=generator), torch.randn(256, 32, generator=generator)
    model = Model(lambda a, b: (loss(a, b) * weights).sum())
    assert error(model, rows, compiled=partial(few_bits, reports=reports), bits=4) < 0.3
    assert all(tensor.bits for tensor in reports[0].tensors if tensor.nbytes)


# Curves that are flat but beside one place, where a hundredth of the values are.
BUMPS = {
    "erf": lambda a, b: a.erf() * b,
    "atan": lambda a, b: a.atan() * b,
    "asinh": lambda a, b: a.asinh(),
    "softsign": lambda a, b: a / (1 + a.abs()) * b,
    "bell": lambda a, b: (-a * a).exp(),
    "sigmoid": lambda a, b: (a + b).sigmoid(),
    "product": lambda a, b: (10 * a).tanh() * (10 * a).sigmoid(),
    "product with others": lambda a, b: a.tanh() * b.tanh() * (a + b).sigmoid(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("bits", ["auto", 4, 3])
@pytest.mark.parametrize("curve", BUMPS.values(), ids=BUMPS)
def test_gradients_of_curves_that_are_flat_far_away_ask_for_what_is_near(curve, bits):
    generator = torch.Generator().manual_seed(0)
    weights, rows = torch.randn(256, 128, generator=generator), torch.randn(256, 32, generator=generator)
    model = Model(lambda a, b: (curve(200 * a, 200 * b) * weights).sum())
    assert error(model, rows, bits=bits) < {"auto": 0.15, 4: 0.2, 3: 0.3}[bits]


def test_an_odd_derivative_is_nothing_far_away_and_saved_once():
    """No level of the best table for 2d / (1 + d²) is 0, and both layers' gradients read it."""
    generator, reports = torch.Generator().manual_seed(0), []
    weights, rows = torch.randn(256, 128, generator=generator), torch.randn(256, 32, generator=generator)
    model = Model(lambda a, b: (torch.log1p((200 * a - 200 * b) ** 2) * weights).sum())
    assert error(model, rows, partial(few_bits, reports=reports), bits="auto") < 0.3
    assert sum(t.nbytes > 0 for t in reports[0].tensors) == 1


def test_scores_that_reach_their_cap_have_gradients():
    """There tanh' is least, and probabilities are largest."""

    def attended(a, b):
        return ((50 * ((a @ b.T) / 2).tanh()).softmax(-1) @ b).square().sum()

    assert error(Model(attended), torch.randn(256, 32), bits="auto") < 0.08


@pytest.mark.parametrize(
    "curve", [lambda a: F.gelu(a) * a.erf(), lambda a: F.silu(a.clamp(max=10))], ids=["not level", "a clamp"]
)
def test_a_curve_that_is_not_flat_by_itself_is_rounded_itself(curve):
    """Beside one that does not level off, or where a clamp cuts it, as in DeepSeek V4's experts, which were exact."""
    reports = []
    model = Model(lambda a, b: (curve(a) * b).square().mean())
    gradients(few_bits(model, reports=reports, smallest=0), torch.randn(256, 32))
    assert {t.role for t in reports[0].tensors if t.nbytes} - {"boolean"} == {"nonlinear", "linear"}


DIVIDED_AGAIN = {
    "exponential": lambda a, b: b / (1 + (2 * a).exp()),
    "hyperbolic cosine": lambda a, b: b / a.cosh() ** 2,
    "rational function": lambda a, b: b / (1 + a**4),
    "softmax over another dimension": lambda a, b: (
        (e := a.view(32, 8, 128).exp()) / e.sum(1, keepdim=True) * b.view(32, 8, 128)
    ),
    "softmax of a few": lambda a, b: (e := a.view(256, 16, 8).exp()) / e.sum(-1, keepdim=True) * b.view(256, 16, 8),
    "running weights": lambda a, b: (a.exp() * b).cumsum(0) / a.exp().cumsum(0),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", DIVIDED_AGAIN.values(), ids=DIVIDED_AGAIN)
def test_what_is_divided_and_multiplied_again_follows(loss):
    """b / d² in codes, times d', errs by as much as d' grows."""
    weights = torch.randn(256 * 128, generator=torch.Generator().manual_seed(0))
    assert error(Model(lambda a, b: (loss(4 * a, b).flatten() * weights).sum()), torch.randn(256, 32)) < 0.3


APART = torch.linspace(-2.3, 2.3, 128).exp()  # deviations from .1 to 10
OF_DEVIATIONS = {
    "batch normalization": lambda h: F.batch_norm(h * APART, None, None, training=True),
    "heads, by their root mean square": lambda h: F.rms_norm((h * APART).view(-1, 2, 64), (64,)),
    "short heads, divided": lambda h: (u := (h * APART).view(-1, 8, 16)) / (u.square().mean(-1, keepdim=True)).sqrt(),
    "heads, turned by their places": lambda h: (
        0.8 * (q := F.rms_norm((h * APART).view(-1, 8, 16), (16,))) + 0.6 * torch.cat((-q[..., 8:], q[..., :8]), -1)
    ),
    "heads of length 1": lambda h: 8 * F.normalize((h * APART).view(-1, 2, 64), dim=-1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("of", OF_DEVIATIONS.values(), ids=OF_DEVIATIONS)
def test_what_is_divided_by_deviations_is_saved_so(of):
    """In codes of what is divided, channels and heads of small deviation are lost beside their neighbours."""
    reports = []
    model = Model(lambda a, b: (of(a).flatten(1) * b).tanh().square().mean())
    assert error(model, torch.randn(256, 32), partial(few_bits, reports=reports)) < 0.15
    assert reports[0].nbytes < 0.25 * reports[0].exact_graph_bytes


READ_ITSELF = {
    "between extremes": lambda a, b: (a - a.amin(0)) / (a.amax(0) - a.amin(0)) * b,
    "statistics that broadcast": lambda a, b: (
        a / (a.std(0) * (1 + b.view(4, 64, 128).square().mean((1, 2), keepdim=True))) * b
    ),
    "statistics in float64": lambda a, b: (
        ((a - a.double().mean(0)) / a.double().std(0)).float() * b + F.linear(a, b).mean()
    ),
    "detached, and 0": lambda a, b: (c := a * (torch.arange(128) > 3)) * c * b + (c / c.norm(dim=0)).detach()[:, 9:10],
    "beside what would be a pole": lambda a, b: (
        F.batch_norm(c := F.softplus(a) + 1, None, None, training=True) * b + c.log()
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("of", READ_ITSELF.values(), ids=READ_ITSELF)
def test_what_reads_a_value_that_is_divided_by_deviations_may_ask_for_the_value_itself(of):
    """The quotient times the deviation is not it to the last digit, of other sizes or dtypes, or no number."""
    reports = []
    model = Model(lambda a, b: of(a, b).square().mean())
    assert error(model, torch.randn(256, 32), partial(few_bits, reports=reports)) < 0.15
    assert reports[0].nbytes < 0.75 * reports[0].exact_graph_bytes


def test_a_statistic_and_a_number_are_a_statistic():
    """Cosine similarity divides by the greater of both: that was no statistic, and quotients were saved twice."""
    model = Model(lambda a, b: F.cosine_similarity(a, b, dim=-1).mean())
    assert roles_in(model, torch.randn(256, 32))[aten.clamp_min] == {Role.STATISTIC}


def test_what_is_divided_by_deviations_and_returned_is_what_it_was():
    """Bit for bit: it is the gradients alone that read it otherwise."""
    model = Model(lambda a, b: ((a - a.mean(0)) / a.std(0) * b, a))
    x = torch.randn(256, 32)
    assert torch.equal(few_bits(model, smallest=0)(x)[1], model.a(x))


def test_what_is_not_rounded_is_not_saved_twice_beside_its_deviations():
    """Without codes gradients read u itself, and the quotient is computed again from it."""
    layer = Model(lambda a, b: F.batch_norm(a, None, None, training=True).relu().square().mean())
    reports = []
    error(layer, torch.randn(256, 32), partial(few_bits, reports=reports), bits={"linear": None})
    assert reports[0].nbytes < 0.6 * reports[0].exact_graph_bytes


MOVED = {
    "reversed": lambda a, b: a.square().flip(-1),
    "in parts": lambda a, b: torch.cat([a[:, 64:].square(), b.square(), a[:, :64].square()], 1),
    "sorted": lambda a, b: a.square().sort(-1).values,
    "repeated": lambda a, b: a.square().repeat(1, 2),
    "upsampled": lambda a, b: F.interpolate(a.square().view(-1, 2, 8, 8), scale_factor=2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("of", MOVED.values(), ids=MOVED)
def test_a_gradient_divided_beside_a_pole_meets_the_same_values_elsewhere(of):
    """2a in codes, times g / (a² + .01), errs most where a² is least."""
    assert error(Model(lambda a, b: ((of(a, b) + 0.01).log()).sum()), torch.randn(256, 32)) < 0.1


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


OFFSETS = torch.linspace(-20, 20, 128)
SCALES = (OFFSETS / 5).exp()
# A code errs by a share of its group's range, which may be far larger than what is left behind a statistic.
LEVELLED = {
    "batch normalization": lambda a, b: F.batch_norm(a + OFFSETS, None, None, training=True) * b,
    "less the mean over rows": lambda a, b: ((c := a + OFFSETS) - c.mean(0)) * b + 0.1 * F.gelu(c),
    "each feature by its own deviation": lambda a, b: (c := a * SCALES) / c.std(0).detach() * b + 0.1 * F.gelu(c),
    "groups of few features": lambda a, b: F.group_norm(a * SCALES, 8) * b,
    "heads of few features": lambda a, b: F.rms_norm((a * SCALES).view(-1, 8, 16), (16,)).flatten(1) * b,
    "few features by their deviation": lambda a, b: (
        (((c := (a * SCALES).view(-1, 8, 16)) - c.mean(-1, keepdim=True)) / (c.std(-1, keepdim=True) + 1e-5)).flatten(1)
        * b
    ),
    "few features by their largest": lambda a, b: (
        ((c := (a * SCALES).view(-1, 8, 16)) / c.abs().amax(-1, keepdim=True)).flatten(1) * b
    ),
    "nothing above its largest": lambda a, b: (1 + 100 * (a - a.amax(-1, keepdim=True)).relu()) * b + F.gelu(a),
}


def test_a_batch_normalization_is_saved_as_one_value():
    """Both passes take the same mean away, each in a shape of its own."""
    model = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.Flatten(0))
    reports = []
    gradients(few_bits(nn.Sequential(model, Mean()), reports=reports, smallest=0), torch.randn(256, 32))
    assert [t.role for report in reports for t in report.tensors].count("nonlinear") == 1


AWAY = {
    "1 + x²": (lambda x: 1 + x * x, (1, torch.inf)),
    "sigmoid": (lambda x: 2 - x.sigmoid(), (1, 2)),
    "clamp": (lambda x: x.clamp(-3, 2).abs() + 0.5, (0.5, 3.5)),
    "reciprocal": (lambda x: 1 / (x.abs() + 2), (0, 0.5)),
    "less its maximum": (lambda x: (x - x.amax()).exp(), (0, 1)),
    "less a part of its maximum": (lambda x: torch.sub(x, x.amax(), alpha=0.5), (-torch.inf, torch.inf)),
    "less its row's maximum": (lambda x: x - x.max(1).values[:, None], (-torch.inf, 0)),
    "less another row's": (lambda x: x - x.amax(1), (-torch.inf, torch.inf)),
    "less another row's, turned": (lambda x: x - x.amax(1, keepdim=True).mT, (-torch.inf, torch.inf)),
    "copied": (lambda x: aten.copy(x.relu(), x), (-torch.inf, torch.inf)),
    "rounded down": (lambda x: torch.div(-x.sigmoid(), 2, rounding_mode="floor"), (-1, 0)),
    "softplus of another slope": (lambda x: F.softplus(x.relu(), beta=3), (0, torch.inf)),
    "infinite power": (lambda x: x.sigmoid() ** float("inf"), (0, torch.inf)),
    "choice": (lambda x: torch.where(x > 0, x.tanh(), -x.exp()), (-torch.inf, 1)),
    "cube": (lambda x: x.relu() ** 3 - 1, (-1, torch.inf)),
    "complex": (lambda x: torch.view_as_real(torch.complex(x, x + 1).square() + 1j), (-torch.inf, torch.inf)),
    "complex, subtracted": (lambda x: (1j - torch.complex(x, x)).abs(), (0, torch.inf)),
    "bits": (lambda x: x.relu().view(torch.int32), (-torch.inf, torch.inf)),
}


@pytest.mark.parametrize(("function", "expected"), AWAY.values(), ids=AWAY)
def test_ranges(function, expected):
    graph = torch.fx.experimental.proxy_tensor.make_fx(function)(torch.randn(8, 8)).graph
    assert ranges_of(graph)[graph.output_node().args[0]] == pytest.approx(expected)


BROADCAST = {
    "ranking": lambda a, b: (1 - (a[:, :, None] - a[:, None])).relu().sum() + b.sum(),
    "distances": lambda a, b: (a[:, None] - a[None]).abs().sum() + b.sum(),
    "segments": lambda a, b: ((c := a.cumsum(-1))[..., None] - c[:, None]).clamp(max=8).exp().mean() + b.sum(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", BROADCAST.values(), ids=BROADCAST)
def test_comparisons_of_all_pairs_are_made_again_from_exact_values(loss):
    """Their bits take more than what they compare."""
    reports = []
    torch.compiler.reset()
    few_bits(Model(loss), reports=reports, smallest=0)(torch.randn(64, 32)).backward()
    assert 0 < sum(r.nbytes for r in reports) <= sum(r.exact_graph_bytes for r in reports)
    assert error(Model(loss), torch.randn(64, 32)) < 1e-5


def test_a_buffer_that_the_forward_pass_changes_is_not_saved():
    model = nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 1))
    few_bits(model, smallest=0)(torch.randn(64, 64)).sum().backward()
    assert model[0].parametrizations.weight.original.grad.isfinite().all()


class Remembering(nn.Module):
    """Multiplies by what it remembers of the call before, of which what is read is copied, viewed or a function."""

    def __init__(self, read):
        super().__init__()
        self.read, self.first, self.last = read, nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("memory", torch.randn(64, 64))

    def forward(self, x):
        h = self.last(torch.tanh(self.first(x)) * self.read(self.memory))
        with torch.no_grad():
            self.memory.mul_(-0.5).add_(h.mean(0))
        return h.square().mean()


@pytest.mark.parametrize("smallest", [0, 1 << 20], ids=["rounded", "exact"])
@pytest.mark.parametrize("read", [torch.clone, lambda m: (2 * m.t()).t(), torch.exp], ids=["copy", "view", "function"])
def test_gradients_read_a_buffer_as_it_was_before_the_forward_pass_changed_it(read, smallest):
    """Torch's own, by Inductor, which takes such a copy for none, are wrong by as much as their norm."""
    model, found = Remembering(read), []
    torch.compiler.reset()
    kinds = copy.deepcopy(model), torch.compile(model, backend="fewbit", options={"bits": 8, "smallest": smallest})
    x = torch.randn(64, 64)
    for kind in kinds:
        found.append(gradients(kind, x)[1])
    assert (found[1] - found[0]).norm() < (1e-5 if smallest else 0.02) * found[0].norm()


# Losses of differences.
USED_AGAIN = {
    "preferences": lambda a, b: -F.logsigmoid(a - b).mean(),
    "margins": lambda a, b: F.relu(1 + a - b).mean(),
    "softplus": lambda a, b: F.softplus(a - b).mean(),
    "triplets": lambda a, b: F.triplet_margin_loss(a, b, a.roll(1, 0)),
}


def squared(functions):
    return {name: lambda a, b, f=f: f(a, b).square().mean() for name, f in functions.items()}


# Losses of two layers' outputs, rows of the input, and what gradients err by at most.
NEAR = [
    *((COMPARED, 512, 0.05), (STEPS, 512, 0.05), (squared(UNKNOWN), 512, 0.03), (DIVIDED, 512, 0.3)),
    *((squared(POLES | EXPONENTS), 256, 0.1), (squared(LEVELLED), 256, 0.06), (USED_AGAIN, 256, 0.05)),
]


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("loss", "rows", "most"),
    [pytest.param(f, rows, most, id=name) for losses, rows, most in NEAR for name, f in losses.items()],
)
def test_gradients_are_near(loss, rows, most):
    assert error(Model(loss), torch.randn(rows, 32)) < most


def test_torch_s_own_partitioner_stays_as_it_is():
    before = dict(vars(partitioners))
    few_bits(Model(lambda a, b: (a * b).sum()), smallest=0)(torch.randn(64, 32)).backward()
    assert vars(partitioners) == before
