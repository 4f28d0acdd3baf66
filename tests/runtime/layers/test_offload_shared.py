"""Swapping is L3 with its codes elsewhere: the same codes, the same bytes, the same gradients, each code moved once."""

import copy

import fewbit
import pytest
import torch
from fewbit import layers, memory
from fewbit.layers import QuantizerSaver
from fewbit.quantizers import PerGroup
from fewbit.runtime.layers.offload import Swapped, Swapper, SwappingSaver
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Query, key and value of one input, as transformers compute them."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Beside(nn.Module):
    """Two convolutions and a ReLU, which torch keeps for itself, on one input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = F.relu(x)
        return self.a(x) + self.b(x)


def text():
    return nn.Sequential(nn.Linear(16, 64), Attention(), Gated(), Attention(), Gated(), nn.Linear(64, 8))


def images():
    return nn.Sequential(nn.Conv2d(3, 4, 3), Beside(), nn.BatchNorm2d(4), Beside(), nn.Flatten(), nn.Linear(4 * 196, 8))


def encoder():
    return nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True))


MODELS = {
    "text": (text, lambda: torch.randn(8, 32, 16)),
    "images": (images, lambda: torch.randn(8, 3, 16, 16)),
    "encoder": (encoder, lambda: torch.randn(8, 32, 16)),
}
models = pytest.mark.parametrize(("make", "data"), MODELS.values(), ids=list(MODELS))


def steps(level, make, data, bits, wrap=lambda model, x: model(x)):
    torch.manual_seed(0)
    model, x = make(), data()
    fewbit.convert(model, bits, level=level)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen = []
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        wrap(model, x).square().mean().backward()
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return seen, memory.profile(model, x).total


@models
@pytest.mark.parametrize(("level", "bits"), [("L4", 2), ("L5", 3.5)])
def test_gradients_and_bytes_are_those_of_l3(make, data, level, bits):
    plain, kept = steps("L3", make, data, bits)
    swapped, kept_swapped = steps(level, make, data, bits)
    assert all(torch.equal(a, b) for a, b in zip(swapped, plain, strict=True))
    assert kept_swapped == kept


@models
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoints_too(make, data, reentrant):
    def wrap(model, x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    plain, swapped = (steps(level, make, data, 2, wrap)[0] for level in ("L3", "L4"))
    assert all(torch.equal(a, b) for a, b in zip(swapped, plain, strict=True))


class Watched(Swapper):
    """Counts what it copies in each direction."""

    def __init__(self):
        super().__init__(smallest=256)
        self.out_of, self.into = [], []

    def out(self, x):
        moved = super().out(x)
        self.out_of.append(moved is not x)
        return moved

    def _fetch(self, progress, host, device):
        self.into.append(progress)
        super()._fetch(progress, host, device)


class Heads(nn.Module):
    def __init__(self, saver, count):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(layers.Linear(64, 16, saver=saver) for _ in range(count))

    def forward(self, x):
        return sum(head(x).square().mean() for head in self.heads)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shared_codes_are_moved_once_and_fetched_once(count):
    swapper = Watched()
    model = Heads(SwappingSaver(QuantizerSaver(PerGroup(4)), swapper), count)
    loss = model(torch.randn(32, 64))
    assert sum(swapper.out_of) == 1
    for again in (True, False):
        swapper.into.clear()
        loss.backward(retain_graph=again)
        assert len(swapper.into) == 1 and swapper.into[0].fetched is None


def test_what_came_before_shared_codes_is_still_fetched_ahead():
    swapper = Watched()
    saver = SwappingSaver(QuantizerSaver(PerGroup(4)), swapper)
    torch.manual_seed(0)
    body = nn.Sequential(*(layers.Linear(64, 64, saver=saver) for _ in range(4)), Heads(saver, 3))
    asked = []
    for layer in body[:4]:
        layer.register_full_backward_pre_hook(lambda *_: asked.append(len(swapper.into)))
    body(torch.randn(32, 64, requires_grad=True)).backward()
    assert asked == [3, 4, 5, 5] and len(set(swapper.into)) == 5


def test_other_codes_are_not_taken_for_the_last():
    swapper = Watched()
    saver = SwappingSaver(QuantizerSaver(PerGroup(8)), swapper)
    x = torch.randn(32, 64)
    first = saver.compress_once(x)
    assert isinstance(first, Swapped) and saver.compress_once(x) is first
    x.mul_(2)
    torch.testing.assert_close(saver.compress_once(x).decompress(), x, rtol=0, atol=0.1)
    assert saver.compress_once(x.clone()) is not saver.compress_once(x)
    assert saver.compress(x) is not saver.compress_once(x)


def test_what_is_in_memory_anyway_is_not_moved():
    swapper = Watched()
    saver = SwappingSaver(QuantizerSaver(PerGroup(4)), swapper)
    x = F.relu(torch.randn(32, 64, requires_grad=True))
    assert saver.compress_once(x).decompress() is x and not swapper.out_of


def test_a_copy_shares_no_codes_with_its_original():
    model = Heads(SwappingSaver(QuantizerSaver(PerGroup(4)), Watched()), 2)
    x = torch.randn(32, 64)
    model(x)
    twin = copy.deepcopy(model)
    assert twin.heads[0].saver.swapper._recent == []
    twin(x).backward()
