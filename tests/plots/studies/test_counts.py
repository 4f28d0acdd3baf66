"""Tables by count: the cheapest cell of each, and the figure."""

import pytest
from fewbit.plots.studies import counts
from fewbit.plots.studies.counts import ACTNN, FEWBIT, VQUANT


def row(**case):
    return {**case, **counts.measure(case)}


def test_a_level_counts_weights_images_and_what_is_saved():
    exact, two = (row(table=ACTNN, network="AlexNet", batch=4, level=level) for level in ("exact", "L3"))
    weights = 61_100_840 * 4 * 3 / 2**30
    images = 4 * 3 * 224 * 224 * 4 / 2**30
    assert exact["total"] == pytest.approx(weights + images + exact["activations"], abs=2e-4)
    assert exact["activations"] > 4 * two["activations"] > 0
    assert "paper_total" not in exact
    line = list(counts.lines([exact, two]))[1]
    assert line.startswith("AlexNet, batch 4, L3: total 0.69") and "times less" in line


def test_the_papers_cells_stand_beside_full_precision_and_l3(monkeypatch):
    monkeypatch.setattr(counts, "ACTNN_PAPER", {("AlexNet", 1): ((1.5, None), (0.5, 0.25))})
    exact, one, three = (row(table=ACTNN, network="AlexNet", batch=1, level=level) for level in ("exact", "L1", "L3"))
    assert (exact["paper_total"], exact["paper_activations"], three["paper_activations"]) == (1.5, None, 0.25)
    assert "paper_total" not in one
    told = list(counts.lines([exact, three]))
    assert "(1.50), activations" in told[0] and "(0.25) GiB, " in told[1]


def test_a_step_takes_more_than_the_formula(monkeypatch):
    monkeypatch.setattr(counts, "BATCH", 256)
    full, few = (row(table=VQUANT, network="AlexNet", bits=bits, percent=p) for bits, p in ((0, 0.0), (3, 2.0)))
    assert full["paper"] == 0.35 and few["paper"] == 0.24
    assert full["peak"] > few["peak"] >= few["peak_norms"] > few["formula"]
    assert "peak_norms" not in full
    assert "(F, 0): formula 0.36, peak" in next(counts.lines([full]))
    figure = counts.draw([few])
    figure.canvas.draw()
    assert "a step under V-Quant peaks at" in figure.get_suptitle()


def test_the_figure_tells_how_far_actnn_is_off():
    rows = [
        {"table": ACTNN, "network": "ResNet-152", "batch": batch, "level": level, "total": 1.0, "activations": 2.2}
        | ({"paper_total": 1.0, "paper_activations": 2.0} if level == "exact" else {})
        for batch in (32, 64)
        for level in counts.LEVELS
    ]
    figure = counts.draw(rows)
    assert figure.get_suptitle() == "ActNN's activations are within 10 % of the paper's"
    assert [text.get_text() for text in figure.axes[0].texts].count("L3") == 1


def test_the_appendix_has_a_row_for_each_network():
    assert [case["network"] for case in counts.cases() if case["table"] == FEWBIT] == ["vgg16", "densenet201"]
