import inspect
import itertools

import fewbit
import pytest
import torch
from fewbit import functional
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import (
    ACTIVATION_IDS,
    ACTIVATIONS,
    DTYPES,
    EXACT,
    HALVES,
    INPLACE,
    INPLACE_IDS,
    LAYOUTS,
    all_halves,
    around,
    assert_same_bits,
    expected_gradient,
    function_name,
    gradient_layouts,
    laid_out,
    table_in,
    table_of_bits,
)
from torch.nn import functional as F

# Forwards depend on the function and the dtype, kernels on the dtype, the table and the layout: where both are many,
# each function has one dtype, and what is drawn has any.
OF_ONE_DTYPE = [(name, arguments, DTYPES[i % len(DTYPES)]) for i, (name, arguments) in enumerate(ACTIVATIONS)]
INTEGER_KINKS = [-20.0, -3.0, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 1.0, 2.5, 3.0, 5.0, 6.0, 20.0]


def functions(name, arguments):
    """fewbit's function and torch's, with their arguments."""
    ours, theirs = getattr(functional, function_name(name)), getattr(F, function_name(name))
    return (lambda x, **more: ours(x, **arguments, **more)), (lambda x, **more: theirs(x, **arguments, **more))


@pytest.mark.parametrize(("name", "arguments", "dtype"), OF_ONE_DTYPE, ids=ACTIVATION_IDS)
class TestOnEveryLayout:
    def test_the_forward_is_torchs(self, name, arguments, dtype):
        ours, theirs = functions(name, arguments)
        for layout in LAYOUTS:
            x = laid_out(layout, dtype).requires_grad_()
            y, expected = ours(x), theirs(x)
            assert_same_bits(y, expected)
            assert y.stride() == expected.stride(), layout


@given(st.sampled_from(ACTIVATIONS), st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)))
def test_any_function_dtype_and_layout(activation, dtype, layout):
    name, arguments = activation
    ours, theirs = functions(name, arguments)
    table = table_in(getattr(fewbit, name)(**arguments), dtype)
    x = laid_out(layout, dtype).requires_grad_()
    y, expected = ours(x), theirs(x)
    assert_same_bits(y, expected)
    assert y.stride() == expected.stride()
    for _, grad in gradient_layouts(x.detach()):
        assert_same_bits(torch.autograd.grad(y, x, grad, retain_graph=True)[0], expected_gradient(table, x, grad))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
class TestForwardIsTorchs:
    def test_on_every_size(self, name, arguments, dtype):
        """torch's vector instructions end somewhere, and its threads split somewhere."""
        ours, theirs = functions(name, arguments)
        for n in (1, 3, 15, 16, 17, 33, 2047, 70_001):
            x = torch.randn(n, generator=torch.Generator().manual_seed(n)).mul(3).to(dtype).requires_grad_()
            assert_same_bits(ours(x), theirs(x))

    def test_on_special_numbers(self, name, arguments, dtype):
        ours, theirs = functions(name, arguments)
        x = around([*INTEGER_KINKS, *(v for v in arguments.values() if v != "tanh")], dtype).requires_grad_()
        assert_same_bits(ours(x), theirs(x))

    def test_without_a_gradient(self, name, arguments, dtype):
        ours, theirs = functions(name, arguments)
        x = laid_out("sliced", dtype)
        assert_same_bits(ours(x), theirs(x))
        with torch.no_grad():
            assert ours(x.clone().requires_grad_()).grad_fn is None
        with torch.inference_mode():
            assert_same_bits(ours(x), theirs(x))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
def test_forward_is_torchs_on_large_tensors(name, arguments):
    """Beyond 32 MiB the result lies on huge pages, by torch's `out=`."""
    ours, theirs = functions(name, arguments)
    x = torch.randn((8 << 20) + 13, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(("name", "arguments"), [("GELU", {}), ("Tanhshrink", {})])
def test_large_tensors_keep_their_layout(name, arguments):
    ours, theirs = functions(name, arguments)
    x = torch.randn(8 << 20, generator=torch.Generator().manual_seed(0)).view(2048, 4096).t().requires_grad_()
    y, expected = ours(x), theirs(x)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
class TestBackwardIsGradTimesTable:
    def test_on_special_numbers_and_gradients(self, name, arguments, dtype):
        ours, _ = functions(name, arguments)
        table = table_in(getattr(fewbit, name)(**arguments), dtype)
        x = around(table.boundaries, dtype).requires_grad_()
        grad = x.detach().flip(0)
        (result,) = torch.autograd.grad(ours(x), x, grad)
        assert_same_bits(result, expected_gradient(table, x, grad))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_grad_times_any_given_table(dtype, kind, bits):
    table = table_of_bits(bits, kind)
    x = laid_out("channels-last", dtype).requires_grad_()
    grad = laid_out("channels-last", dtype, seed=5)
    (result,) = torch.autograd.grad(functional.gelu(x, table=table), x, grad)
    assert_same_bits(result, expected_gradient(table, x, grad))


@pytest.mark.parametrize(
    ("name", "bits"),
    [*itertools.product(["gelu", "silu", "sigmoid", "tanh", "selu", "softplus"], [1, 2, 3, 4]), ("tanh", 5)],
)
def test_bits_choose_the_table(name, bits):
    """Shipped up to 4 bits, solved on demand beyond."""
    table = fewbit.load_table(name, bits=bits) if bits <= 4 else fewbit.solve(name, bits=bits)
    x = torch.linspace(-9, 9, 999, dtype=torch.float64, requires_grad=True)
    (result,) = torch.autograd.grad(getattr(functional, name)(x, bits=bits).sum(), x)
    assert_same_bits(result, expected_gradient(table, x, torch.ones_like(x)))


EXACT_CASES = [
    *((name, arguments) for name, arguments in ACTIVATIONS if name in EXACT),
    *(("Threshold", {"threshold": t, "value": -1.0}) for t in (-2.3, 1 / 3, 6.0, 1e-3)),
    *(("Hardtanh", {"min_val": -t, "max_val": t}) for t in (0.3, 0.7, 1 / 3, 2.3, 1e-3)),
    *((name, {"lambd": t}) for name in ("Hardshrink", "Softshrink") for t in (0.0, 0.1, 0.7, 1 / 3, 2.3, 1e-3)),
    ("Hardshrink", {"lambd": -0.1}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "arguments"), EXACT_CASES, ids=lambda value: str(value))
class TestExact:
    """f' takes two values, so one bit holds it: torch's own gradient at every number, kinks included."""

    def test_has_torchs_gradient_at_the_kinks(self, name, arguments, dtype):
        ours, theirs = functions(name, arguments)
        kinks = [*INTEGER_KINKS, *arguments.values(), *(-v for v in arguments.values())]
        x = around(kinks, dtype)
        x = x[~x.isnan()].requires_grad_()  # there torch's clamps pass the gradient on; the table knows no NaN
        special = torch.tensor([torch.inf, torch.nan, -torch.inf, 0.0, -1.0], dtype=dtype)
        for grad in (torch.ones_like(x), x.detach().flip(0), special.repeat(x.numel())[: x.numel()]):
            results = [torch.autograd.grad(f(x), x, grad)[0] for f in (ours, theirs)]
            if name == "Hardsigmoid" and dtype == torch.float64:  # torch's 1/6 is that of float32
                torch.testing.assert_close(*results, rtol=1e-7, atol=0, equal_nan=True)
            else:
                assert_same_bits(*results)


@pytest.mark.parametrize(
    ("name", "arguments", "dtype"),
    [(*case, DTYPES[i % len(DTYPES)]) for i, case in enumerate(EXACT_CASES)],
    ids=lambda value: str(value),
)
class TestExactOfOneDtype:
    def test_keeps_one_bit_whatever_is_allowed(self, name, arguments, dtype):
        ours, _ = functions(name, arguments)
        for bits in (1, 3, 8):
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                ours(torch.zeros(100, dtype=dtype, requires_grad=True), bits=bits)
            assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, 13)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("name", "arguments"), EXACT_CASES, ids=lambda value: str(value))
def test_exact_ones_have_torchs_gradient_on_every_half(name, arguments, dtype):
    x = all_halves(dtype)
    x = x[~x.isnan()].requires_grad_()
    ours, theirs = (torch.autograd.grad(f(x).sum(), x)[0] for f in functions(name, arguments))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1001])
def test_exactly_the_packed_code_is_saved(n, bits):
    kept = []
    x = torch.zeros(n, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.gelu(x, table=table_of_bits(bits))
    assert [(t.dtype, t.numel(), t.untyped_storage().nbytes()) for t in kept] == [
        (torch.uint8, -(-n // 8) * bits, -(-n // 8) * bits)
    ]


@pytest.mark.parametrize(("name", "arguments"), INPLACE, ids=INPLACE_IDS)
class TestInplace:
    """What torch's in-place functions do, with the table's gradient."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_overwrites_and_returns_the_tensor_itself(self, name, arguments, dtype):
        ours, theirs = functions(name, arguments)
        table = table_in(getattr(fewbit, name)(**arguments), dtype)
        for layout in LAYOUTS:
            if "expanded" in layout or layout == "overlapping":
                continue
            leaf = laid_out(layout, dtype).requires_grad_()
            x = leaf * 1
            expected = theirs(x.detach().clone(memory_format=torch.preserve_format))
            y = ours(x, inplace=True)
            assert y is x
            assert_same_bits(x, expected)
            grad = laid_out(layout, dtype, seed=9).clone()
            (result,) = torch.autograd.grad(y, leaf, grad)
            assert_same_bits(result, expected_gradient(table, leaf, grad))

    @pytest.mark.parametrize(
        "part",
        [
            *(lambda x: x[3:9], lambda x: x[:, 2], lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x.view(-1)[5:77]),
            lambda x: x.diagonal(),
        ],
    )
    def test_on_a_part_of_a_tensor_changes_and_differentiates_that_part(self, name, arguments, part):
        ours, theirs = functions(name, arguments)
        leaf = torch.randn(12, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        x, expected = leaf * 1, leaf.detach().clone()
        ours(part(x), inplace=True)
        theirs(part(expected), inplace=True)
        assert_same_bits(x, expected)
        (result,) = torch.autograd.grad((x * 3).sum(), leaf)
        slope = torch.ones(12, 10, dtype=torch.float64)
        table = getattr(fewbit, name)(**arguments).table
        part(slope).copy_(torch.from_numpy(table(part(leaf).detach().numpy())))
        assert_same_bits(result, 3 * slope)

    @pytest.mark.parametrize(
        "part", [lambda x: x, lambda x: x[1:], lambda x: (x * 1).chunk(2)[0], lambda x: (x * 1).expand(3, 8)]
    )
    def test_what_torch_refuses_is_refused_before_anything_is_written(self, name, arguments, part):
        ours, theirs = functions(name, arguments)
        if name == "Threshold" and 0 in part(torch.ones(8)).stride():
            pytest.skip("torch lets threshold_ write where elements share memory")
        for function in (theirs, ours):
            x = torch.linspace(-1, 1, 8, requires_grad=True)
            overwritten = part(x)
            before = overwritten.detach().clone()
            with pytest.raises(RuntimeError):
                function(overwritten, inplace=True)
            assert torch.equal(overwritten, before)

    def test_saves_the_packed_code_alone_and_without_a_gradient_is_torchs(self, name, arguments):
        kept = []
        x = torch.zeros(1000, requires_grad=True) * 1
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            functions(name, arguments)[0](x, inplace=True, table=table_of_bits(3))
        assert [t.untyped_storage().nbytes() for t in kept] == [375]
        ours, theirs = functions(name, arguments)
        x = laid_out("sliced", torch.float32)
        assert ours(x, inplace=True) is x
        assert_same_bits(x, theirs(laid_out("sliced", torch.float32), inplace=True))

    def test_what_another_function_saved_is_guarded_like_torch_guards_it(self, name, arguments):
        y = torch.sigmoid(torch.zeros(4, requires_grad=True))
        functions(name, arguments)[0](y, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class TestOtherDtypes:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8, torch.bool])
    @pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu", "gelu", "silu", "celu", "hardtanh", "softsign"])
    @pytest.mark.parametrize("form", ["function", "module", "no_grad"])
    def test_integers_do_what_torch_does_or_are_refused_by_name(self, form, name, dtype):
        x = torch.tensor([0, 1, 1], dtype=dtype)
        ours = getattr(functional, name)
        if form == "module":
            names = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "celu": "CELU"}
            ours = getattr(fewbit, names.get(name, name.capitalize()))()
        try:
            expected = getattr(torch.nn.functional, name)(x)
        except RuntimeError:
            with (
                torch.set_grad_enabled(form != "no_grad"),
                pytest.raises(TypeError, match=f"^fewbit.{name} takes float32, .* not {str(dtype)[6:]}$"),
            ):
                ours(x)
        else:
            assert ours(x).dtype == expected.dtype
            assert_same_bits(ours(x).double(), expected.double())

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
    def test_gated_units_of_integers_are_refused_by_name(self, dtype):
        x = torch.ones(8, dtype=dtype)
        with pytest.raises(TypeError, match=r"^fewbit.silu takes float32, "):
            functional.swiglu(x, x)
        with pytest.raises(TypeError, match=r"^fewbit.gelu takes float32, "):
            functional.geglu(x, x)

    @pytest.mark.parametrize("name", ["sigmoid", "tanh"])
    def test_complex_numbers_do_what_torch_does_and_have_no_gradient_here(self, name):
        x = torch.randn(5, dtype=torch.complex64)
        assert torch.equal(getattr(functional, name)(x), getattr(torch, name)(x))
        with pytest.raises(TypeError, match=f"^fewbit.{name} takes float32, .* not complex64$"):
            getattr(functional, name)(x.requires_grad_())

    def test_inplace_refuses_before_anything_is_written(self):
        x = torch.ones(3, dtype=torch.complex64, requires_grad=True) * 2
        with pytest.raises(TypeError, match=r"^fewbit.silu takes .* not complex64$"):
            functional.silu(x, inplace=True)
        assert (x == 2).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "bits must be a whole number from 1 to 8, not 0"),
        ({"bits": 9}, "bits must be a whole number from 1 to 8, not 9"),
        ({"bits": True}, "bits must be a whole number from 1 to 8, not True"),
        ({"bits": "3"}, "bits must be a whole number from 1 to 8, not '3'"),
        ({"bits": 3.0}, "bits must be a whole number from 1 to 8, not 3.0"),
        ({"bits": [3]}, "bits must be a whole number from 1 to 8, not [3]"),
        ({"table": {}}, "table must be a fewbit.Table, not dict; read one with Table.from_json"),
        ({"table": "gelu"}, "table must be a fewbit.Table, not str; read one with Table.from_json"),
        ({"table": table_of_bits(4), "bits": 3}, "the table takes 4 bits, more than bits=3; leave bits out"),
        ({"table": table_of_bits(4), "bits": 0}, "bits must be a whole number from 1 to 8, not 0"),
        ({"approximate": "erf"}, "approximate must be 'none' or 'tanh', not 'erf'"),
        ({"approximate": ["tanh"]}, "approximate must be 'none' or 'tanh', not ['tanh']"),
    ],
)
def test_wrong_arguments_are_told_in_one_line_whatever_was_asked_before(arguments, message):
    x = torch.zeros(3, requires_grad=True)
    functional.gelu(x, bits=1)
    functional.gelu(x, bits=3)
    with pytest.raises(FewbitError) as caught:
        functional.gelu(x, **arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", [function_name(name) for name in dict(ACTIVATIONS)])
def test_arguments_are_torchs_by_name_and_place(name):
    ours = inspect.signature(getattr(functional, name)).parameters
    assert {"bits", "table"} <= set(ours)
    mine = [(p.name, p.default) for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    built_in = {  # of these torch tells no signature
        "gelu": [("approximate", "none")],
        "softplus": [("beta", 1.0), ("threshold", 20.0)],
        "hardshrink": [("lambd", 0.5)],
        "softshrink": [("lambd", 0.5)],
        "logsigmoid": [],
    }
    if name in built_in:
        theirs = [("input", inspect.Parameter.empty), *built_in[name]]
    else:
        theirs = [(p.name, p.default) for p in inspect.signature(getattr(F, name)).parameters.values()]
    assert mine == theirs


class TestSecondDerivative:
    """It would come out as 0 without a word, for the codes keep nothing of f''."""

    @pytest.mark.parametrize("inplace", [False, True])
    def test_is_refused_in_one_line(self, inplace):
        x = torch.ones(4, requires_grad=True)
        y = functional.silu(x * 1, inplace=inplace)
        with pytest.raises(
            RuntimeError, match=r"^fewbit activations have no second derivative \(create_graph=True\).*$"
        ):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    def test_by_torchs_hessian_is_not_zero_but_refused(self):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.functional.hessian(lambda x: functional.gelu(x).sum(), torch.ones(3))
