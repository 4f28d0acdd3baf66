"""The measurement of gradient variance, on a small network and few draws."""

import pytest
import torch
from fewbit.plots.studies.variance import METHODS, VarianceSettings, measure, passes

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def study():
    torch.manual_seed(0)
    settings = VarianceSettings(width=4, steps=10, batch=16, bits=2, curve_bits=(1.5, 2, 4), draws=6)
    counted = []
    found = measure(settings, lambda: counted.append(None))
    assert len(counted) == passes(settings)
    return found


def test_theorem_3_predicts_what_repeated_draws_measure(study):
    """The sum over all weights, of which the noisiest make most; a single one has 6 draws."""
    assert 0.6 < sum(study.predicted) / sum(study.empirical) < 1.6


def test_contexts_before_a_weight_add_nothing_to_it(study):
    for i, row in enumerate(study.terms):
        assert row[:i] == [0.0] * i
        assert row[i] > 0


def test_a_convolution_adds_nothing_to_the_weights_before_it(study):
    at = study.layers.index("2.conv1")
    assert all(study.terms[i][at] == 0 for i in range(at))
    assert any(study.terms[i][at + 1] > 0 for i in range(at))  # a normalization does


def test_the_curves_fall_and_finer_ranges_are_better(study):
    curves = {method: dict(map(tuple, study.curves[method])) for method in METHODS}
    for curve in curves.values():
        values = [curve[b] for b in sorted(curve)]
        assert values == sorted(values, reverse=True)
    assert sorted(curves["mixed precision"]) == [1.5, 2.0, 4.0]
    for bits in (2.0, 4.0):
        assert curves["per-group"][bits] < curves["fixed-point"][bits]


def test_what_is_drawn_is_there(study):
    assert study.shown == "1.conv1"
    assert len(study.sensitivities) == 16
    assert len(study.per_dimension) == len(study.formula) == len(study.layers) == 17
    assert min(study.per_dimension) > 0
