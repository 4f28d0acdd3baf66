"""Probabilities near 1: gradients of a classifier that is sure are small, and as right as before it was."""

import pytest
import torch
from compiled import few_bits, gradient_error, gradients
from fewbit.runtime.compile.certain import apart, together
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 512, 32


class Sure(nn.Module):
    """A layer whose logits are right by a margin; its loss is about `classes · exp(−margin)`."""

    def __init__(self, loss, classes, margin):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, classes)
        self.loss, self.margin = loss, margin

    def forward(self, x, y):
        return self.loss(self.layer(x) + self.margin * F.one_hot(y, self.layer.out_features), y)


def of_probabilities(z, y):
    return -(z.softmax(-1) + 1e-6).log().gather(1, y[:, None]).mean()


def over_channels(z, y):
    return F.cross_entropy(z.view(16, 32, -1).mT.contiguous(), y.view(16, 32))


LOSSES = {
    "cross-entropy": F.cross_entropy,
    "of 16 bits": lambda z, y: F.cross_entropy(z.bfloat16().float(), y),
    "smoothed labels": lambda z, y: F.cross_entropy(z, y, label_smoothing=1e-4),
    "logsumexp": lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]).mean(),
    "logarithm of a softmax": of_probabilities,
    "channels before places": over_channels,
    "squares of probabilities": lambda z, y: (z.softmax(-1) - F.one_hot(y, z.shape[-1])).square().sum(),
    "with a temperature": lambda z, y: F.cross_entropy(z * 5 / 5.5, y),
}


# Groups of a row of ten are of many rows, those of 300 are parts of one; each code between 0 and 1 was wrong by 1/255.
@pytest.mark.parametrize("classes", [10, 300])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_are_as_right_when_the_loss_is_small(loss, classes):
    x, y = torch.randn(ROWS, WIDTH), torch.randint(classes, (ROWS,))
    assert gradient_error(Sure(loss, classes, margin=14.0), x, y, smallest=0) < 0.06


# Of a square: rows of the exponentials of these do not sum to 1, and have many large ones.
@pytest.mark.parametrize(
    "exponent",
    [
        lambda z: z.log_softmax(1).T,
        lambda z: z - z.logsumexp(0)[:, None],
        lambda z: z - z.exp().sum(0).log()[:, None],
        lambda z: z - z.exp().sum(1, keepdim=True).log().T,
        lambda z: z.log_softmax(1).view(2, -1, z.shape[0]).mT,
        lambda z: z - 0.5 * z.logsumexp(1, keepdim=True),
    ],
    ids=["transposed", "logsumexp of columns", "of columns", "logarithm transposed", "views", "half of it"],
)
def test_what_does_not_sum_to_one_is_not_taken_for_it(exponent):
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(WIDTH, 96)

        def forward(self, x, w):
            p = exponent(self.layer(x) + 6 * torch.eye(96)[:, torch.arange(96) // 8 * 8]).exp()
            return (p.reshape(96, 96) * w).sum()

    x, w = torch.randn(96, WIDTH), torch.randn(96, 96)
    assert gradient_error(Square(), x, w, smallest=0) < 0.1


@pytest.mark.parametrize("bits", [4, 8])
def test_places_are_in_the_report(bits):
    reports = []
    model, x, y = Sure(F.cross_entropy, 10, 9.0), torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
    gradients(few_bits(model, reports=reports, bits=bits, smallest=0), x, y)
    (saved,) = (tensor for tensor in reports[0].tensors if tensor.role == "probabilities")
    codes = ROWS * 10 * bits // 8
    assert codes + ROWS <= saved.nbytes <= codes + ROWS + codes // 8 + 200 and len(saved.parts) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 255, 256, 40_000])
@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_what_is_set_apart_comes_back(dimension, size, dtype):
    p = torch.randn(5, size).mul(9).softmax(-1).to(dtype).movedim(-1, dimension)
    p[(slice(None),) * (dimension % 2) + (0,)] = float("nan")
    q, place = apart(p, dimension=dimension)
    torch.testing.assert_close(together(q, place, dimension=dimension), p, equal_nan=True, rtol=1e-6, atol=0)
    assert q.nan_to_num().max() <= 0.5 and q.dtype == p.dtype
    assert place.element_size() == (1 if size < 256 else 2 if size < 2**15 else 4)


def test_a_row_of_two_halves_has_no_place():
    q, place = apart(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), dimension=1)
    assert place.tolist() == [[0], [2]] and q.tolist() == [[0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize(
    "steep", [lambda t: t * 10 / 0.02, lambda t: t / 0.002, lambda t: F.normalize(t, dim=-1) / 4e-3]
)
def test_targets_of_a_sharpened_softmax_are_saved_themselves(steep):
    """Inductor writes a softmax of x / c otherwise; its logits in 6 bits were wrong targets: .5 of the gradient."""

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.teacher, self.student = nn.Linear(WIDTH, 200).requires_grad_(False), nn.Linear(WIDTH, 200)

        def forward(self, x):
            with torch.no_grad():
                targets = steep(self.teacher(x)).softmax(-1)
            return F.cross_entropy(self.student(x), targets)

    assert gradient_error(Distilled(), torch.randn(128, WIDTH), smallest=0) < 0.04
