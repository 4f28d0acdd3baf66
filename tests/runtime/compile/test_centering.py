"""Rows that hardly differ, before gradients without a mean over rows: what differs survives the codes."""

import pytest
import torch
from compiled import exactly, few_bits, gradient_error, gradients
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 256, 64


def batch_norm(h):
    return F.batch_norm(h, None, None, training=True).tanh()


def less_mean(h):
    return h - h.mean(0)


# Of the second layer's output h and the input, what takes a mean over rows away.
LOSSES = {
    "batch normalization": lambda h, x: (batch_norm(h) * x).sum(),
    "batch normalization of sequences": lambda h, x: (batch_norm(h.view(16, 16, -1).mT).mT.flatten(0, 1) * x).sum(),
    "centred logits": lambda h, x: -((less_mean(h) / 0.1).log_softmax(-1) * (2 * x).softmax(-1)).sum(),
    "covariance": lambda h, x: (less_mean(h).mT @ less_mean(h) / ROWS).square().sum() + (h * x).mean(),
    "products of rows": lambda h, x: (less_mean((h @ h.mT) @ h / ROWS) * x).sum(),
    "an activation": lambda h, x: (less_mean((3 + h).relu().log1p()) * x).sum(),
}


class Alike(nn.Module):
    """Two layers of rows that differ by a hundredth of what their columns do, or as they do."""

    def __init__(self, loss, spread=0.01, curve=F.gelu):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.loss, self.spread, self.curve = loss, spread, curve

    def layers(self, x):
        return self.last(self.curve(self.first(x * self.spread)))

    def forward(self, x):
        return self.loss(self.layers(x), x)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_differs_between_rows_that_hardly_differ_is_in_their_gradients(loss):
    assert gradient_error(Alike(loss), torch.randn(ROWS, WIDTH), smallest=0) < 0.07


def saved(loss, x):
    reports = []
    gradients(few_bits(Alike(loss, 1.0).to(x.dtype), reports=reports, smallest=0), x)
    return reports[0].tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_take_as_many_bytes_and_their_means_are_saved_beside_them(dtype):
    x = torch.randn(ROWS, WIDTH, dtype=dtype)
    plain = saved(lambda h, x: (h.tanh() * x).sum(), x)
    level = saved(lambda h, x: (less_mean(h).tanh() * x).sum(), x)
    assert sum(t.nbytes for t in level if t.bits) == sum(t.nbytes for t in plain if t.bits)
    assert sum(t.nbytes for t in level if not t.bits) <= 3 * 2 * WIDTH * x.element_size()


# Of a layer's output, what a mean over rows would spoil where it is not that of alike rows.
UNLIKE = {
    "a row of a sentinel": F.gelu,
    "a gate that a sentinel shuts": torch.sigmoid,
    "rows of all sizes": lambda a: F.rms_norm(a, (2 * WIDTH,)),
}


@pytest.mark.parametrize("curve", UNLIKE.values(), ids=UNLIKE)
def test_a_mean_that_rows_do_not_share_spoils_nothing(curve):
    model = Alike(lambda h, x: (less_mean(h) * x.clamp(-3, 3)).sum(), 1.0, curve)
    with torch.no_grad():
        model.first.weight[:, -1] = 1
    x = torch.randn(ROWS, WIDTH)
    x[::64, -1] = -1e9
    assert gradient_error(model, x, smallest=0) < 0.06


def test_rows_that_are_few_keep_no_means():
    """Of 8 rows they would take 4 bits an element."""
    tensors = saved(LOSSES["centred logits"], torch.randn(8, WIDTH))
    assert not [t for t in tensors if t.role == "statistic" and t.shape == (1, 2 * WIDTH)]


def test_rows_may_be_of_any_number():
    model = Alike(LOSSES["an activation"])
    few = few_bits(model, dynamic=True, smallest=0)
    for rows in (ROWS, 96):
        x = torch.randn(rows, WIDTH)
        true, near = gradients(exactly(model), x)[1], gradients(few, x)[1]
        assert (near - true).norm() < 0.07 * true.norm()


def test_what_a_model_returns_is_read_itself():
    """It is kept whole anyway, and its comparisons are of itself."""

    class Returning(Alike):
        def forward(self, x):
            h = self.layers(x * self.spread)
            return (less_mean(h.relu().log1p()) * x).sum() + 0 * h.detach().sum(), h

    found = []
    for compiled in (exactly, few_bits):
        model = Returning(None)
        loss, h = compiled(model)(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
        (loss + h.square().sum()).backward()
        found.append((h, torch.cat([p.grad.flatten() for p in model.parameters()])))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).norm() < 0.05 * found[0][1].norm()
