"""The measurement of gradient variance, on a small network and few draws."""

import pytest
import torch
from fewbit import MixedPrecision
from fewbit.plots.studies.variance import METHODS, VarianceSettings, _Bench, measure, passes

pytestmark = pytest.mark.deep  # runs a study

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def study():
    torch.manual_seed(0)
    settings = VarianceSettings(width=4, steps=10, batch=16, bits=2, curve_bits=(1, 1.5, 2, 4), draws=6, seeds=2)
    counted = []
    found = measure(settings, lambda: counted.append(None))
    assert len(counted) == passes(settings)
    return found


def test_theorem_3_predicts_what_repeated_draws_measure(study):
    """The sum over all weights, of which the noisiest make most; a single one has 6 draws."""
    assert 0.6 < sum(study.predicted) / sum(study.empirical) < 1.6


def test_contexts_before_a_weight_and_convolutions_after_it_add_nothing(study):
    for i, row in enumerate(study.terms):
        assert row[:i] == [0.0] * i
        assert row[i] > 0
    at = study.layers.index("2.conv1")
    assert all(study.terms[i][at] == 0 for i in range(at))
    assert any(study.terms[i][at + 1] > 0 for i in range(at))  # a normalization does
    assert study.shown == "1.conv1"
    assert len(study.sensitivities) == 16
    assert len(study.per_dimension) == len(study.formula) == len(study.layers) == 17
    assert min(study.per_dimension) > 0


def test_the_curves_fall_and_finer_ranges_are_better(study):
    curves = {method: dict(map(tuple, study.curves[method])) for method in METHODS}
    for curve in curves.values():
        values = [curve[b] for b in sorted(curve)]
        assert values == sorted(values, reverse=True)
    assert sorted(curves["mixed precision"]) == [1.0, 1.5, 2.0, 4.0]
    for bits in (2.0, 4.0):
        assert curves["per-group"][bits] < curves["fixed-point"][bits]
    assert {len(own) for own in study.by_seed.values()} == {2}
    pairs = zip(study.by_seed["per-group"], study.by_seed["fixed-point"], strict=True)
    assert all(group < tensor for group, tensor in pairs)


def test_one_bit_a_sample_is_one_bit_a_group(study):
    """A tensor that something else holds would be saved exactly: it errs by nothing, and samples seem to gain."""
    bench = _Bench(VarianceSettings(width=4, batch=16), lambda: None)
    precision = MixedPrecision(bench.model, 1, across_layers=False)
    bench.gradients()
    assert all(saver.batches or saver.host for saver in precision.savers.values())
    curves = {method: dict(map(tuple, study.curves[method])) for method in METHODS}
    assert 0.6 < curves["per-sample"][1.0] / curves["per-group"][1.0] < 1.6  # six draws
