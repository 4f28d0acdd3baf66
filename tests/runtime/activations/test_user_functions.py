"""FewBit: what the callable or the expression returns, the table's gradient, and nothing else kept."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from functools import cache

import fewbit
import pytest
import torch
from fewbit.runtime import ops
from fewbit.runtime.backends.forwards import forward_of
from fewbit.tables import FewbitError
from runtime_cases import (
    DTYPES,
    HALVES,
    LAYOUTS,
    assert_same_bits,
    expected_gradient,
    gradient_layouts,
    laid_out,
    table_of_bits,
)
from torch import nn
from torch.nn import functional as F

WEIGHT = torch.ones((), requires_grad=True)


def snake(x):
    """A user's own activation, found by its name when it is unpickled."""
    return x + torch.sin(x) ** 2


class Scaled(nn.Module):
    """An activation with a number of its own, which does not learn."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return torch.tanh(self.scale.to(x.dtype) * x)


CASES = [
    ("x*sigmoid(1.702*x)", lambda x: x * torch.sigmoid(1.702 * x)),
    ("arctan", torch.atan),
    ("silu(beta=2)", lambda x: x * torch.sigmoid(2 * x)),
    ("softplus(beta=2)", lambda x: F.softplus(x, 2)),
    ("gelu", F.gelu),
    ("x", lambda x: x.clone()),
    (torch.sin, torch.sin),
    (snake, snake),
    (lambda x: x, lambda x: x.clone()),
    (F.mish, F.mish),
    (nn.GELU(), F.gelu),
    (Scaled(), lambda x: torch.tanh(0.5 * x)),
    (lambda x: torch.where(x > 0, 1.0, 0.0).to(x.dtype) * x, lambda x: torch.where(x > 0, 1.0, 0.0).to(x.dtype) * x),
    (lambda x: F.relu(x).t().contiguous().t() if x.dim() == 2 else F.relu(x), F.relu),  # laid out in its own way
    (lambda x: x.sum() * 0 + x.mean() * 0 + 0 * x + x if x.isfinite().all() else x * 1, lambda x: x * 1),
]
IDS = [str(case) if isinstance(case, str) else f"{getattr(case, '__name__', type(case).__name__)}" for case, _ in CASES]
WIDE = (torch.float32, torch.float64)


@cache
def module_of(activation):
    """With 3 bits; made once, because the table of a callable is solved anew for each."""
    return fewbit.FewBit(activation, bits=3)


def name_of(activation):
    """The name of a function without its address, which differs between the processes that run the tests."""
    return getattr(activation, "__name__", str(activation))


@pytest.mark.parametrize(("activation", "truth"), CASES, ids=IDS)
class TestEveryKind:
    @pytest.mark.sample(7)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_is_the_function_forward_and_the_table_backward(self, activation, truth, dtype):
        module = module_of(activation)
        for layout in LAYOUTS:
            x = laid_out(layout, dtype).requires_grad_()
            y = module(x)
            if dtype in WIDE or not isinstance(activation, str):
                assert_same_bits(y, truth(x))
            for _, grad in gradient_layouts(x.detach()):
                (result,) = torch.autograd.grad(y, x, grad, retain_graph=True)
                assert_same_bits(result, expected_gradient(module.table, x, grad))

    def test_saves_the_packed_code_alone_and_lets_the_input_go(self, activation, truth):
        module, kept = module_of(activation), []
        x = torch.randn(1000, requires_grad=True) * 2
        storage = weakref.ref(x.untyped_storage())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = module(x)
        assert [(t.dtype, t.untyped_storage().nbytes()) for t in kept] == [(torch.uint8, 125 * module.bits)]
        del x
        assert storage() is None
        y.sum().backward()

    def test_without_a_gradient_is_the_function_itself(self, activation, truth):
        module = module_of(activation)
        x = laid_out("sliced", torch.float64)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_same_bits(module(x), truth(x))

    def test_the_function_is_the_modules_twin(self, activation, truth):
        x = laid_out("odd", torch.float32).requires_grad_()
        results = []
        for f in (module_of(activation), lambda x: fewbit.functional.activation(x, activation, bits=3)):
            y = f(x)
            results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
        for a, b in zip(*results, strict=True):
            assert_same_bits(a, b)

    def test_opcheck(self, activation, truth):
        module = fewbit.FewBit(activation, table=table_of_bits(3))
        x = laid_out("permuted", torch.float32, special=False).requires_grad_()
        arguments = (x, module._function, list(module._parameters_of_function), module._key)
        torch.library.opcheck(ops.activation, arguments, test_utils=("test_schema", "test_autograd_registration"))

    def test_runs_on_the_meta_device(self, activation, truth):
        if getattr(activation, "__name__", "") == "<lambda>":
            pytest.skip("one of these looks at its numbers")
        x = torch.empty(3, 5, device="meta", requires_grad=True)
        y = copy.deepcopy(module_of(activation)).to("meta")(x)
        y.sum().backward()
        assert (y.device.type, x.grad.shape) == ("meta", x.shape)


def test_compiled_gradients_are_right_whatever_torchs_fakes_foresee_of_the_layout():
    """2**x is laid out row-major, whatever x is, and fakes tell otherwise (torch 2.13)."""
    module = fewbit.FewBit(lambda x: 2**x, bits=3)
    x = laid_out("permuted", torch.float32, special=False).requires_grad_()
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    grad = laid_out("permuted", torch.float32, seed=4, special=False)
    assert_same_bits(torch.autograd.grad(y, x, grad)[0], expected_gradient(module.table, x, grad))
    assert y.stride() == x.stride()


class TestTables:
    def test_are_solved_for_the_function_or_the_users_as_they_are(self):
        module = fewbit.FewBit("x*sigmoid(1.702*x)", bits=2)
        solved = fewbit.solve("x*sigmoid(1.702*x)", bits=2)
        assert (module.table.levels == solved.levels).all()
        assert (fewbit.FewBit(torch.tanh, bits=2).bits, fewbit.FewBit("tanh").table) == (2, fewbit.load_table("tanh"))
        table = table_of_bits(5)
        for activation in ("x*x", torch.sin):
            assert fewbit.FewBit(activation, table=table).table is table

    def test_kinks_are_told_to_the_compiler(self):
        """A step narrower than the grid is seen by who knows it."""
        text = "where(x>0.123456,where(x>0.123457,x,3*x),x)"
        unseen, seen = fewbit.FewBit(text, bits=1), fewbit.FewBit(text, bits=1, kinks=[0.123456, 0.123457])
        assert seen.table(0.1234565) == 3
        assert unseen.table(0.1234565) != 3 or unseen.table == seen.table

    def test_a_named_function_is_exact_in_every_dtype(self):
        ours, theirs = fewbit.FewBit("hardtanh(max_val=0.7)"), nn.Hardtanh(max_val=0.7)
        for dtype in DTYPES:
            x = torch.tensor([0.7, -1.0, 0.5], dtype=dtype, requires_grad=True)
            assert_same_bits(*(torch.autograd.grad(m(x).sum(), x)[0] for m in (ours, theirs)))


class TestCopies:
    @pytest.mark.parametrize("activation", ["x*tanh(x)", "gelu", torch.sin, snake, nn.GELU(), Scaled()], ids=name_of)
    def test_survive_pickling_and_train_alike(self, activation):
        module = fewbit.FewBit(activation, bits=2)
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        x = laid_out("odd", torch.float32).requires_grad_()
        expected = torch.autograd.grad(module(x), x, torch.ones_like(x))[0]
        twins = [copy.copy(module), copy.deepcopy(module), torch.load(buffer, weights_only=False)]
        shown = repr(module)
        del module
        gc.collect()
        for twin in twins:
            assert repr(twin) == shown
            assert_same_bits(torch.autograd.grad(twin(x), x, torch.ones_like(x))[0], expected)

    def test_a_graph_survives_its_module(self):
        x = torch.ones(9, requires_grad=True)
        y = fewbit.FewBit(lambda x: torch.sin(x))(x)
        gc.collect()
        y.sum().backward()

    @pytest.mark.deep
    def test_in_a_process_that_never_saw_them(self, tmp_path):
        x = torch.linspace(-3, 3, 50)
        modules = [fewbit.FewBit("x*tanh(x)"), fewbit.FewBit(torch.sin, table=table_of_bits(3, seed=8))]
        path = tmp_path / "modules.pickle"
        path.write_bytes(pickle.dumps((modules, x)))
        script = f"""
import pickle
modules, x = pickle.load(open({str(path)!r}, "rb"))
for module in modules:
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()
    print(leaf.grad.tolist())
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for module, line in zip(modules, done.stdout.splitlines(), strict=True):
            assert str(expected_gradient(module.table, x, torch.ones_like(x)).tolist()) == line

    def test_a_callable_is_forgotten_with_its_module(self):
        module = fewbit.FewBit(lambda x: torch.sin(x))
        name = module._function
        assert forward_of(name) is not None
        del module
        gc.collect()
        with pytest.raises(
            FewbitError, match=r"^no callable:<lambda> in this process: its module is gone or elsewhere"
        ):
            forward_of(name)


def test_has_the_state_of_the_callable_alone_and_says_what_it_is():
    assert fewbit.FewBit("x*x").state_dict() == fewbit.FewBit(torch.sin).state_dict() == {}
    assert list(fewbit.FewBit(Scaled()).state_dict()) == ["function.scale"]
    assert repr(fewbit.FewBit("x * tanh(x)", bits=2)) == "FewBit('x * tanh(x)', bits=2)"
    assert repr(fewbit.FewBit(torch.sin, bits=2)) == "FewBit(sin, bits=2)"
    assert fewbit.FewBit("x * tanh(x)").activation == "x*tanh(x)"
    assert fewbit.FewBit("Swish").activation == "silu"


class TestRefusals:
    @pytest.mark.parametrize(
        ("activation", "message"),
        [
            (nn.PReLU(), r"PReLU holds parameters that learn, .* freeze them by requires_grad_\(False\), or .*"),
            (lambda x: WEIGHT * x, r"<lambda> holds parameters that learn, .*"),
            (nn.ReLU(inplace=True), r"ReLU writes into its input; give the form that does not, with inplace=False"),
            (lambda x: x.sum(), r"<lambda> is not elementwise: of the shape \(9,\) it makes the shape \(\); .*"),
            (lambda x: torch.softmax(x, 0), r"<lambda> is not elementwise: what it is at one x depends on .*"),
            (lambda x: 3, r"<lambda> is not elementwise: of the shape \(9,\) it makes int; .*"),
            (lambda x: x.foo(), r"<lambda> fails: AttributeError: .*; give an expression in x, or .*"),
            (nn.GELU, r"GELU is not elementwise: of the shape \(9,\) it makes GELU; .*"),
            (3, r"no activation: 3; give an expression in x, or an elementwise function of torch tensors"),
            ("nothing", r"unknown activation 'nothing'; nearest: .*"),
            ("y*2", r"the variable of an expression is x, and 'y\*2' has none: write x\*2"),
        ],
    )
    def test_are_told_in_one_line(self, activation, message):
        for make in (fewbit.FewBit, lambda f: fewbit.functional.activation(torch.ones(3, requires_grad=True), f)):
            with pytest.raises(FewbitError, match=f"^(?:{message})$"):
                make(activation)

    def test_what_learns_later_is_refused_later(self):
        prelu = nn.PReLU().requires_grad_(False)
        module = fewbit.FewBit(prelu)
        x = torch.ones(3, requires_grad=True)
        module(x)
        prelu.requires_grad_(True)
        with pytest.raises(FewbitError, match=r"^PReLU holds parameters that learn"):
            module(x)

    def test_a_result_of_another_shape_and_another_table(self):
        module = fewbit.FewBit(lambda x: x if x.dim() == 1 else x[:1], table=table_of_bits(1))
        with pytest.raises(FewbitError, match=r"elementwise, but of \(2, 3\) this makes \(1, 3\)$"):
            module(torch.ones(2, 3, requires_grad=True))
        module = fewbit.FewBit("x*x")
        with pytest.raises(AttributeError):
            module.table = table_of_bits(2)


class TestCompiled:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        "activation", ["x*sigmoid(1.702*x)", "where(x>0,max(x,1),0.5)", "gelu", torch.sin, snake, Scaled()], ids=name_of
    )
    def test_equals_eager(self, activation):
        module = fewbit.FewBit(activation, bits=2)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x = laid_out("transposed", torch.float32).requires_grad_()
        for f in (compiled, module):
            with torch.no_grad():
                assert_same_bits(compiled(x), f(x))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = compiled(x)
        assert sum(t.untyped_storage().nbytes() for t in kept) == -(-x.numel() // 8) * module.bits
        expected = module(x)
        assert_same_bits(y, expected)
        for a, b in zip(*(torch.autograd.grad(z, x, torch.ones_like(z)) for z in (y, expected)), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", HALVES)
def test_expressions_in_halves_are_nearer_to_the_truth_than_torchs_steps(dtype):
    x = laid_out("contiguous", dtype, special=False)
    truth = x.double() * torch.tanh(F.softplus(x.double()))
    ours = (fewbit.FewBit("x*tanh(softplus(x))")(x).double() - truth).abs().mean()
    steps = (x * torch.tanh(F.softplus(x)) - truth).abs().mean()
    assert ours <= steps
