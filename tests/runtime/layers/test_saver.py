"""One input, one compressed copy: layers that get the same tensor one after another share it."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from fewbit import memory
from fewbit.quantizers import Outlier, PerGroup
from fewbit.runtime import layers
from fewbit.runtime.layers.outlier_saver import OutlierSaver
from fewbit.runtime.layers.saver import QuantizerSaver
from torch import nn


class Heads(nn.Module):
    """Several layers of one input."""

    def __init__(self, *heads):
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x):
        return sum(head(x).mean() for head in self.heads)


def linears(saver, count=3):
    torch.manual_seed(0)
    return Heads(*(layers.Linear(64, 16, saver=saver) for _ in range(count)))


SAVERS = [QuantizerSaver(PerGroup(4)), OutlierSaver(Outlier(3, 0.02))]


@pytest.mark.parametrize("saver", SAVERS, ids=["PerGroup", "Outlier"])
def test_layers_with_one_saver_keep_one_copy_of_their_input(saver):
    x = torch.randn(32, 64, requires_grad=True)
    weights = 16 * 64 * 4
    one, three = (memory.profile(linears(saver, count), x).total for count in (1, 3))
    assert one <= three <= one + 2 * weights + 64  # the scalars of the sum
    assert one < 32 * 64 * 4


def test_convolutions_too():
    saver = QuantizerSaver(PerGroup(4))
    beside = Heads(*(layers.Conv2d(8, 8, k, padding=k // 2, saver=saver) for k in (3, 1)))
    single = Heads(layers.Conv2d(8, 8, 3, padding=1, saver=saver))
    x = torch.randn(4, 8, 16, 16)
    assert memory.profile(beside, x).total < 1.2 * memory.profile(single, x).total


def test_gradients_are_those_of_one_decompressed_input():
    saver = QuantizerSaver(PerGroup(2))
    model, x = linears(saver), torch.randn(32, 64)
    seen = saver.compress_once(x)
    model(x).backward()
    mean = seen.decompress().mean(0) / 16
    for head in model.heads:
        torch.testing.assert_close(head.weight.grad, mean.expand(16, 64))


def test_layers_with_savers_of_their_own_keep_their_own():
    x = torch.randn(32, 64)
    a, b = layers.Linear(64, 16, bits=2), layers.Linear(64, 16, bits=2)
    (a(x).sum() + b(x).sum()).backward()
    assert not torch.equal(a.weight.grad, b.weight.grad)


def test_what_was_changed_in_place_is_compressed_anew():
    saver, x = QuantizerSaver(PerGroup(8)), torch.randn(8, 256)
    first = saver.compress_once(x)
    assert saver.compress_once(x) is first
    x.mul_(2)
    assert saver.compress_once(x) is not first
    torch.testing.assert_close(saver.compress_once(x).decompress(), x, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    "other", [lambda x: x[:4], lambda x: x.t(), lambda x: x.double(), lambda x: x.clone(), torch._neg_view]
)
def test_another_tensor_is_not_mistaken_for_the_last(other):
    saver, x = QuantizerSaver(PerGroup(8)), torch.randn(8, 256)
    first = saver.compress_once(x)
    assert saver.compress_once(other(x)) is not first


def test_a_tensor_at_the_place_of_one_that_is_gone_is_not_mistaken_for_it():
    saver = QuantizerSaver(PerGroup(8))
    for seed in range(20):  # the allocator gives the same memory again
        x = torch.full((8, 256), float(seed))
        assert saver.compress_once(x).decompress().mean() == seed
        del x


def test_the_two_copies_of_a_normalization_stay_independent():
    saver, x = QuantizerSaver(PerGroup(2)), torch.randn(8, 256)
    assert not torch.equal(saver.compress(x).decompress(), saver.compress(x).decompress())


def test_neither_the_input_nor_after_the_backward_pass_the_codes_stay_alive():
    saver = QuantizerSaver(PerGroup(4))
    model, x = linears(saver), torch.randn(32, 64)
    loss, seen = model(x), weakref.ref(x)
    codes = weakref.ref(saver.compress_once(x))
    del x
    gc.collect()
    assert seen() is None and codes() is not None
    loss.backward()
    assert codes() is None


def test_savers_are_copied_and_pickled_without_codes():
    saver = QuantizerSaver(PerGroup(4))
    x = torch.randn(8, 256)
    first = saver.compress_once(x)
    for again in (copy.deepcopy(saver), pickle.loads(pickle.dumps(saver))):
        assert again == saver and again.compress_once(x) is not first


def test_what_is_kept_whole_is_not_held():
    saver = QuantizerSaver(PerGroup(8))
    x = torch.randn(4, 1)
    assert saver.compress_once(x).decompress() is x
    gone = weakref.ref(x)
    del x
    assert gone() is None
