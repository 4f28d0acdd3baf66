"""Bits of the samples of one tensor: the optimum, as `allocate` finds it, and without a wait for the device."""

import pytest
import torch
from fewbit.runtime.allocation import MixedPrecision
from fewbit.runtime.allocation.greedy import allocate_at_least
from fewbit.runtime.allocation.problem import variance
from fewbit.runtime.allocation.savers import Batch, allocate_samples
from fewbit.runtime.allocation.sensitivity import gradient_factor, quantization_variance
from fewbit.runtime.layers import Linear
from fewbit.runtime.tensors.packing import Rows
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

SENSITIVITIES = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e12)), min_size=1, max_size=40)


@given(SENSITIVITIES, st.sampled_from([1, 2]), st.floats(1, 8))
def test_are_those_of_the_search(sensitivities, least, average):
    N = len(sensitivities)
    total = int(average * N)
    found = allocate_samples(torch.tensor(sensitivities, dtype=torch.float64), least, total)
    expected = allocate_at_least(least, sensitivities, 64, 64 * total)
    assert found.dtype == torch.uint8 and found.tolist() == expected.tolist()


@given(SENSITIVITIES, st.integers(1, 2), st.integers(0, 400))
def test_spend_the_budget(sensitivities, least, total):
    bits = allocate_samples(torch.tensor(sensitivities, dtype=torch.float32), least, total)
    assert bits.min() >= (least if len(bits) * least <= total else 1) and bits.max() <= 8
    assert int(bits.sum()) == min(max(total, len(bits)), 8 * len(bits))


def test_equal_gains_go_to_the_fewest_bits_then_to_the_first():
    assert allocate_samples(torch.zeros(4), 1, 6).tolist() == [2, 2, 1, 1]
    assert allocate_samples(torch.ones(3), 1, 7).tolist() == [3, 2, 2]


def test_what_is_not_finite_counts_as_nothing():
    w = torch.tensor([torch.nan, torch.inf, 1.0, 2.0])
    bits = allocate_samples(w, 1, 12)
    assert bits[:2].tolist() == [1, 1] and variance(w[2:], bits[2:]) < variance(w[2:], [5, 5]) * 1.01


def test_no_samples():
    assert allocate_samples(torch.empty(0), 1, 0).shape == (0,)


def test_nothing_waits_for_the_device():
    """A fake tensor has no values: whatever asked for one would raise."""
    layer = Linear(64, 64, bits=2)
    precision = MixedPrecision(torch.nn.Sequential(layer), 2.5, gradients="stale")
    (saver,) = precision.savers.values()
    precision.samples(range(12))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(12, 5, 64)
        V = quantization_variance(x, 64)
        t = gradient_factor(layer, x, x.shape, None)
        for stale in (None, t):
            batch = Batch(saver, V, stale, 320)
            bits = allocate_samples(batch.sensitivity(), 2, 30)
            assert Rows(12, 320, bits).starts().shape == (13,) and bits.shape == (12,)


def test_a_gradient_that_is_not_finite_at_first_is_made_good_by_the_next():
    model = torch.nn.Sequential(Linear(8, 8, bits=2))
    precision = MixedPrecision(model, 3)
    (saver,) = precision.savers.values()
    x = torch.randn(4, 8)
    model(x).sum().mul(torch.inf).backward()
    assert not saver.magnitude.isfinite() and float(saver.mean_magnitude(x)) == 1
    model(x).sum().backward()
    before = float(saver.magnitude)
    assert 0 < before < torch.inf
    model(x).sum().mul(torch.inf).backward()
    assert float(saver.magnitude) == before


@pytest.mark.parametrize("total", [3, 7, 24])
def test_the_least_is_ignored_where_the_budget_does_not_allow_it(total):
    assert allocate_samples(torch.tensor([1.0, 1.0, 1.0]), 4, total).sum() == total
