import copy
import inspect
import io
import math
import pickle
import shutil
import weakref

import fewbit
import numpy as np
import pytest
import torch
from fewbit.runtime.activations.modules import MODULES, FewBitActivation
from fewbit.tables import FewbitError
from runtime_cases import (
    ACTIVATION_IDS,
    ACTIVATIONS,
    DTYPES,
    EXACT,
    INPLACE,
    INPLACE_IDS,
    LAYOUTS,
    around,
    assert_same_bits,
    expected_gradient,
    laid_out,
    pair,
    table_in,
    table_of_bits,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint


def run(module, x, grad=None):
    """The output and the gradient of x."""
    x = x.detach().requires_grad_()
    y = module(x * 1)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y) if grad is None else grad)[0]


@pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
class TestEveryModule:
    def test_is_torchs_forward_and_the_table_backward(self, name, arguments):
        ours, theirs = pair(name, arguments, bits=3)
        x = laid_out("channels-last", torch.float32)
        y, grad = run(ours, x)
        assert_same_bits(y, theirs(x))
        assert_same_bits(grad, expected_gradient(table_in(ours, x.dtype), x, torch.ones_like(x)))

    def test_takes_torchs_arguments_by_place_and_refuses_to_change_them(self, name, arguments):
        ours, theirs = getattr(fewbit, name), getattr(nn, name)
        mine = [
            (p.name, p.default)
            for p in inspect.signature(ours).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        takes_any = {"Softsign", "Sigmoid", "LogSigmoid", "Tanh", "Tanhshrink"}  # nn.Module's *args
        expected = (
            [] if name in takes_any else [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()]
        )
        assert mine == expected
        module = ours(**arguments)
        for argument, _ in mine:
            if argument in ("inplace", "min_value", "max_value"):
                continue
            assert getattr(module, argument) == getattr(theirs(**arguments), argument)
            with pytest.raises(AttributeError):
                setattr(module, argument, 0.5)

    def test_has_torchs_repr_and_bits(self, name, arguments):
        ours, theirs = pair(name, arguments, bits=2)
        inside = theirs.extra_repr()
        assert repr(ours) == f"{name}({inside + ', ' if inside else ''}bits={ours.bits})"

    def test_has_the_bits_that_were_asked_for_or_fewer_that_are_exact_or_a_table_of_the_user(self, name, arguments):
        for bits in (None, 1, 2, 3, 4):
            ours, _ = pair(name, arguments, **({} if bits is None else {"bits": bits}))
            assert ours.bits == ours.table.bits == (1 if name in EXACT else bits or 3)
            assert (ours.table.kind, ours.table.weight) == ("shared", "uniform:-10,10")
        table = table_of_bits(5)
        ours, _ = pair(name, arguments, table=table)
        assert ours.table is table and ours.bits == 5

    def test_survives_copies_and_pickles(self, name, arguments):
        ours, _ = pair(name, arguments, bits=2)
        x = laid_out("odd", torch.float64)
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        for twin in (
            copy.copy(ours),
            copy.deepcopy(ours),
            pickle.loads(pickle.dumps(ours)),
            torch.load(buffer, weights_only=False),
        ):
            assert repr(twin) == repr(ours)
            assert twin.table == ours.table
            for a, b in zip(run(twin, x), run(ours, x), strict=True):
                assert_same_bits(a, b)

    def test_runs_on_the_meta_device_and_on_fake_tensors(self, name, arguments):
        ours, _ = pair(name, arguments)
        x = torch.empty(3, 5, device="meta", requires_grad=True)
        y = ours(x)
        y.sum().backward()
        assert (y.device.type, x.grad.shape, x.grad.device.type) == ("meta", x.shape, "meta")
        with FakeTensorMode():
            x = torch.empty(3, 5, dtype=torch.bfloat16).t().requires_grad_()
            y = ours(x)
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert (y.shape, grad.shape, grad.stride()) == (x.shape, x.shape, y.stride())

    def test_under_autocast_is_torchs(self, name, arguments):
        ours, theirs = pair(name, arguments)
        linear = nn.Linear(6, 9)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = linear(x)
            y = ours(hidden)
            assert_same_bits(y, theirs(hidden))
        (grad,) = torch.autograd.grad(y, hidden, torch.ones_like(y))
        assert_same_bits(grad, expected_gradient(table_in(ours, hidden.dtype), hidden, torch.ones_like(hidden)))

    def test_lets_the_input_go(self, name, arguments):
        ours, _ = pair(name, arguments)
        x = torch.randn(1000, requires_grad=True) * 2
        storage = weakref.ref(x.untyped_storage())
        y = ours(x)
        del x
        assert storage() is None
        y.sum().backward()


@pytest.mark.parametrize(("name", "arguments"), INPLACE, ids=INPLACE_IDS)
def test_inplace_is_torchs(name, arguments):
    ours, theirs = pair(name, arguments, inplace=True)
    inside = theirs.extra_repr()
    assert repr(ours) == f"{name}({inside + ', ' if inside else ''}bits={ours.bits})"
    x = laid_out("odd", torch.float32)
    y, grad = run(ours, x)
    assert_same_bits(y, theirs(x.clone()))
    assert_same_bits(grad, expected_gradient(table_in(ours, x.dtype), x, torch.ones_like(x)))
    plain = x.clone()
    assert ours(plain) is plain
    ours.inplace = False  # as models are set before they are traced
    assert ours(plain) is not plain


def test_torchs_deprecated_names_of_hardtanh():
    with pytest.warns(FutureWarning, match="min_value is deprecated"):
        module = fewbit.Hardtanh(min_value=-2.0)
    with pytest.warns(FutureWarning, match="max_value is deprecated"):
        assert fewbit.Hardtanh(max_value=3.0).max_val == 3.0
    assert (module.min_val, module.max_val) == (-2.0, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("QuickGELU", lambda x: x * torch.sigmoid(1.702 * x)),
        ("SquaredReLU", lambda x: torch.square(nn.functional.relu(x))),
    ],
)
def test_beyond_torch_nn_are_the_formulas_of_transformers(name, formula, dtype):
    module = getattr(fewbit, name)(bits=3)
    assert repr(module) == f"{name}(bits=3)"
    for layout in LAYOUTS:
        x = laid_out(layout, dtype).requires_grad_()
        y, expected = module(x), formula(x)
        assert_same_bits(y, expected)
        assert y.stride() == expected.stride()
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert_same_bits(grad, expected_gradient(module.table, x, torch.ones_like(x)))


def test_a_parameter_that_float32_rounds_trains_from_a_pickle_in_every_dtype():
    module, torchs = pair("Hardtanh", {"min_val": -0.7, "max_val": 0.1})
    twin = pickle.loads(pickle.dumps(module))
    for dtype in DTYPES:
        x = around([-0.7, 0.1], dtype)[:6].requires_grad_()
        ours, theirs = (torch.autograd.grad(m(x).sum(), x)[0] for m in (twin, torchs))
        assert_same_bits(ours, theirs)


def test_the_table_of_a_module_cannot_be_exchanged_unnoticed():
    module = fewbit.GELU()
    with pytest.raises(AttributeError):
        module.table = table_of_bits(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fewbit.GELU(bits=0), "bits must be a whole number from 1 to 8, not 0"),
        (lambda: fewbit.SiLU(bits=9), "bits must be a whole number from 1 to 8, not 9"),
        (lambda: fewbit.Tanh(bits=True), "bits must be a whole number from 1 to 8, not True"),
        (lambda: fewbit.SELU(bits="3"), "bits must be a whole number from 1 to 8, not '3'"),
        (lambda: fewbit.Sigmoid(bits=2.5), "bits must be a whole number from 1 to 8, not 2.5"),
        (lambda: fewbit.ReLU(table=3), "table must be a fewbit.Table, not int; read one with Table.from_json"),
        (
            lambda: fewbit.GELU(bits=3, table=table_of_bits(4)),
            "the table takes 4 bits, more than bits=3; leave bits out",
        ),
        (lambda: fewbit.GELU("erf"), "approximate must be 'none' or 'tanh', not 'erf'"),
        (lambda: fewbit.Softplus(beta=0), "softplus needs a beta other than 0"),
        (lambda: fewbit.Softplus(beta="x"), "beta must be a number, not 'x'"),
        (lambda: fewbit.Softplus(threshold=None), "threshold must be a number, not None"),
        (lambda: fewbit.LeakyReLU(True), "negative_slope must be a number, not True"),
        (lambda: fewbit.ELU(alpha=float("nan")), "alpha must be a finite number, not nan"),
        (lambda: fewbit.CELU(alpha=0), "celu needs an alpha other than 0"),
        (lambda: fewbit.Hardtanh(1, -1), "hardtanh needs min_val < max_val, not 1 and -1"),
        (lambda: fewbit.Softshrink(-1), "softshrink needs a lambd of at least 0, not -1"),
        (lambda: fewbit.Threshold(0.1, "low"), "value must be a number, not 'low'"),
        # Infinite bounds are those of a clamp on one side alone.
        (lambda: fewbit.Hardtanh(math.nan, 1), "min_val must be a number, not nan"),
        (lambda: fewbit.Hardtanh(math.inf, 1), "hardtanh needs min_val < max_val, not inf and 1"),
        (lambda: fewbit.Hardtanh(-math.inf, -math.inf), "hardtanh needs min_val < max_val, not -inf and -inf"),
        (lambda: fewbit.Softshrink(math.inf), "lambd must be a finite number, not inf"),  # torch refuses it too
        (lambda: fewbit.LeakyReLU(math.inf), "negative_slope must be a finite number, not inf"),
        (lambda: fewbit.Softplus(threshold=math.inf), "threshold must be a finite number, not inf"),
        (lambda: fewbit.solve("elu(alpha=-inf)"), "alpha must be a finite number, not -inf"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(make, message):
    with pytest.raises(FewbitError) as caught:
        make()
    assert str(caught.value) == message


def test_bits_may_be_more_than_the_table_takes_and_numpys():
    assert fewbit.GELU(bits=8, table=table_of_bits(2)).bits == 2
    assert fewbit.GELU(bits=np.int64(2)).bits == 2


class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize(
        "activation",
        [
            fewbit.GELU(bits=2),
            fewbit.SiLU(inplace=True),
            fewbit.Threshold(0.1, 20, inplace=True),
            fewbit.FewBit("x*tanh(x)"),
            fewbit.FewBit(torch.sin),
        ],
        ids=repr,
    )
    def test_gives_the_same_gradients(self, activation, reentrant):
        model = nn.Sequential(nn.Linear(6, 9), activation, nn.Linear(9, 2))
        x = torch.randn(5, 6, requires_grad=True)
        plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        y = checkpoint(model, x, use_reentrant=reentrant)
        for parameter in [x, *model.parameters()]:
            parameter.grad = None
        y.sum().backward()
        for expected, parameter in zip(plain, [x, *model.parameters()], strict=True):
            assert torch.equal(parameter.grad, expected)


def saved_by_compiled(f, *inputs):
    """f compiled whole, and the bytes and dtypes that its backward keeps."""
    kept = []
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = compiled(*inputs)
    return y, kept


TAKES_OBJECTS = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="this torch.compile takes no object but numbers and text for a constant"
)


class TestCompiled:
    """Whole graphs, traced through autograd; `aot_eager` needs no C++ compiler."""

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
    def test_equals_eager_and_keeps_the_packed_code_alone(self, name, arguments):
        ours, _ = pair(name, arguments, bits=2)
        x = laid_out("transposed", torch.float32).requires_grad_()
        grad = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        y, kept = saved_by_compiled(ours, x)
        expected = ours(x)
        assert_same_bits(y, expected)
        assert y.stride() == expected.stride()
        assert sum(t.untyped_storage().nbytes() for t in kept) == -(-x.numel() // 8) * ours.bits
        for a, b in zip(*(torch.autograd.grad(z, x, grad) for z in (y, expected)), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(("name", "arguments"), INPLACE[::3], ids=INPLACE_IDS[::3])
    def test_inplace_equals_eager(self, name, arguments):
        ours, _ = pair(name, arguments, inplace=True)
        x = laid_out("odd", torch.float32).requires_grad_()

        def f(x):
            y = x * 1
            ours(y[3:50])
            return ours(y)

        y, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x)
        assert_same_bits(y, expected)
        grad = torch.ones_like(x)
        for a, b in zip(*(torch.autograd.grad(z, x, grad) for z in (y, expected)), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"bits": 2},
            pytest.param({"table": table_of_bits(4, seed=31)}, marks=TAKES_OBJECTS),
        ],
    )
    def test_functions_equal_eager(self, arguments):
        def f(x):
            return fewbit.functional.gelu(x, **arguments) * fewbit.functional.softplus(x, 3.0, 10.0, **arguments)

        x = torch.linspace(-4, 4, 99, requires_grad=True)
        y, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x)
        assert torch.equal(y, expected)
        assert torch.equal(*(torch.autograd.grad(z.sum(), x)[0] for z in (y, expected)))

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        "module",
        [
            fewbit.GELU(bits=3),
            fewbit.LogSigmoid(),
            fewbit.Hardtanh(-0.7, 0.1),
            fewbit.FewBit("x*tanh(softplus(x))"),
            fewbit.FewBit(torch.sin),
        ],
        ids=repr,
    )
    def test_dynamic_shapes_compile_once(self, module):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
        for shape in [(4, 5), (7, 9), (30, 41)]:
            x = torch.randn(shape, requires_grad=True)
            y, expected = compiled(x), module(x)
            assert torch.equal(y, expected)
            assert torch.equal(*(torch.autograd.grad(z.sum(), x)[0] for z in (y, expected)))
        assert counter.frame_count == 1

    @pytest.mark.deep
    @pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
    def test_the_default_backend_keeps_the_layouts_that_the_codes_lie_in(self):
        """It may lay out what it computes itself as it likes, and codes of another order are wrong gradients."""
        activation = fewbit.GELU()

        def layouts(x):
            x = x * 1
            yield x.permute(2, 0, 1)
            yield x.permute(2, 0, 1)[1:]
            yield x[:, :1].expand(5, 4, 8).transpose(0, 2)
            yield x.unsqueeze(0).to(memory_format=torch.channels_last)[:, 1:]
            yield (x[:, 0, :5] @ x[:, 1, 3:]).t()

        def f(x):
            return sum((activation(y) * torch.arange(y.numel()).view(y.shape)).sum() for y in layouts(x))

        x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            compiled = torch.autograd.grad(torch.compile(f, fullgraph=True, dynamic=True)(x), x)[0]
        # A few roundings of 2^-53 in another order; a wrong code moves a term by a hundredth.
        torch.testing.assert_close(compiled, torch.autograd.grad(f(x), x)[0], rtol=1e-12, atol=1e-10)

    def test_without_a_gradient_is_torchs(self):
        module = fewbit.Tanh()
        x = torch.linspace(-3, 3, 50)
        with torch.no_grad():
            assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), torch.tanh(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "module", [fewbit.GELU(), fewbit.Hardtanh(-0.7, 0.1), fewbit.LogSigmoid(), fewbit.FewBit("x*tanh(x)")], ids=repr
)
def test_exported_programs_train_with_the_table(module):
    x = laid_out("transposed", torch.float32, special=False).requires_grad_()
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
    assert "fewbit.activation" in str(program.graph)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    longer = torch.cat([x, x]).detach().requires_grad_()
    for run in (program.module(), torch.export.load(buffer).module()):
        y, expected = run(longer), module(longer)
        assert_same_bits(y, expected)
        for a, b in zip(*(torch.autograd.grad(z.sum(), longer) for z in (y, expected)), strict=True):
            assert_same_bits(a, b)


def test_modules_share_what_a_converter_can_ask_for():
    for name, arguments in ACTIVATIONS:
        module = pair(name, arguments)[0]
        assert isinstance(module, FewBitActivation)
        assert MODULES[name] is type(module)
