"""torch.func: first derivatives are the table's, second ones and forward mode are refused; never torch's silently."""

import fewbit
import pytest
import torch
from runtime_cases import assert_same_bits, expected_gradient
from torch import nn

# torch says that these ops have no batching rule, and runs them sample by sample.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

ACTIVATIONS = [fewbit.GELU(bits=3), fewbit.SiLU(inplace=True), fewbit.FewBit("x*tanh(x)"), fewbit.FewBit(torch.sin)]
REFUSED = r"^fewbit activations have no second derivative \(create_graph=True\) and no forward mode: [^\n]*$"


@pytest.fixture
def x():
    return torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
class TestFirstDerivatives:
    def weighted(self, activation):
        return lambda x: (activation(x * 1) * torch.arange(1, x.numel() + 1).view(x.shape)).sum()

    def expected(self, activation, x):
        weights = torch.arange(1, x[0].numel() + 1, dtype=x.dtype).view(x[0].shape).expand(x.shape)
        return expected_gradient(activation.table, x, weights)

    def test_grad(self, activation, x):
        assert_same_bits(torch.func.grad(self.weighted(activation))(x[0]), self.expected(activation, x)[0])

    def test_grad_of_each_sample(self, activation, x):
        gradient = torch.func.vmap(torch.func.grad(self.weighted(activation)))
        assert_same_bits(gradient(x), self.expected(activation, x))

    def test_grad_of_samples_along_another_dimension(self, activation, x):
        gradient = torch.func.vmap(torch.func.grad(self.weighted(activation)), in_dims=2, out_dims=2)
        assert_same_bits(gradient(x.permute(1, 2, 0)), self.expected(activation, x).permute(1, 2, 0))

    def test_grad_of_turned_samples(self, activation, x):
        def f(x):
            return self.weighted(lambda y: activation(y.t() * 1).t())(x)

        assert_same_bits(torch.func.vmap(torch.func.grad(f))(x), self.expected(activation, x))

    def test_jacobian_and_vjp(self, activation, x):
        row = x[0, 0]
        slopes = expected_gradient(activation.table, row, torch.ones_like(row))
        assert torch.equal(torch.func.jacrev(lambda x: activation(x * 1))(row), torch.diag(slopes))
        _, pull = torch.func.vjp(lambda x: activation(x * 1), row)
        assert_same_bits(pull(row)[0], expected_gradient(activation.table, row, row))

    @pytest.mark.parametrize("turn", [lambda x: x, lambda x: x.t(), lambda x: x[1:, ::2]])
    def test_backward_through_vmap(self, activation, x, turn):
        leaf, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = torch.func.vmap(lambda x: activation(turn(x * 1)))(leaf)
        plain = torch.stack([activation(turn(sample * 1)) for sample in whole])
        assert_same_bits(y, plain)
        (result,) = torch.autograd.grad((y * plain.detach()).sum(), leaf)
        (expected,) = torch.autograd.grad((plain * plain.detach()).sum(), whole)
        assert_same_bits(result, expected)

    def test_many_gradients_at_once(self, activation, x):
        leaf = x[0].clone().requires_grad_()
        (result,) = torch.autograd.grad(activation(leaf * 1), leaf, x, is_grads_batched=True)
        assert_same_bits(result, expected_gradient(activation.table, x[:1].expand_as(x), x))


def test_gradients_of_parameters_for_each_sample(x):
    linear, activation = nn.Linear(5, 3, dtype=x.dtype), fewbit.GELU(bits=2)
    parameters = dict(linear.named_parameters())

    def loss(parameters, x):
        return activation(torch.func.functional_call(linear, parameters, (x,))).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        one = torch.autograd.grad(loss(parameters, sample), list(parameters.values()))
        for a, b in zip(one, gradients.values(), strict=True):
            torch.testing.assert_close(b[i], a, rtol=1e-12, atol=1e-12)


def _sum(x):
    return fewbit.functional.gelu(x).sum()


class TestRefusals:
    def test_grad_of_grad(self, x):
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.func.grad(lambda x: torch.func.grad(_sum)(x).sum())(x)

    def test_hessian(self, x):
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.func.hessian(_sum)(x[0, 0])

    def test_backward_through_grad(self, x):
        leaf = x.clone().requires_grad_()
        gradient = torch.func.grad(_sum)(leaf)
        with pytest.raises(RuntimeError, match=REFUSED):
            gradient.sum().backward()

    def test_forward_mode_within_a_gradient(self, x):
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.func.grad(lambda x: torch.func.jvp(fewbit.functional.gelu, (x,), (x,))[1].sum())(x)


def test_forward_mode_keeps_nothing_and_is_torchs(x):
    ours, theirs = (torch.func.jvp(f, (x,), (x,)) for f in (fewbit.functional.gelu, nn.functional.gelu))
    for a, b in zip(ours, theirs, strict=True):
        assert_same_bits(a, b)
