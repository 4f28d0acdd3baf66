"""The figure of a plan: what is drawn, and that names lie neither on one another nor on curves."""

from dataclasses import replace
from itertools import pairwise

from fewbit.plots.figures.plan import Memory, Way, plot_plan
from matplotlib.text import Text

MIB = 1 << 20
STEP = Memory(10 * MIB, {"saved": [MIB, 3 * MIB, 2 * MIB]}, [2 * MIB, 6 * MIB, 4 * MIB], 1, 14.0 * MIB, 16 * MIB)
WAYS = [
    *(Way("plan", 60 * MIB, 0.3), Way("plan", 200 * MIB, 0.0), Way("4 bits", 90 * MIB, 0.2)),
    *(Way("exact", 230 * MIB, 0.0), Way("checkpointing", 105 * MIB, 0.0), Way("torch's budget 0", 104 * MIB, 0.0)),
    Way("torch's budget 0.5", 130 * MIB, 0.0),
]


def test_memory_alone_without_other_ways():
    figure = plot_plan(STEP, [], Way("plan", 12 * MIB, 0.1), "a plan")
    assert len(figure.axes) == 1 and figure.get_suptitle() == "a plan"
    assert max(figure.axes[0].lines[0].get_ydata()) == 16  # exact: 10 and 6 MiB


def test_the_exact_peak_is_drawn_where_the_planned_step_is_another():
    def lines(step):
        return {line.get_label(): max(line.get_ydata()) for line in plot_plan(step, [], WAYS[0], "").axes[0].lines}

    assert lines(STEP)["exact"] == 16 and "peak of the exact step" not in lines(STEP)
    in_chunks = lines(replace(STEP, exact_peak=20 * MIB))
    assert (in_chunks["this step, saved exactly"], in_chunks["peak of the exact step"]) == (16, 20)


def test_the_curve_of_plans_has_the_least_error_within_each_memory():
    plans = [Way("plan", memory * MIB, error) for memory, error in ((90, 0.1), (60, 0.3), (120, 0.2), (150, 0.05))]
    curve = plot_plan(STEP, plans, WAYS[0], "").axes[1].lines[0]
    assert [*curve.get_xdata()] == [60, 90, 120, 150]
    assert [*curve.get_ydata()] == [0.3, 0.1, 0.1, 0.05]


def test_names_are_beside_the_axes_and_apart():
    figure = plot_plan(STEP, WAYS, WAYS[0], "a plan")
    figure.draw_without_rendering()
    axes = figure.axes[1]
    boxes = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
    assert {*boxes} == {way.name for way in WAYS if way.name != "plan"}
    assert all(box.x0 > axes.bbox.x1 and box.x1 <= figure.bbox.x1 for box in boxes.values())
    rising = sorted(boxes, key=lambda name: boxes[name].y0)
    assert rising == ["exact", "torch's budget 0.5", "checkpointing", "torch's budget 0", "4 bits"]
    assert all(boxes[a].y1 <= boxes[b].y0 for a, b in pairwise(rising))
