"""The figure of a plan: what is drawn, and that names of exact ways stay apart."""

from fewbit.plots.figures.plan import Memory, Way, plot_plan

MIB = 1 << 20
STEP = Memory(10 * MIB, {"saved": [MIB, 3 * MIB, 2 * MIB]}, [2 * MIB, 6 * MIB, 4 * MIB], 1, 14.0 * MIB)
WAYS = [
    *(Way("plan", 60 * MIB, 0.3), Way("plan", 200 * MIB, 0.0), Way("4 bits", 90 * MIB, 0.2)),
    *(Way("exact", 230 * MIB, 0.0), Way("checkpointing", 105 * MIB, 0.0), Way("torch's budget 0", 104 * MIB, 0.0)),
    Way("torch's budget 0.5", 130 * MIB, 0.0),
]


def test_memory_alone_without_other_ways():
    figure = plot_plan(STEP, [], Way("plan", 12 * MIB, 0.1), "a plan")
    assert len(figure.axes) == 1 and figure.get_suptitle() == "a plan"
    assert max(figure.axes[0].lines[0].get_ydata()) == 16  # exact: 10 and 6 MiB


def test_ways_without_error_are_named_once_where_they_are_near():
    figure = plot_plan(STEP, WAYS, WAYS[0], "a plan")
    names = {text.get_text(): text.get_rotation() for text in figure.axes[1].texts}
    assert names == {
        "4 bits": 0,
        "torch's budget 0, checkpointing": 50,
        "torch's budget 0.5": 50,
        "exact": 50,
    }
