"""Accuracy against bits: a few steps of a small network, and made-up rows."""

import pytest
from fewbit.plots.intervals import interval
from fewbit.plots.studies import accuracy
from fewbit.runtime.layers import CompressedLayer
from torch import nn

pytest.importorskip("sklearn")

SETTINGS = (
    accuracy.EXACT,
    {"scale": "tensor", "bits": 2, "gradients": "", "levels": "uniform"},
    {"scale": "group", "bits": 2, "gradients": "", "levels": "fitted"},
    {"scale": "sample", "bits": 1.5, "gradients": "average", "levels": "uniform"},
    {"scale": "layer", "bits": 1.5, "gradients": "stale", "levels": "fitted"},
)


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "BLOCKS", ((4, 1), (8, 2)))
        cases = [{**setting, "seed": seed} for seed in (0, 1) for setting in SETTINGS]
        return [{**case, **accuracy.measure(case, steps=10)} for case in cases]


@pytest.fixture
def made_up():
    """All cases, with accuracy lost below 2 bits, three times the loss per tensor, and half of it by fitted levels."""
    rows = []
    for case in accuracy.cases():
        lost = 0.02 if case["bits"] < 2 else 0.0
        final = 0.01 * (3 if case["scale"] == "tensor" else 1) / (2 if case["levels"] == "fitted" else 1)
        noise = 1e-4 * case["seed"] * case["bits"]
        rows.append({**case, "final": final, "loss": 0.1 + lost, "accuracy": 0.98 - lost - noise / 32})
    return rows


def test_every_seed_has_each_setting_once():
    cases = accuracy.cases()
    assert len(cases) == 300 and len({tuple(case.items()) for case in cases}) == 300
    assert all(float(case["bits"]).is_integer() for case in cases if case["scale"] in ("tensor", "group"))


def test_settings_of_a_seed_differ(rows):
    assert len({row["final"] for row in rows}) == len(rows)
    assert all(row["loss"] < 5 for row in rows)


def test_a_tensor_has_one_range():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    accuracy.compress(model, SETTINGS[1])
    savers = [layer.saver for layer in model if isinstance(layer, CompressedLayer)]
    assert [saver.quantizer for saver in savers] == [accuracy.PerTensor(2)] * 2


def test_what_diverges_is_a_number(monkeypatch):
    monkeypatch.setattr(accuracy, "BLOCKS", ((4, 1),))
    monkeypatch.setattr(accuracy, "LEARNING_RATE", 1e30)
    found = accuracy.measure({**SETTINGS[1], "seed": 0}, steps=6)
    assert found["loss"] == found["final"] == accuracy.DIVERGED and found["accuracy"] < 0.2


def test_lines_tell_settings_cliffs_and_comparisons(made_up):
    told = list(accuracy.lines(made_up))
    assert sum("seeds: test loss" in line for line in told) == 59
    assert "per layer: no loss of accuracy from 2 bits on" in told
    (group,) = (line for line in told if line.startswith("group after tensor"))
    assert "-1.0986 ± 0.0000, counts" in group
    (fitted,) = (line for line in told if line.startswith("fitted after uniform"))
    assert "-0.6931 ± 0.0000, counts" in fitted


def test_accuracy_is_lost_by_an_interval_or_by_half_a_point(made_up):
    assert accuracy.fewest_bits(made_up, "tensor") == 2
    below = [{**r, "accuracy": r["accuracy"] - (0.004 if r["bits"] == 2 else 0)} for r in made_up]
    assert accuracy.fewest_bits(below, "tensor") == 3
    few = [row for row in made_up if row["bits"] != 4]
    assert accuracy.fewest_bits(few, "tensor") is None


def test_gaps_pair_runs_of_one_seed(rows):
    by_seed = {(row["scale"], row["seed"]): row["loss"] for row in rows}
    expected = interval([by_seed["tensor", seed] - by_seed["exact", seed] for seed in (0, 1)])
    assert accuracy.gaps(rows, SETTINGS[1], "loss") == expected


def test_the_figure_names_six_lines_at_most(made_up, rows):
    figure = accuracy.draw(made_up)
    assert "per tensor 2, group 2, sample 2, layer 2" in figure.get_suptitle()
    assert [len(axes.texts) for axes in figure.axes] == [4, 4, 4]
    accuracy.draw(rows).canvas.draw()
