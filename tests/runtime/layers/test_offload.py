"""Swapping, with the CPU for both sides: what is moved, fetched ahead, forgotten."""

import gc

import pytest
import torch
from fewbit import layers
from fewbit.layers import QuantizerSaver
from fewbit.quantizers import PerGroup
from fewbit.runtime.layers.offload import Moved, Swapper, SwappingSaver
from torch import nn


class Watched(Swapper):
    """Notes what it copies, in order."""

    def __init__(self, **options):
        super().__init__(**options)
        self.copies = []

    def _copied(self, x, device):
        self.copies.append(x.numel())
        return super()._copied(x, device)


def model(swapper, depth=4, width=256):
    saver = SwappingSaver(QuantizerSaver(PerGroup(bits=8)), swapper)
    torch.manual_seed(0)
    return nn.Sequential(*(layers.Linear(width, width, saver=saver) for _ in range(depth)))


def gradients(one, x):
    one.zero_grad()
    torch.manual_seed(1)
    one(x).square().sum().backward()
    return [p.grad.clone() for p in one.parameters()]


def test_what_is_needed_next_is_fetched_ahead():
    swapper = Watched(ahead=2)
    one = model(swapper)
    order, counts = [], []
    for layer in one:
        layer.register_full_backward_pre_hook(lambda *_: counts.append(len(order)))
    y = one(torch.randn(32, 256, requires_grad=True)).sum()
    assert len(swapper.copies) == 4  # the codes; parameters of groups are small
    fetch = swapper._fetch

    def noted(progress, host, device):
        order.append(progress)
        fetch(progress, host, device)

    swapper._fetch = noted
    saved = [reference() for reference in swapper._moved]
    y.backward()
    assert order == saved[::-1]  # each once, the last first
    assert counts == [0, 3, 4, 4]  # the first asks for one, and two more are on their way


def test_small_tensors_stay():
    assert isinstance(Swapper(smallest=100).out(torch.zeros(25)), Moved)
    assert isinstance(Swapper(smallest=101).out(torch.zeros(25)), torch.Tensor)


def test_a_graph_can_be_used_twice():
    one, x = model(Swapper()), torch.randn(32, 256)
    y = one(x).square().sum()
    first = torch.autograd.grad(y, list(one.parameters()), retain_graph=True)
    second = torch.autograd.grad(y, list(one.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_graphs_that_are_dropped_are_forgotten():
    swapper = Swapper()
    one = model(swapper)
    for _ in range(5):
        one(torch.randn(32, 256))
        gc.collect()
    assert len(swapper._moved) <= 4 + 1


def test_two_graphs_may_be_alive_at_once():
    one, xs = model(Swapper()), [torch.randn(32, 256) for _ in range(2)]
    expected = [gradients(one, x) for x in xs]
    losses = []
    for x in xs:
        torch.manual_seed(1)
        losses.append(one(x).square().sum())
    for loss, exact in zip(losses, expected, strict=True):
        one.zero_grad()
        loss.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(one.parameters(), exact, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_what_is_compressed_waits_in_pinned_memory():
    one = model(Swapper()).cuda()
    x = torch.randn(256, 256, device="cuda")
    moved = SwappingSaver(QuantizerSaver(PerGroup(bits=8)), Swapper()).compress(x)
    hosts = [t.host for t in moved.tensors if isinstance(t, Moved)]
    assert hosts and all(host.is_pinned() for host in hosts)
    plain = model(Swapper()).cuda()
    for layer in plain:
        layer.saver = layer.saver.saver
    for a, b in zip(gradients(one, x), gradients(plain, x), strict=True):
        assert torch.equal(a, b)
