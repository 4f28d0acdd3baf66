"""The largest batch and network: small networks in processes of little memory."""

import sys
from dataclasses import replace

import pytest
from fewbit.plots.studies import largest
from fewbit.plots.studies.largest import BATCH, EXACT, FEW, METHODS, NETWORKS, Setting

SMALL = {
    "ResNet-152": Setting(room=24 << 20, stages=(1, 1, 1, 1), width=8, size=32, batch=16),
    "BLPA-164": Setting(room=64 << 20, stages=20, width=8, size=32, batch=16),
}


@pytest.fixture(autouse=True)
def _rough(monkeypatch):
    """Search to a tenth: each trial takes seconds, and what is held here does not hang on how many there are."""
    monkeypatch.setattr(largest, "TOLERANCE", 0.1)
    monkeypatch.setattr(largest, "FRACTIONS", (2,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_the_counted_peak_grows_with_the_batch(method):
    setting = replace(SMALL["ResNet-152"], method=method)
    assert largest.step_seconds(setting) > 0
    assert largest.predicted_bytes(setting) < largest.predicted_bytes(replace(setting, batch=32))


@pytest.mark.deep
def test_methods_need_less():
    need = {m: largest.predicted_bytes(replace(SMALL["ResNet-152"], batch=64, method=m)) for m in METHODS}
    assert need["L3"] < need["L2"] < need["hooks, 4 bits"] < need[EXACT]
    few, exact = (largest.predicted_bytes(replace(SMALL["BLPA-164"], method=m)) for m in (FEW, EXACT))
    assert few < exact


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", [BATCH, *largest.DIMENSIONS])
def test_a_prediction_is_where_the_counted_bytes_pass_the_room(what):
    setting = replace(SMALL["ResNet-152"], batch=128)  # of some ten blocks, and not of sixty
    number = largest.prediction(setting, what)
    above = number + max(1, round(largest.TOLERANCE * number))
    inside, outside = (largest.predicted_bytes(setting.at(what, n)) for n in (number, above))
    assert inside <= setting.room < outside
    assert setting.at(what, setting.number(what)) == setting


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_few_bits_fit_a_larger_batch():
    cases = [{"network": "BLPA-164", "what": BATCH, "method": method} for method in (EXACT, FEW)]
    rows = [{**case, **largest.measure(case, SMALL)} for case in cases]
    exact, few = rows
    assert 0 < exact["largest"] < few["largest"]
    assert all(row["images_per_second"][-1][0] == row["largest"] for row in rows)
    assert f"×{few['largest'] / exact['largest']:.2f} of exact's" in [*largest.lines(rows)][1]


def test_the_figure_names_what_trains_on_the_largest_batch():
    rows = [
        {
            **case,
            "largest": 10 * (i + 1),
            "predicted": 9,
            "trials": 3,
            "images_per_second": [[5, 3.0], [10 * i + 10, 4.0]],
        }
        for i, case in enumerate(largest.cases())
    ]
    figure = largest.draw(rows)
    assert "hooks, 4 bits trains a ResNet-152 on batches 6.0 times as large" in figure.get_suptitle()
    assert len(figure.axes) == 4 and len([*largest.lines(rows)]) == len(rows)
    assert len(largest.draw([]).axes) == 4


def test_every_quantity_has_an_exact_row():
    cases = largest.cases()
    assert len({tuple(case.items()) for case in cases}) == len(cases) == 2 * 6 + 9 + 8
    exact = {(case["network"], case["what"]) for case in cases if case["method"] == EXACT}
    assert exact == {(case["network"], case["what"]) for case in cases}
    assert {case["network"] for case in cases} == NETWORKS.keys()
