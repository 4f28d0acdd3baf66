"""The short way gives what the ops give, and steps aside for whoever must see an op."""

import fewbit
import pytest
import torch
from fewbit.runtime import ops
from fewbit.runtime.activations import dispatch
from fewbit.runtime.tensors import traits
from fewbit.runtime.tensors.traits import is_plain
from runtime_cases import DENSE, DTYPES, NOT_DENSE, assert_same_bits, key_of, laid_out, table_of_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def both(x, function="gelu"):
    """Value and gradient, the short way and by the ops."""
    key = key_of(table_of_bits(3))
    for run in (dispatch.plain_activation, lambda *arguments: ops.activation(*arguments)[0]):
        leaf = x.detach().requires_grad_()
        y = run(leaf, function, [], key)
        (gradient,) = torch.autograd.grad(y, leaf, y.detach().cos())
        yield y.detach(), gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", DENSE | NOT_DENSE)
def test_gives_what_the_ops_give(layout, dtype):
    x = laid_out(layout, dtype)
    assert is_plain(x)
    (y, gradient), (expected_y, expected_gradient) = both(x)
    assert_same_bits(y, expected_y)
    assert_same_bits(gradient, expected_gradient)
    assert (y.stride(), gradient.stride()) == (expected_y.stride(), expected_gradient.stride())


def test_serves_tensors_and_parameters():
    assert is_plain(torch.ones(3)) and is_plain(torch.nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    "x",
    [
        *(torch.ones(3).as_subclass(Subclass), torch.ones(3, device="meta"), torch.ones(3).to_sparse()),
        *(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), torch._neg_view(torch.ones(3))),
        FakeTensorMode().from_tensor(torch.ones(3)),
    ],
    ids=["subclass", "meta", "sparse", "quantized", "negated", "fake"],
)
def test_leaves_tensors_that_are_not_plain_to_the_dispatcher(x):
    assert not is_plain(x)


@pytest.mark.parametrize("mode", [Seen, TorchFunctionMode, FakeTensorMode])
def test_leaves_modes_to_the_dispatcher(mode):
    x = torch.ones(3)
    with mode():
        assert not is_plain(x)
    assert is_plain(x)


def test_a_first_use_in_inference_mode_says_nothing_of_other_tensors():
    traits._plain_keys.cache_clear()
    with torch.inference_mode():
        assert not is_plain(torch.ones(3))
    assert is_plain(torch.ones(3))


def test_leaves_transforms_to_the_dispatcher():
    served = []
    torch.func.vmap(lambda x: served.append(is_plain(x)) or x)(torch.ones(3, 3))
    assert served == [False]


def test_modes_see_the_ops_of_both_passes():
    x = torch.ones(3, requires_grad=True)
    with Seen() as forward:
        y = fewbit.GELU()(x)
    with Seen() as backward:
        y.sum().backward()
    assert ops.activation in forward.ops
    assert ops.multiply in backward.ops


def test_a_mode_sees_the_backward_pass_of_a_forward_pass_that_it_has_not_seen():
    x = torch.ones(3, requires_grad=True)
    y = fewbit.GELU()(x)
    with Seen() as backward:
        y.sum().backward()
    assert ops.multiply in backward.ops


def test_a_traced_graph_holds_the_op():
    traced = torch.jit.trace(fewbit.GELU(), torch.ones(3, requires_grad=True), check_trace=False)
    assert "fewbit::activation" in str(traced.inlined_graph)


def test_a_negated_view_is_read_as_what_it_stands_for():
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    module = fewbit.GELU()
    (gradient,) = torch.autograd.grad(module(torch._neg_view(x)).sum(), x)
    (expected,) = torch.autograd.grad(module(-x).sum(), x)
    assert_same_bits(gradient, expected)


def test_gradients_that_are_negated_views_or_come_in_batches():
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    y = fewbit.GELU()(x)

    def gradient(g, **options):
        return torch.autograd.grad(y, x, g, retain_graph=True, **options)[0]

    assert_same_bits(gradient(torch._neg_view(x)), gradient(-x))
    batch = torch.eye(9)
    assert_same_bits(gradient(batch, is_grads_batched=True), torch.stack([gradient(g) for g in batch]))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_backward_pass():
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    module = fewbit.GELU()
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        module(x).sum().backward()
    assert_same_bits(x.grad, expected)


def test_hooks_for_saved_tensors_see_the_codes_alone():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        x = torch.ones(16, requires_grad=True)
        fewbit.GELU(bits=3)(x).sum().backward()
    assert [(t.dtype, t.shape) for t in packed] == [(torch.uint8, (6,))]
    assert x.grad is not None
