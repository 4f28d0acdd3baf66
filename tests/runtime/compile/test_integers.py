"""Integers whose range is known are saved in fewer bytes; gradients stay those of torch bit for bit."""

import pytest
import torch
from compiled import few_bits, gradients, kept_tensors
from torch import nn
from torch.nn import functional as F

FLOATS_EXACT = dict.fromkeys(("linear", "attention", "scores", "nonlinear", "probabilities"))


class Found(nn.Module):
    """A loss of the outputs of a layer at places that a function finds in them."""

    def __init__(self, find, width):
        super().__init__()
        self.find, self.layer = find, nn.Linear(16, width)

    def forward(self, x):
        y = self.layer(x)
        return (torch.gather(y, 1, self.find(y)) ** 2).sum()


FUNCTIONS = {
    "max": (lambda x: x.max(1, keepdim=True).indices, 128, torch.int8, 128 * 64),
    "min of more": (lambda x: x.min(1, keepdim=True).indices, 129, torch.int16, 8192),
    "topk": (lambda x: x.topk(70, 1).indices, 300, torch.int16, 8192),
    "sort": (lambda x: x.sort(1).indices, 100, torch.int8, 8192),
    "a slice of sorted places": (lambda x: x.sort(1).indices[:, ::2], 100, torch.int8, 8192),
    "argmax": (lambda x: x.argmax(1, keepdim=True), 70000, torch.int32, 20),
    "buckets": (lambda x: torch.bucketize(x, torch.tensor([-0.1, 0.1])), 100, torch.int8, 512),
    "places among numbers": (lambda x: torch.searchsorted(torch.tensor([0.0, 0.5]), x), 100, torch.int8, 512),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_places_are_narrowed_and_gradients_exact(name):
    find, width, dtype, rows = FUNCTIONS[name]
    model, x = Found(find, width), torch.randn(rows, 16)
    loss, expected = gradients(model, x)
    few = few_bits(model, bits=FLOATS_EXACT, smallest=0)
    few_loss, found = gradients(few, x)
    assert torch.equal(loss, few_loss)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # a compiler sums in another order
    integers = [t.dtype for t in kept_tensors(few(x), [x, *model.parameters()]) if not t.is_floating_point()]
    assert dtype in integers and torch.int64 not in integers


def test_integers_of_unknown_range_stay():
    class Model(Found):
        def forward(self, x, places):
            y = self.layer(x)
            return (torch.gather(y, 1, torch.cumsum(places, 1)) ** 2).sum()

    model, x, places = Model(None, 100), torch.randn(4096, 16), torch.randint(0, 2, (4096, 60))
    few = few_bits(model, bits=FLOATS_EXACT, smallest=0)
    _, expected = gradients(model, x, places)
    _, found = gradients(few, x, places)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    kept = {t.dtype for t in kept_tensors(few(x, places), [x, places, *model.parameters()])}
    assert torch.int64 in kept and not kept & {torch.int8, torch.int16, torch.int32}


def test_sizes_that_vary_tell_nothing():
    class Model(Found):
        def forward(self, x):
            y = self.layer(x)
            return (torch.gather(y, 0, y.topk(3, 0).indices) ** 2).sum()

    model = Model(None, 64)
    few = few_bits(model, dynamic=True, bits=FLOATS_EXACT, smallest=0)
    for rows in (50, 60, 40000):  # places in more than 16 bits
        x = torch.randn(rows, 16)
        _, expected = gradients(model, x)
        _, found = gradients(few, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_embedding_of_chosen_tokens():
    """A router's choice: k experts of a hundred for each token."""
    table = nn.Embedding(100, 64)
    router = nn.Linear(64, 100)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.table = router, table

        def forward(self, x):
            weight, chosen = self.router(x).softmax(-1).topk(4, -1)
            return (F.embedding(chosen, self.table.weight) * weight.unsqueeze(-1)).sum()

    model, x = Model(), torch.randn(512, 64)
    _, expected = gradients(model, x)
    few = few_bits(model, bits=FLOATS_EXACT, smallest=0)
    _, found = gradients(few, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.int8 in {t.dtype for t in kept_tensors(few(x), [x, *model.parameters()])}
