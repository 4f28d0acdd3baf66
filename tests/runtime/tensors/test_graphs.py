"""Casts of one tensor are recognized as such, and nothing else is."""

import gc
import weakref

import pytest
import torch
from fewbit.runtime.layers.saver import Recent
from fewbit.runtime.tensors.graphs import cast_key, cast_source
from torch import nn


@pytest.fixture
def h():
    return torch.randn(4, 6, requires_grad=True) * 2


def test_casts_of_one_tensor_have_one_key(h):
    assert cast_key(h.double()) == cast_key(h.double()) is not None
    assert cast_key(h.double().view(2, 12)) == cast_key(h.double().reshape(2, 12)) is not None


@pytest.mark.parametrize(
    "other",
    [
        *(lambda h: (h * 1).double(), lambda h: h.bfloat16(), lambda h: h.double().view(24)),
        *(lambda h: h.double()[:2], lambda h: h.double().t(), lambda h: h.double() * 1),
        *(lambda h: h.detach().double(), lambda h: h.double().add_(1)),
    ],
)
def test_other_tensors_have_another_or_none(h, other):
    assert cast_key(other(h)) != cast_key(h.double())


def test_what_is_no_cast_has_none(h):
    assert cast_key(h) is None
    assert cast_key(h.view(24)) is None
    assert cast_key(h.detach().double()) is None
    assert cast_source(h.double()) == (h.grad_fn, 0)


def test_outputs_of_one_node_differ():
    a, b = (torch.randn(4, 6, requires_grad=True) * 2).unbind(0)[:2]
    assert cast_key(a.double()) == cast_key(a.double()) != cast_key(b.double())


def test_a_changed_leaf_is_another_one():
    leaf = nn.Parameter(torch.randn(4, 6))
    before = cast_key(leaf.double())
    assert before == cast_key(leaf.double())
    with torch.no_grad():
        leaf.add_(1)
    assert cast_key(leaf.double()) != before


def test_a_leaf_in_the_memory_of_one_that_is_gone_is_another_one():
    """Codes of a step that had no backward pass were those of the next one's input."""
    keys = {cast_key(torch.randn(4, 6, requires_grad=True).double()) for _ in range(50)}
    assert len(keys) == 50


def test_a_tensor_changed_in_place_is_another_one(h):
    before = cast_key(h.double())
    h.mul_(2)
    assert cast_key(h.double()) != before


def test_a_view_without_gradients_is_found_by_its_base(h):
    one, two = h.double(), h.double()
    with torch.no_grad():  # as in the forward pass of a function
        assert cast_key(one.view(24)) == cast_key(two.view(24)) is not None
        assert cast_key(one.transpose(0, 1)) != cast_key(two)


def test_keys_keep_no_graph_alive(h):
    recent = Recent()
    recent.note(h.double(), "codes")
    assert recent.found(h.double()) == "codes"

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g

    y = Node.apply(h)
    recent.note(y.double(), "others")
    assert recent.found(y.double()) == "others"
    node = weakref.ref(y.grad_fn)
    del y
    gc.collect()
    assert node() is None
