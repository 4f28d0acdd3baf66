"""The figure of ways to train with less memory."""

import itertools

import pytest
from fewbit.plots.figures.alternatives import Point, beside_checkpointing, plot_alternatives, points_of, unbeaten

EXACT = {"task": "llama", "way": "exact", "kept": 9, "peak": 200, "time": 1.0, "error": 0.0, "wrong": ""}
ROWS = [
    EXACT,
    {**EXACT, "way": "checkpointing", "peak": 100, "time": 1.25},
    {**EXACT, "way": "compile", "peak": 150, "error": 4e-7},
    {**EXACT, "way": "broken", "wrong": "FewbitError: no"},
    *({**EXACT, "way": f"ours {i}", "peak": 90, "time": 1.1, "error": 0.1 + 1e-4 * i} for i in range(8)),
    {**EXACT, "task": "vit", "peak": 300},
]


def test_points_are_relative_to_the_exact_step_and_tiny_errors_none():
    points = {point.name: point for point in points_of(ROWS, "llama")}
    assert points["checkpointing"].size == (0.5, 1.25, 0) and points["checkpointing"].label == "checkpointing"
    assert points["compile"].error == 0 and "broken" not in points
    assert points["ours 0"].label == "ours 0, error 0.1"
    assert points_of(ROWS, "gpt2") == []


def test_a_way_that_is_no_better_in_anything_is_beaten():
    a, worse, twin, faster = (Point("", *size) for size in ((1, 2, 3), (1, 2, 4), (1, 2, 3), (2, 1, 9)))
    assert unbeaten([a, worse, twin, faster]) == [a, twin, faster]
    assert unbeaten([]) == []


def test_the_title_tells_the_time_beside_checkpointing_at_its_peak():
    own = {**EXACT, "way": "plan", "peak": 99, "time": 1.0, "error": 0.04}
    assert beside_checkpointing(points_of([*ROWS, own], "llama")) == pytest.approx(0.8)
    assert beside_checkpointing(points_of(ROWS, "llama")) is None  # the others err more
    assert beside_checkpointing(points_of([{**own, "way": "exact"}, own], "llama")) is None
    assert "few bits take .80 of its time" in plot_alternatives([*ROWS, own], "here").get_suptitle()
    assert "take" not in plot_alternatives(ROWS, "here").get_suptitle()


def test_names_of_equal_times_stay_apart_and_the_bars_have_theirs():
    rows = [*ROWS, *({**ROWS[-2], "way": f"less {i}", "peak": 80 - i, "error": 0.2 + i} for i in range(8))]
    figure = plot_alternatives(rows, "here")
    texts = {text.get_text(): text.xyann[1] for text in figure.axes[0].texts}
    heights = sorted(texts.values())
    assert len(texts) == 12 and {"exact", "checkpointing", "ours 0, error 0.1"} < texts.keys() and heights[-1] <= 1
    assert min(b - a for a, b in itertools.pairwise(heights)) == pytest.approx(0.06)
    assert [axes.get_title() for axes in figure.axes] == ["Llama", "GPT-2", "ViT", "ResNet-18"]
