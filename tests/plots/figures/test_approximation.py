import dataclasses

import fewbit
import matplotlib
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation
from fewbit.plots import Approximated, plot_approximation
from fewbit.plots.figures.approximation import panel_title
from fewbit.plots.figures.panel import steps, visible_span
from matplotlib.patches import StepPatch


def row(name, *tables):
    activation = parse_activation(name)
    return Approximated(activation.name, activation.derivative, (-10.0, 10.0), tables, activation.kinks)


@pytest.mark.parametrize("name", ["gelu", "selu", "sigmoid", "softplus"])
@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_the_steps_pass_through_exactly_the_boundaries_and_levels(name, kind):
    tables = [fewbit.load_table(name, bits, kind) for bits in (1, 3)]
    drawn_row = row(name, *tables)
    figure = plot_approximation([drawn_row])
    for axes, table in zip(figure.axes, tables, strict=True):
        (drawn,) = (patch for patch in axes.patches if isinstance(patch, StepPatch))
        values, edges, _ = drawn.get_data()
        np.testing.assert_array_equal(edges[1:-1], table.boundaries)
        np.testing.assert_array_equal(values, table.levels[table.codes])
        assert axes.get_xlim() == (edges[0], edges[-1]) == visible_span(drawn_row)


def test_the_line_is_the_derivative_and_is_broken_where_it_jumps():
    activation = parse_activation("selu")
    figure = plot_approximation([row("selu", fewbit.load_table("selu", 2))])
    x, y = figure.axes[0].lines[0].get_data()
    whole = ~np.isnan(y)
    np.testing.assert_array_equal(y[whole], activation.derivative(x[whole]))
    (gap,) = np.flatnonzero(~whole)
    assert x[gap - 1] == 0 < x[gap + 1]
    assert abs(y[gap + 1] - y[gap - 1]) > 0.5


def test_the_titles_hold_the_numbers():
    table = fewbit.load_table("gelu", 3)
    figure = plot_approximation([row("gelu", table)])
    (axes,) = figure.axes
    assert axes.get_title() == panel_title(table) == "3 bits: 8 levels, 10 intervals\nerror 0.00809"
    assert panel_title(fewbit.load_table("gelu", 1)).startswith("1 bit: 2 intervals\n")
    assert panel_title(fewbit.load_table("relu", 1)) == "1 bit: 2 intervals\nexact"


def test_a_row_for_each_activation_and_no_panel_without_a_table():
    rows = [
        row("relu", fewbit.load_table("relu")),
        row("silu", *(fewbit.load_table("silu", bits) for bits in (1, 2))),
    ]
    figure = plot_approximation(rows)
    assert [axes.get_ylabel() for axes in figure.axes] == ["$f'$ of relu", "$f'$ of silu", ""]


def test_a_table_without_boundaries_is_drawn():
    constant = fewbit.Table("gelu", "shared", "uniform:50,60", [], [0], [1.0], 0.0)
    flat = Approximated("gelu", parse_activation("gelu").derivative, (50.0, 60.0), [constant])
    plot_approximation([flat]).draw_without_rendering()
    assert visible_span(flat) == (50, 60)


def test_what_is_seen_of_gelu_and_no_trace_is_left():
    before = dict(matplotlib.rcParams)
    low, high = visible_span(row("gelu", fewbit.load_table("gelu", 1)))
    assert -6 < low < -2.5 and 2.5 < high < 6
    gelu = row("gelu", fewbit.load_table("gelu"))
    (axes,) = plot_approximation([dataclasses.replace(gelu, name="x" * 500)]).axes
    assert axes.get_ylabel() == "$f'$ of " + "x" * 20 + "\n" + "x" * 19 + "…"
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("span", [(-3.0, 3.0), (-0.1, 5.0), (-9.0, -8.0)])
def test_steps_are_those_of_the_table_within_the_span(span):
    table = fewbit.load_table("tanh", 3)
    ((edges, values),) = steps(table, span)
    assert (edges[0], edges[-1]) == span
    np.testing.assert_array_equal(values, table(0.5 * (edges[1:] + edges[:-1])))


def test_a_table_that_rounds_at_random_has_steps_on_either_side_of_the_derivative():
    table = fewbit.load_table("gelu", 3, "stochastic")
    (axes,) = plot_approximation([row("gelu", table)]).axes
    below, above = (patch.get_data().values for patch in axes.patches if isinstance(patch, StepPatch))
    assert (below < above).all() and set(above) == set(table.levels[1:])
