"""`fewbit.layers.chunked_cross_entropy`: torch's loss and gradients, without logits.

The rule of a gradient: a sum of n products errs by at most n + 8 units of rounding of the sum of their magnitudes, and
a probability by the error of its logit and log-sum-exp besides, the units of rounding of the magnitudes of their sums.
"""

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.layers import chunked_cross_entropy
from fewbit.runtime.layers.loss_over_chunks import LossOptions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def operands(tokens, features, vocabulary, dtype=torch.float64, ignored=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (tokens, features), (vocabulary, features), (vocabulary,)
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[:ignored] = -100
    return [t.requires_grad_() for t in (hidden, weight, bias)], labels


def plain(hidden, weight, bias, labels, *, z_loss=0.0, softcap=None, scale=1.0, count=None, **options):
    """The loss in torch's own steps, with 16-bit logits made float32, as transformers does."""
    logits = F.linear(hidden, weight, bias)
    logits = (logits.float() if logits.dtype.itemsize == 2 else logits) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, **options)
    if z_loss:
        squares = logits.logsumexp(-1).square()[labels != options.get("ignore_index", -100)]
        loss = loss + z_loss * (squares.sum() if options.get("reduction") == "sum" else squares.mean())
    return loss


def check(given, labels, **options):
    """Hold loss and gradients of ours in their dtype to those of torch in float64, by the rule."""
    chunk_size = options.pop("chunk_size", None)
    hidden, weight, bias = given
    exact = [t.detach().double().requires_grad_() for t in given]
    logits = F.linear(*exact)
    expected = plain(*exact, labels, **options)
    rights = torch.autograd.grad(expected, exact)
    loss = chunked_cross_entropy(hidden, weight, labels, bias, chunk_size=chunk_size, **options)
    results = torch.autograd.grad(loss, given)
    assert loss.dtype == (torch.float32 if hidden.dtype.itemsize == 2 else hidden.dtype)
    unit, (tokens, features), vocabulary = torch.finfo(hidden.dtype).eps, hidden.shape, weight.shape[0]
    magnitudes = exact[0].abs() @ exact[1].abs().T + exact[2].abs()
    of_logits = unit * (features + 8) * float(magnitudes.detach().max()) * max(1.0, options.get("scale", 1.0))
    unit_of_sums = torch.finfo(loss.dtype).eps
    size = float(expected.detach().abs()) + float(logits.detach().abs().max()) * options.get("scale", 1.0)
    count = tokens if options.get("reduction") == "sum" else 1
    torch.testing.assert_close(
        loss.double(), expected, rtol=0, atol=2 * count * (of_logits + (vocabulary + tokens) * unit_of_sums * size)
    )
    share = count / tokens * (1 + 2 * options.get("z_loss", 0.0) * size)
    for got, right, terms in zip(results, rights, (vocabulary, tokens, tokens), strict=True):
        assert got.dtype == hidden.dtype
        largest = share * terms * max(1.0, float(max(t.detach().abs().max() for t in exact[:2])))
        torch.testing.assert_close(
            got.double(), right, rtol=4 * unit, atol=(unit * (terms + 8) + 4 * of_logits) * largest
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"z_loss": 1e-2, "scale": 0.5},
        {"softcap": 3.0, "label_smoothing": 0.3, "z_loss": 1e-2},
    ],
    ids=str,
)
def test_loss_and_gradients_are_torchs(dtype, options):
    """Over chunks that do not divide the tokens, some of which are ignored."""
    tensors, labels = operands(23, 6, 17, dtype, ignored=4)
    check(tensors, labels, chunk_size=5, **options)


def test_float64_is_torchs_to_the_last_digits():
    """The rule is wide in 16 bits; in float64 nothing but the order of sums is left to differ."""
    tensors, labels = operands(40, 8, 31, ignored=7)
    options = {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3, "scale": 0.7}
    expected = plain(*tensors, labels, **options)
    loss = chunked_cross_entropy(tensors[0], tensors[1], labels, tensors[2], chunk_size=9, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for got, right in zip(torch.autograd.grad(loss, tensors), torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-13)


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 9),
    features=st.integers(1, 5),
    vocabulary=st.integers(1, 7),
    chunk_size=st.none() | st.integers(1, 12),
    reduction=st.sampled_from(["mean", "sum"]),
    data=st.data(),
)
def test_any_shape(tokens, features, vocabulary, chunk_size, reduction, data):
    """One token, one feature, one word, chunks of one and of more than there are."""
    tensors, labels = operands(tokens, features, vocabulary, ignored=data.draw(st.integers(0, tokens - 1)))
    check(tensors, labels, chunk_size=chunk_size, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_counts(tokens, reduction):
    """Of no token, and of tokens that are all ignored, the loss is torch's, NaN or 0, and gradients are 0."""
    tensors, labels = operands(tokens, 4, 6, ignored=tokens)
    loss = chunked_cross_entropy(tensors[0], tensors[1], labels, tensors[2], reduction=reduction)
    torch.testing.assert_close(loss, plain(*tensors, labels, reduction=reduction), equal_nan=True)
    assert not any(grad.any() for grad in torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2), ()], ids=str)
def test_frozen_parts_cost_nothing(wanted):
    """What requires no gradient gets none, and nothing of its size waits for the backward pass."""
    tensors, labels = operands(12, 3, 50)
    for i, t in enumerate(tensors):
        t.requires_grad_(i in wanted)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        loss = chunked_cross_entropy(tensors[0], tensors[1], labels, tensors[2])
    assert sizes == [tensors[i].shape for i in wanted]
    assert loss.requires_grad == bool(wanted)
    torch.testing.assert_close(loss.detach(), plain(*tensors, labels).detach())


def test_shapes_of_batches_and_counts():
    """Tokens in any number of dimensions; a count in place of the mean, as the Trainer gives it."""
    tensors, labels = operands(24, 4, 11, ignored=3)
    hidden, weight, bias = tensors
    loss = chunked_cross_entropy(hidden.view(2, 3, 4, 4), weight, labels.view(2, 3, 4), bias, num_items_in_batch=50)
    torch.testing.assert_close(loss, plain(*tensors, labels, reduction="sum") / 50)
    again = chunked_cross_entropy(hidden, weight, labels, bias, num_items_in_batch=torch.tensor(50))
    torch.testing.assert_close(again, loss)
    one = chunked_cross_entropy(hidden[5], weight, labels[5])
    torch.testing.assert_close(one, F.cross_entropy(F.linear(hidden[5], weight), labels[5]))


def test_labels_may_be_ignored_by_another_number():
    tensors, labels = operands(8, 4, 6)
    loss = chunked_cross_entropy(tensors[0], tensors[1], labels, tensors[2], ignore_index=int(labels[0]))
    torch.testing.assert_close(loss, plain(*tensors, labels, ignore_index=int(labels[0])))


@pytest.mark.parametrize("given_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(given_dtype):
    """The head multiplies in autocast's dtype, sums are in float32, and gradients in the parameters' dtypes."""
    (hidden, weight, bias), labels = operands(20, 8, 13, torch.float32)
    hidden = hidden.detach().to(given_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, labels, bias, chunk_size=7)
        expected = F.cross_entropy(F.linear(hidden, weight, bias), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    for got, right in zip(found, torch.autograd.grad(expected, (hidden, weight, bias)), strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, rtol=2**-6, atol=2**-6 * float(right.abs().max()))


def test_a_gradient_scaler_reaches_small_probabilities_of_float16():
    """Of 4,096 tokens a share of 1e-4 is no number of float16, and neither is the scale; their product is."""
    (hidden, weight, _), labels = operands(2048, 4, 64, torch.float16)
    loss = chunked_cross_entropy(hidden, weight, labels)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight), torch.tensor(65536.0))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    rights = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels), exact, torch.tensor(65536.0).double())
    for got, right in zip((grad_hidden, grad_weight), rights, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2**-7, atol=2**-7 * float(right.abs().max()))


def test_no_second_derivative():
    tensors, labels = operands(4, 3, 5)
    loss = chunked_cross_entropy(tensors[0], tensors[1], labels, tensors[2])
    with pytest.raises(RuntimeError, match=r"no second derivative \(create_graph=True\)"):
        torch.autograd.grad(loss, tensors, create_graph=True)


def test_checkpoints_and_hooks_leave_it_exact():
    """The saved gradients are recomputed by a checkpoint, and not rounded by hooks."""
    tensors, labels = operands(64, 32, 50, torch.float32)
    rights = torch.autograd.grad(chunked_cross_entropy(tensors[0], tensors[1], labels), tensors[:2])
    again = checkpoint(chunked_cross_entropy, tensors[0], tensors[1], labels, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again, tensors[:2]), rights))
    with fewbit.compress_saved_tensors(fewbit.quantizers.PerGroup(2)):
        loss = chunked_cross_entropy(tensors[0], tensors[1], labels)
    assert all(map(torch.equal, torch.autograd.grad(loss, tensors[:2]), rights))


def test_on_the_meta_device():
    """Plans and profiles run it without values."""
    hidden = torch.empty(8, 4, device="meta", requires_grad=True)
    loss = chunked_cross_entropy(hidden, torch.empty(9, 4, device="meta"), torch.zeros(8, dtype=int, device="meta"))
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad.shape == hidden.shape


def test_compiled():
    """The graph is whole, and its numbers are eager's."""
    tensors, labels = operands(24, 8, 10, torch.float32, ignored=2)

    def run(hidden, weight, bias, labels):
        return chunked_cross_entropy(hidden, weight, labels, bias, chunk_size=9)

    loss, compiled = run(*tensors, labels), torch.compile(run, backend="aot_eager", fullgraph=True)(*tensors, labels)
    torch.testing.assert_close(compiled, loss)
    for got, right in zip(torch.autograd.grad(compiled, tensors), torch.autograd.grad(loss, tensors), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 7])}, "labels are from 0 to 4, or -100 to be ignored, not 7"),
        ({"labels": torch.tensor([0.0, 1.0])}, r"labels are int64, one for each token, \(2,\), not torch.float32"),
        ({"labels": torch.tensor([0])}, r"labels are int64, one for each token, \(2,\)"),
        ({"weight": torch.zeros(5, 4)}, r"hidden is \(\*, features\) and weight \(vocabulary, features\)"),
        ({"weight": torch.zeros(5, 3).double()}, "hidden, weight and bias have one dtype"),
        ({"hidden": torch.zeros(2, 3, dtype=int)}, "hidden is a tensor of floating-point numbers"),
        ({"bias": torch.zeros(4)}, r"bias is \(5,\)"),
        ({"reduction": "none"}, "reduction is mean or sum"),
        ({"label_smoothing": 2}, "label_smoothing is from 0 to 1"),
        ({"softcap": 0}, "softcap is a positive number or None"),
        ({"chunk_size": 0}, "chunk_size is an integer not below 1"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "labels": torch.tensor([0, 1])}
    with pytest.raises(FewbitError, match=message) as error:
        chunked_cross_entropy(**arguments | change)
    assert "\n" not in str(error.value)


def test_products_in_16_bits_are_added_in_32_where_a_gpu_can(monkeypatch):
    """As they are made: the gradient of the head is no farther from the exact one than where they wait in 16 bits."""

    def addmm(total, a, b, out_dtype, out):
        assert a.dtype == b.dtype == torch.bfloat16 and total.dtype == out_dtype == torch.float32
        return out.copy_(total + a.float() @ b.float())

    (hidden, weight, bias), labels = operands(600, 16, 40, torch.bfloat16)
    exact = plain(hidden.double(), weight.double(), bias.double(), labels)
    (expected,) = torch.autograd.grad(exact, weight)
    found = [torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, bias), weight)[0]]
    monkeypatch.setattr("fewbit.runtime.layers.loss_over_chunks._adds_to_float32", lambda total: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    found.append(torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, bias), weight)[0])
    waiting, added = ((one.double() - expected.double()).norm() for one in found)
    assert added <= 1.01 * waiting and added < 0.02 * expected.double().norm()


def test_a_trained_head_of_many_features_has_longer_chunks():
    hidden = torch.empty(4096, 2048, device="meta")
    sizes = {
        trains: {c.stop - c.start for c in LossOptions().chunks(hidden, 128_256, trains)} for trains in (False, True)
    }
    assert sizes == {False: {256}, True: {512}}
