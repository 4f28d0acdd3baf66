"""The figure of ways to train with less memory."""

import itertools

import pytest
from fewbit.plots.figures.alternatives import plot_alternatives, points_of

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
    assert points["checkpointing"].peak == 0.5 and points["checkpointing"].label == "checkpointing ×1.25"
    assert points["compile"].error == 0 and "broken" not in points
    assert points_of(ROWS, "gpt2") == []


def test_names_of_equal_errors_stay_apart():
    figure = plot_alternatives(ROWS, "here")
    llama = figure.axes[0]
    heights = sorted(text.xyann[1] for text in llama.texts if text.get_text().startswith("ours"))
    assert len(heights) == 8 and heights[-1] <= 1
    assert min(b - a for a, b in itertools.pairwise(heights)) == pytest.approx(0.05)
    assert [axes.get_title() for axes in figure.axes] == ["Llama", "GPT-2", "ViT", "ResNet-18"]
