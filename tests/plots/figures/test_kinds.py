import fewbit
import numpy as np
from fewbit.fewbit_gen import parse_activation
from fewbit.plots import Approximated, plot_kinds
from fewbit.plots.figures.kinds import kind_titles


def row(name, bits=3):
    activation = parse_activation(name)
    tables = [fewbit.load_table(name, bits, kind) for kind in ("interval", "shared")]
    return Approximated(name, activation.derivative, (-10.0, 10.0), tables, activation.kinks)


def test_interval_is_left_and_shared_right_on_the_same_axes():
    figure = plot_kinds([row("gelu"), row("tanh")])
    figure.draw_without_rendering()
    titles = [axes.get_title() for axes in figure.axes]
    assert [title.split(",")[0] for title in titles] == ["interval", "shared"] * 2
    assert titles[0] == "interval, 3 bits: 8 levels, 8 intervals\nerror 0.0119"
    assert titles[1] == "shared, 3 bits: 8 levels, 10 intervals\nerror 0.00809, 32 % less"
    for left, right in (figure.axes[:2], figure.axes[2:]):
        assert left.get_ylim() == right.get_ylim()
        assert left.get_xlim() == right.get_xlim()
        assert left.get_position().x0 < right.get_position().x0


def test_the_dotted_lines_are_the_levels():
    for axes, table in zip(plot_kinds([row("tanh")]).axes, row("tanh").tables, strict=True):
        (dotted,) = [c for c in axes.collections if c.get_label() == "levels"]
        np.testing.assert_array_equal([path.vertices[0, 1] for path in dotted.get_paths()], table.levels)


def test_where_sharing_buys_nothing_the_title_says_so():
    assert kind_titles(*row("softplus").tables)[1].endswith("error 0.0121, no less")
    assert kind_titles(*row("relu").tables)[1] == "shared, 1 bit: 2 levels, 2 intervals\nexact"
