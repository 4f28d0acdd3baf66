"""`ChunkedHead`: logits that a cross-entropy takes in chunks, and torch's, bit for bit, for everything else."""

import copy
import pickle
import weakref

import pytest
import torch
from fewbit import FewbitError
from fewbit.layers import ChunkedHead
from torch import nn
from torch.nn import functional as F

WORDS = 13


def heads(bias=True, dtype=torch.float32):
    """A chunked head, torch's with the same parameters, hidden states and labels of three sequences of five tokens."""
    torch.manual_seed(0)
    ours = ChunkedHead(6, WORDS, bias=bias, chunk_size=4, dtype=dtype)
    torchs = nn.Linear(6, WORDS, bias=bias, dtype=dtype)
    torchs.load_state_dict(ours.state_dict())
    labels = torch.randint(WORDS, (3, 5))
    labels[1, 2:] = -100
    return ours, torchs, torch.randn(3, 5, 6, dtype=dtype), labels


def is_chunked(loss):
    """Whether a chunked loss is in the graph."""
    nodes = [loss.grad_fn]
    for node in nodes:  # which grows
        nodes += [before for before, _ in node.next_functions if before is not None]
    return any("ChunkedCrossEntropy" in type(node).__name__ for node in nodes)


def flat(logits):
    return logits.view(-1, WORDS)


# Ways from logits to the loss, as models write them; each gets logits and labels.
CHUNKED = {
    "view": lambda x, y: F.cross_entropy(flat(x), y.view(-1)),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.reshape(-1, WORDS), y.reshape(-1)),
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1, reduction="sum"),
    "shift": lambda x, y: F.cross_entropy(flat(x[..., :-1, :].contiguous()), y[:, 1:].reshape(-1), ignore_index=-100),
    "one row": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "some tokens": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "cast": lambda x, y: F.cross_entropy(flat(x.to(torch.float32).float()), y.view(-1)),
    "cap": lambda x, y: F.cross_entropy(flat(2.0 * torch.tanh(x / 2.0)), y.view(-1)),
    "scale": lambda x, y: F.cross_entropy(flat(x * 0.5), y.view(-1)),
    "constant": lambda x, y: F.cross_entropy(flat(x + torch.arange(WORDS) / 8.0), y.view(-1)),
    "read after": lambda x, y: F.cross_entropy(flat(x), y.view(-1)) + 0 * int(x.argmax(-1).sum()),
}
COMPUTED = {
    "weights of classes": lambda x, y: F.cross_entropy(flat(x), y.view(-1), torch.arange(1.0, WORDS + 1)),
    "of each token": lambda x, y: F.cross_entropy(flat(x), y.view(-1), reduction="none").square().sum(),
    "probabilities": lambda x, y: F.cross_entropy(flat(x), torch.eye(WORDS)[y.clamp(min=0).view(-1)]),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "another loss": lambda x, y: F.log_softmax(x, -1).square().mean(),
    "some words": lambda x, y: F.cross_entropy(x[..., :7].reshape(-1, 7), (y % 7).view(-1)),
    "in place": lambda x, y: F.cross_entropy(flat(x.mul_(2)), y.view(-1)),
    "twice capped": lambda x, y: F.cross_entropy(flat(x.tanh().tanh()), y.view(-1)),
    "clamped": lambda x, y: F.cross_entropy(flat(x.clamp(-0.5, 0.5)), y.view(-1)),
    "other width": lambda x, y: F.cross_entropy(x.view(3, -1), y[:, 0]),
    "custom function": lambda x, y: F.cross_entropy(flat(Negated.apply(x)), y.view(-1)),
}


class Negated(torch.autograd.Function):
    """A function of autograd that no torch function announces."""

    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, grad):
        return -grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", [*CHUNKED, *COMPUTED])
def test_loss_and_gradients_are_torchs(way, bias):
    """However the code comes from logits to the loss, and whether or not chunks can follow it."""
    ours, torchs, x, labels = heads(bias, torch.float64 if way in CHUNKED and way not in ("cast", "constant") else None)
    call = (CHUNKED | COMPUTED)[way]
    of_ours, of_torchs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, expected = call(ours(of_ours), labels), call(torchs(of_torchs), labels)
    assert loss.dtype == expected.dtype
    assert is_chunked(loss) == (way in CHUNKED)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for a, b in zip((of_ours, *ours.parameters()), (of_torchs, *torchs.parameters()), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_logits_that_are_read_are_torchs_bit_for_bit():
    """With whatever was done to them before; and they are computed once."""
    ours, torchs, x, _ = heads()
    logits, expected = ours(x), torchs(x)
    assert torch.equal(logits, expected)
    assert logits.value() is logits.value()
    capped = flat(3 * torch.tanh(ours(x)[:, 1:] / 3))
    assert torch.equal(capped, (3 * torch.tanh(expected[:, 1:] / 3)).reshape(-1, WORDS))
    assert logits.shape == expected.shape
    assert logits.requires_grad
    assert logits.detach().numpy().tolist() == expected.tolist()
    assert str(ours(x)) == str(expected).replace("ViewBackward0", "AliasBackward0")
    assert [row.shape for row in ours(x)] == [row.shape for row in expected]
    for twin in (copy.deepcopy(ours(x).detach()), pickle.loads(pickle.dumps(ours(x).detach()))):
        assert type(twin) is torch.Tensor
        assert torch.equal(twin, expected)


def test_no_logits_live_until_the_backward_pass():
    """No tensor as large as the logits of all tokens is ever there, saved or not."""
    ours, _, x, labels = heads()
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            plain = (t for t in torch.utils._pytree.tree_leaves(result) if type(t) is torch.Tensor)
            sizes.extend(t.numel() for t in plain if t.device.type == "cpu")
            return result

    with Sizes():
        F.cross_entropy(flat(ours(x.requires_grad_())), labels.view(-1)).backward()
    assert 4 * WORDS in sizes
    assert max(sizes) < labels.numel() * WORDS


def test_frozen_and_adapted():
    """The head and its adapter make one sum of logits, which stays in chunks."""
    ours, torchs, x, labels = heads()
    down, up = nn.Linear(6, 2, bias=False), ChunkedHead(2, WORDS, bias=False)
    ours.requires_grad_(False)
    x.requires_grad_()
    loss = F.cross_entropy(flat(ours(x) + up(down(x)) * 0.25), labels.view(-1))
    assert is_chunked(loss)
    plain = torchs(x) + F.linear(down(x), up.weight) * 0.25
    expected = F.cross_entropy(flat(plain), labels.view(-1))
    torch.testing.assert_close(loss, expected)
    assert torch.equal(ours(x) + up(down(x)) * 0.25, plain)
    wanted = (x, down.weight, up.weight)
    for a, b in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_is_that_of_the_call():
    """A head called under autocast multiplies in its dtype, though the loss is computed outside; and the reverse."""
    ours, torchs, x, labels = heads()
    with torch.autocast("cpu", torch.bfloat16):
        logits, plain = ours(x), torchs(x)
        inside = F.cross_entropy(flat(logits), labels.view(-1))
        assert inside.dtype == torch.float32
    assert logits.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(logits, plain)
    outside = F.cross_entropy(flat(ours(x)).float(), labels.view(-1))
    torch.testing.assert_close(outside, F.cross_entropy(flat(torchs(x)), labels.view(-1)))
    assert is_chunked(inside)
    torch.testing.assert_close(inside, F.cross_entropy(flat(plain).float(), labels.view(-1)))


def test_logits_after_the_step_are_refused():
    """They would be those of other weights."""
    ours, _, x, labels = heads()
    logits, early = ours(x), ours(x)
    before = early.detach()
    F.cross_entropy(flat(logits), labels.view(-1)).backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    assert torch.equal(early, before)
    for read in (lambda: logits.argmax(-1), lambda: F.cross_entropy(flat(logits), labels.view(-1))):
        with pytest.raises(FewbitError, match="the head's weight or input has changed"):
            read()


def test_where_nothing_is_deferred():
    """Without gradients, in compiled code, in torch.func, where the class was changed since, the head is torch's."""
    ours, torchs, x, labels = heads()
    with torch.no_grad():
        assert type(ours(x)) is torch.Tensor
    with torch.inference_mode():
        assert type(ours(x)) is torch.Tensor
    assert type(copy.deepcopy(ours).requires_grad_(False)(x)) is torch.Tensor

    def loss_of(x, head):
        return F.cross_entropy(flat(head(x)), labels.view(-1))

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)(x, ours)
    torch.testing.assert_close(compiled, loss_of(x, torchs))
    torch.testing.assert_close(torch.func.grad(loss_of)(x, ours), torch.func.grad(loss_of)(x, torchs))
    nn.utils.parametrizations.weight_norm(ours)
    assert type(ours(x)) is torch.Tensor


def test_hooks_see_logits():
    """Forward and backward hooks of the head are called as torch calls them, and may change what they get."""
    ours, torchs, x, labels = heads()
    seen = []
    for head in (ours, torchs):
        head.register_full_backward_hook(lambda module, grads, outputs: seen.append(outputs[0]))
        head.register_forward_hook(lambda module, inputs, output: output * 2)
        F.cross_entropy(flat(head(x.clone().requires_grad_())), labels.view(-1)).backward()
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)


def test_a_graph_goes_with_its_logits():
    """Logits hold hidden states, not the reverse: no cycle is left to the collector."""
    ours, _, x, labels = heads()
    logits = ours(x)
    F.cross_entropy(flat(logits), labels.view(-1)).backward()
    alive = weakref.ref(logits._source)
    del logits
    assert alive() is None
