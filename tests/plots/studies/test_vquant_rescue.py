"""V-Quant where few bits fail: an epoch of a shallow network, and made-up rows."""

import pytest
from fewbit.plots.demo.digits import Schedule
from fewbit.plots.studies import vquant_rescue
from fewbit.plots.studies.vquant_rescue import EXACT, PAIRS, PAPER
from torch import nn

pytestmark = pytest.mark.deep  # runs a study

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vquant_rescue, "DEPTHS", (1, 1))
        patch.setattr(vquant_rescue, "WIDTH", 4)
        ways = [("exact", EXACT), ("V-Quant", "(2,0)"), ("RV-Quant", "(2,0)"), ("RV-Quant", "(F)-(3,2)-(2,0)")]
        cases = [{"method": method, "phases": phases, "seed": seed} for seed in (0, 1) for method, phases in ways]
        return [{**case, **vquant_rescue.measure(case, Schedule(3, 128, 0.05))} for case in cases]


@pytest.fixture
def made_up():
    """All cases: 30 % at 2 bits without large values, half of it if only early, a trifle per seed."""
    rows = []
    for case in vquant_rescue.cases():
        lost = 0.3 if case["phases"] == "(2,0)" else 0.15 if case["phases"].startswith("(2,0)-") else 0.0
        accuracy = 0.98 - lost * (1 + 0.01 * case["seed"])
        rows.append({**case, "accuracy": accuracy, "loss": 0.01 + lost, "losses": [2.0, 0.01 + lost]})
    return rows


def test_every_seed_has_each_cell_of_the_tables_once_of_a_network_of_fifty_layers():
    cases = vquant_rescue.cases()
    assert len(cases) == 135 and len({tuple(case.items()) for case in cases}) == 135
    assert all({falls, rises} <= {phases for _, phases in PAPER} for falls, rises in PAIRS)
    for falls, rises in PAIRS:
        assert vquant_rescue.phases_of(falls) == vquant_rescue.phases_of(rises)[::-1]
    assert vquant_rescue.phases_of("(F)-(3,2)-(2,0)") == ((None, 0.0), (3, 2.0), (2, 0.0))
    layers = [m for m in vquant_rescue.network().modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    shortcuts = 4
    assert len(layers) - shortcuts == 50


def test_a_schedule_begins_in_its_first_phase(rows):
    losses = {(row["phases"], row["method"], row["seed"]): row["losses"] for row in rows}
    exact, annealed = losses[EXACT, "exact", 0], losses["(F)-(3,2)-(2,0)", "RV-Quant", 0]
    assert annealed[0] == exact[0] and annealed[1] != exact[1]
    assert len({row["losses"][0] for row in rows if row["seed"] == 0}) == 3


def test_lines_tell_what_fails_and_which_direction(made_up):
    told = list(vquant_rescue.lines(made_up))
    assert len(told) == 26 + len(PAIRS)
    assert [line[:8].strip() for line in told if line.endswith("fails") and "(2,0) " in line] == ["V-Quant", "RV-Quant"]
    assert not any(line.endswith("fails") for line in told if "(2,1) " in line)
    (annealed,) = (line for line in told if line.startswith("(F)-(3,2)-(2,0) less"))
    assert annealed.endswith("counts") and "accuracy +0.15" in annealed


def test_what_diverges_is_a_number(monkeypatch):
    monkeypatch.setattr(vquant_rescue, "DEPTHS", (1,))
    case = {"method": "exact", "phases": EXACT, "seed": 0}
    found = vquant_rescue.measure(case, Schedule(1, 512, 1e30))
    assert found["loss"] == vquant_rescue.DIVERGED


def test_the_figure_says_what_rescues(made_up, rows):
    figure = vquant_rescue.draw(made_up)
    assert "67.4 % with 0 % large values, 98.0 % with 1 %" in figure.get_suptitle()
    ratios, pairs = figure.axes
    assert len(ratios.texts) == 4 and len(pairs.get_yticklabels()) == 5
    vquant_rescue.draw(rows).canvas.draw()
