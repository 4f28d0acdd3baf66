"""Losses in chunks in compiled graphs: torch's loss and gradients, without logits; logits that are read later."""

import copy

import fewbit
import pytest
import torch
from fewbit.runtime.compile.chunked_loss import in_chunks
from fewbit.runtime.layers.deferred_logits import DeferredLogits
from torch import nn
from torch.nn import functional as F

VOCABULARY, FEATURES = 40, 8


class Model(nn.Module):
    """A layer and a head, whose loss is a function of logits and labels."""

    def __init__(self, loss, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=bias)
        self.loss = loss
        self.double()

    def forward(self, x, labels):
        return self.loss(self.head(self.body(x).tanh()), labels)


def rows(x, labels, **more):
    return F.cross_entropy(x.reshape(-1, VOCABULARY), labels.reshape(-1), **more)


def shifted(x, labels):
    return rows(x[..., :-1, :].contiguous(), labels[..., 1:])


def capped(x, labels):
    return rows(30 * torch.tanh(x / 30), labels)


def smoothed(x, labels):
    return rows(0.5 * x, labels, reduction="sum", label_smoothing=0.1)


def by_keyword(x, labels):
    return F.cross_entropy(target=labels.flatten(), input=x.flatten(0, 1))


def with_accuracy(x, labels):
    return rows(x, labels) + 0 * (x.argmax(-1) == labels).sum()


def of_classes(x, labels):
    return rows(x, labels, weight=torch.linspace(0.5, 2, VOCABULARY, dtype=x.dtype))


def squared(x, labels):
    return (x - labels[..., None]).square().mean()


def given(dtype=torch.float64):
    torch.manual_seed(1)
    labels = torch.randint(VOCABULARY, (3, 7))
    labels[0, :4] = -100
    return torch.randn(3, 7, FEATURES, dtype=dtype), labels


def compiled(model):
    """Return a model that is compiled in one graph, without Inductor, and the names of what it calls."""
    called = []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graph, finish = in_chunks(graph)
        called.extend(getattr(node.target, "__name__", node.target) for node in graph.graph.nodes)
        function = aot_eager(graph, inputs)
        return function if finish is None else lambda *args: finish(args, function(*args))

    torch.compiler.reset()
    return torch.compile(model, backend=backend, fullgraph=True), called


def gradients(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def in_and_out_of_chunks(loss, chunk_size=4, **more):
    exact, model = Model(loss, **more), Model(loss, **more)
    fewbit.convert(model, fewbit.ChunkedLoss("head", chunk_size=chunk_size))
    return exact, model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", [rows, shifted, capped, smoothed, by_keyword])
def test_is_torchs_loss(loss, bias):
    exact, model = in_and_out_of_chunks(loss, bias=bias)
    function, called = compiled(model)
    expected, found = exact(*given()), function(*given())
    assert "loss_in_graph" in called and "linear_in_graph" not in called
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, 3 * found), gradients(exact, 3 * expected))


class Adapted(nn.Module):
    """A linear layer, and an adapter beside it, whose sum has another factor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 3, bias=False).double(), nn.Linear(3, VOCABULARY, bias=False).double()

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x)) * 0.5


@pytest.mark.parametrize("loss", [rows, shifted, capped])
@pytest.mark.parametrize("returns", [True, False])
def test_a_head_with_an_adapter(loss, returns):
    """Both are one sum in the chunks, and in the logits that are returned."""
    exact = Model(lambda x, labels: (loss(x, labels), x) if returns else loss(x, labels))
    exact.head = Adapted(exact.head)
    model = copy.deepcopy(exact)
    fewbit.convert(model, fewbit.ChunkedLoss("head", chunk_size=4))
    function, called = compiled(model)
    expected, found = exact(*given()), function(*given())
    assert "loss_in_graph" in called and "linear_in_graph" not in called
    if returns:
        (expected, plain), (found, logits) = expected, found
        assert type(logits) is DeferredLogits
        assert torch.equal(logits.detach() + 0, plain.detach())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, 3 * found), gradients(exact, 3 * expected))


def test_a_head_with_an_adapter_in_batches_of_several_sizes():
    exact = Model(lambda x, labels: (shifted(x, labels), x))
    exact.head = Adapted(exact.head)
    model = copy.deepcopy(exact)
    fewbit.convert(model, fewbit.ChunkedLoss("head", chunk_size=4))
    function, called = compiled(model)
    for tokens in (7, 5, 6):  # from the second on, the graph has no sizes
        x, labels = given()
        (expected, plain), (found, logits) = (each(x[:, :tokens], labels[:, :tokens]) for each in (exact, function))
        assert type(logits) is DeferredLogits and torch.equal(logits.detach() + 0, plain.detach())
        torch.testing.assert_close(gradients(model, found), gradients(exact, expected))
    assert "linear_in_graph" not in called


def before_the_sum(head, other, x):
    logits = head(x)
    rows = logits.view(-1, VOCABULARY)  # the same memory
    logits += other(x)
    return rows


def cast_before_the_sum(head, other, x):
    logits = head(x)
    summed = logits.contiguous()  # logits themselves
    summed += other(x)
    return logits


def after_the_head(head, other, x):
    x = x * 1
    logits = head(x)
    x += 1
    return logits


@pytest.mark.parametrize("logits", [before_the_sum, cast_before_the_sum, after_the_head])
def test_what_is_written_in_place(logits):
    """What the loss reads is not what the head gave, or read, when it was called."""
    exact = nn.ModuleList(nn.Linear(FEATURES, VOCABULARY).double().requires_grad_(False) for _ in range(2))
    model = copy.deepcopy(exact)
    fewbit.convert(model, fewbit.ChunkedLoss(("0", "1"), chunk_size=4))
    function, _ = compiled(lambda x, labels: rows(logits(*model, x), labels))
    x, labels = given()
    x.requires_grad_()
    expected, found = rows(logits(*exact, x), labels), function(x, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float16, torch.float32]])
def test_the_operator_returns_what_its_fake_says(dtypes):
    """Of hidden states by columns, as after a convolution, beside labels that are ignored: Inductor asserts strides."""
    hidden, weight, labels = torch.randn(FEATURES, 20).t(), torch.randn(VOCABULARY, FEATURES), torch.arange(20) - 1
    tensors = [hidden, weight, torch.randn(VOCABULARY)] * len(dtypes)
    options = (1.0, False, 1.0, -1, "mean", 0.0, 0.0, 6)
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    args = labels, tensors, [True] * len(tensors), names, [0.5] * len(dtypes), *options
    torch.library.opcheck(torch.ops.fewbit.chunked_loss.default, args, test_utils="test_faketensor")


@pytest.mark.parametrize("bits", [None, 2])
def test_a_z_loss_in_a_graph(bits):
    """The loss alone, called in compiled code: its gradients are what eager code saves, whatever the bits."""
    hidden, weight = (
        torch.randn(20, FEATURES, requires_grad=True),
        torch.randn(VOCABULARY, FEATURES, requires_grad=True),
    )

    def loss(hidden, weight):
        labels = torch.arange(20) % 7 - 1
        return fewbit.layers.chunked_cross_entropy(hidden, weight, labels, ignore_index=-1, z_loss=0.1, chunk_size=6)

    torch.compiler.reset()
    function = torch.compile(loss, backend="fewbit", fullgraph=True, options={"bits": bits, "smallest": 0})
    found, expected = function(hidden, weight), loss(hidden, weight)
    torch.testing.assert_close(found, expected)
    own, others = (torch.autograd.grad(each, (hidden, weight)) for each in (found, expected))
    torch.testing.assert_close(own, others)


@pytest.mark.parametrize("loss", [with_accuracy, of_classes, squared])
def test_is_computed_as_before_where_it_needs_logits(loss):
    exact, model = in_and_out_of_chunks(loss)
    function, called = compiled(model)
    expected, found = exact(*given()), function(*given())
    assert "loss_in_graph" not in called
    torch.testing.assert_close(gradients(model, found), gradients(exact, expected))


@pytest.mark.parametrize("inside", [True, False])
def test_returned_logits_are_computed_when_they_are_read(inside):
    """Also where the loss is computed outside of the graph; what else uses them gets its gradient."""

    def loss(x, labels):
        return (rows(x, labels), x) if inside else (labels.sum(), x)

    exact, model = in_and_out_of_chunks(loss)
    function, called = compiled(model)
    x, labels = given()
    found, logits = function(x, labels)
    assert ("loss_in_graph" in called) == inside and "linear_in_graph" not in called
    expected, plain = exact(x, labels)
    assert type(logits) is DeferredLogits and logits.shape == plain.shape
    total = (found if inside else rows(logits, labels)) + logits.square().mean()
    of_exact = (expected if inside else rows(plain, labels)) + plain.square().mean()
    torch.testing.assert_close(gradients(model, total), gradients(exact, of_exact))
    torch.testing.assert_close(logits.detach() + 0, plain.detach())


def test_trains_what_is_trained():
    exact, model = in_and_out_of_chunks(rows)
    for each in (exact, model):
        each.head.requires_grad_(False)
    function, _ = compiled(model)
    torch.testing.assert_close(gradients(model, function(*given())), gradients(exact, exact(*given())))
    with torch.no_grad():
        torch.testing.assert_close(function(*given()), exact(*given()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_float32_under_autocast(dtype):
    """The rule of the eager loss: within eight roundings of the dtype of torch's own, of the largest gradient."""
    exact, model = (each.float() for each in in_and_out_of_chunks(shifted))
    function, _ = compiled(model)
    with torch.autocast("cpu", dtype):
        expected, found = exact(*given(torch.float32)), function(*given(torch.float32))
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0)
    for own, other in zip(gradients(model, found), gradients(exact, expected), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=8 * torch.finfo(dtype).eps * other.abs().max().item())


def test_saves_the_gradients_exactly_beside_few_bits():
    """At 2 bits the gradient of the head is exact: that of its logits was formed from logits that were not rounded."""
    exact, model = (each.float() for each in in_and_out_of_chunks(rows))
    torch.compiler.reset()
    function = torch.compile(model, backend="fewbit", options={"bits": 2, "smallest": 0})
    own = gradients(model, function(*given(torch.float32)))
    for found, expected, rounded in zip(own, gradients(exact, exact(*given(torch.float32))), (1, 1, 0, 0), strict=True):
        error = (found - expected).norm() / expected.norm()
        assert error > 0.01 if rounded else error < 1e-5
