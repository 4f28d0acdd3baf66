import sys

import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, solve
from fewbit.fewbit_gen.activations import as_activation
from fewbit.tables import FewbitError
from scipy.special import expit

X = np.linspace(-10, 10, 2001)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


class TestTorch:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda torch: torch.nn.GELU(), "gelu"),
            (lambda torch: torch.nn.functional.silu, "silu"),
            (lambda torch: torch.sigmoid, "sigmoid"),
            (lambda torch: torch.nn.Mish(), "mish"),
            (lambda torch: torch.nn.ELU(alpha=2), "elu(alpha=2)"),
            (lambda torch: torch.nn.Softplus(beta=2), "softplus(beta=2)"),
            (lambda torch: torch.nn.Hardswish(), "hardswish"),
            (lambda torch: torch.nn.ReLU6(), "relu6"),
            (lambda torch: torch.nn.ReLU(inplace=True), "relu"),
            (lambda torch: torch.nn.Hardshrink(0.25), "hardshrink(lambd=0.25)"),
            (lambda torch: torch.nn.Softshrink(), "softshrink"),
            (lambda torch: torch.nn.Hardtanh(-1.3, 0.7), "hardtanh(min_val=-1.3,max_val=0.7)"),
            (lambda torch: torch.nn.LeakyReLU(0.2), "leaky_relu(negative_slope=0.2)"),
            (lambda torch: torch.nn.PReLU(init=0.25), "leaky_relu(negative_slope=0.25)"),  # float32 parameters
            (lambda torch: lambda x: x / (1 + abs(x)), "softsign"),
            (lambda torch: lambda x: torch.maximum(x, 0 * x), "relu"),
            (lambda torch: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), "relu"),
        ],
    )
    @pytest.mark.parametrize("kind", ["shared", "interval"])
    def test_gives_the_table_of_the_same_activation_by_name(self, torch, make, name, kind):
        table, named = solve(make(torch), bits=2, kind=kind), solve(name, bits=2, kind=kind)
        assert table.error == pytest.approx(named.error, rel=1e-5, abs=1e-20)
        if named.error == 0:
            assert table.boundaries.tolist() == named.boundaries.tolist()
            assert table.levels == pytest.approx(named.levels, rel=1e-15)

    @pytest.mark.parametrize("name", ["relu6", "hardtanh", "hardshrink", "hardswish", "hardsigmoid"])
    def test_kinks_are_found_to_the_last_bit(self, torch, name):
        assert as_activation(getattr(torch.nn.functional, name)).kinks == parse_activation(name).kinks

    def test_a_smooth_function_has_none(self, torch):
        for function in (torch.sin, torch.exp, torch.tanh, torch.nn.GELU(), lambda x: torch.sin(20 * x) * 1000):
            assert as_activation(function).kinks == ()

    def test_a_kink_of_which_f_takes_a_value_of_its_own_has_the_value_from_the_left(self, torch):
        activation = as_activation(torch.abs)
        assert activation.kinks == (0.0,)
        assert activation.derivative(np.array([-1.0, 0.0, 5e-324])).tolist() == [-1.0, -1.0, 1.0]

    def test_leaves_the_module_as_it_was(self, torch):
        module = torch.nn.PReLU()
        solve(module, bits=1)
        assert module.weight.dtype == torch.float32
        assert module.weight.grad is None

    def test_runs_where_gradients_are_off(self, torch):
        with torch.no_grad():
            assert solve(torch.nn.GELU(), bits=2).error == pytest.approx(solve("gelu", bits=2).error)

    def test_is_called_by_its_name(self, torch):
        assert solve(torch.nn.Mish(), bits=1).activation == "Mish"
        assert solve(torch.tanh, bits=1).activation == "tanh"
        assert solve(lambda x: x * x, bits=1).activation == "<lambda>"

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda torch: lambda x: torch.softmax(x, 0), "not elementwise: what it is at one x depends on the others"),
            (lambda torch: lambda x: x - x.mean(), "not elementwise"),
            (lambda torch: torch.nn.Dropout(), "not elementwise: .* or on chance"),
            (lambda torch: torch.sum, r"sum is not elementwise: of the shape \(9,\) it makes \(\)"),
            (lambda torch: lambda x: x[:3], r"of the shape \(9,\) it makes \(3,\)"),
            (lambda torch: lambda x: torch.complex(x, x), "must give real numbers, not complex128"),
            (lambda torch: lambda x: x.detach(), "its result does not know x"),
            (lambda torch: lambda x: x > 0, "its result does not know x"),
            (lambda torch: lambda x: 3.0, "makes of a torch tensor 'float'"),
            (lambda torch: lambda x: None, "makes of a torch tensor 'NoneType'"),
            (lambda torch: lambda x: 1 / 0, "fails: ZeroDivisionError: division by zero"),
            (lambda torch: lambda: 0, "fails: TypeError"),
            (lambda torch: np.tanh, "fails: .*derivative= the function f' of NumPy arrays"),
            (lambda torch: torch.nn.Linear(3, 4), "Linear fails: RuntimeError"),
            (lambda torch: torch.log, "the derivative of log is not finite at x = "),
            (lambda torch: lambda x: x**0.5, "not finite at x = "),
        ],
    )
    def test_what_cannot_be_differentiated_is_refused_in_one_line(self, torch, make, message):
        with pytest.raises(FewbitError, match=message) as caught:
            solve(make(torch), bits=2)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500

    def test_without_torch_it_says_what_to_give(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(FewbitError, match=r"takes PyTorch, which is not installed; .* derivative="):
            solve(lambda x: x * x, bits=2)


class TestNumpy:
    def test_a_function_with_its_derivative_needs_no_torch(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        table = solve(np.tanh, bits=2, derivative=lambda x: 1 / np.cosh(x) ** 2)
        assert table.error == pytest.approx(solve("tanh", bits=2).error, rel=1e-9)
        assert table.activation == "tanh"

    def test_its_jumps_are_found(self):
        activation = as_activation(abs, derivative=np.sign)
        assert activation.kinks == (0.0,)
        assert activation.step
        assert solve(abs, derivative=np.sign).levels.tolist() == [-1.0, 1.0]

    def test_the_function_may_not_spoil_what_it_is_given(self):
        def derivative(x):
            x *= 0
            return x

        x = X.copy()
        as_activation(np.sin, derivative=derivative).derivative(x)
        assert x.tolist() == X.tolist()

    @pytest.mark.parametrize(
        ("derivative", "message"),
        [
            (lambda x: x + 1j, "the derivative of sin must give real numbers, not complex128"),
            (lambda x: np.where(x > 0, "a", "b"), "must give real numbers, not <U1"),
            (lambda x: x > 0, "must give real numbers, not bool"),
            (lambda x: 1.0, "not elementwise"),
            (lambda x: x.cumsum(), "not elementwise"),
            (lambda x: x.nonsense, "fails: AttributeError"),
            (lambda x: x / (x - x), "the derivative of sin is not finite at x = "),
            (3, "an activation is .* not 3"),
        ],
    )
    def test_a_bad_derivative_is_refused_in_one_line(self, derivative, message):
        with pytest.raises(FewbitError, match=message) as caught:
            solve(np.sin, bits=2, derivative=derivative)
        assert "\n" not in str(caught.value)

    def test_a_derivative_goes_with_a_callable(self):
        with pytest.raises(FewbitError, match="derivative= goes with a callable"):
            solve("gelu", derivative=expit)
