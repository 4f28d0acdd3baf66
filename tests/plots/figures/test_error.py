import dataclasses

import fewbit
import numpy as np
import pytest
from fewbit.plots import plot_error
from fewbit.plots.figures.error import GOAL, LEAST_GAP, LINE_STYLES, exact_note
from fewbit.tables import KINDS

TABLES = [fewbit.load_table(name, bits, kind) for name in ("gelu", "tanh") for kind in KINDS for bits in (1, 2, 3, 4)]
GELU = ("gelu", "shared")
RELU = [fewbit.load_table("relu", kind=kind) for kind in KINDS]


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_every_line_holds_the_errors_at_their_bits_whatever_the_order_of_the_tables():
    drawn = lines(plot_error(TABLES))
    assert set(drawn) == {f"{name} {kind}" for name in ("gelu", "tanh") for kind in KINDS}
    for label, line in drawn.items():
        name, kind = label.split()
        bits, errors = line.get_data()
        np.testing.assert_array_equal(bits, [1, 2, 3, 4])
        np.testing.assert_array_equal(errors, [fewbit.load_table(name, b, kind).error for b in (1, 2, 3, 4)])
    drawn = lines(plot_error(TABLES[::-1]))
    assert all(list(line.get_xdata()) == [1, 2, 3, 4] for line in drawn.values())
    assert plot_error(TABLES).axes[0].get_title() == "weight uniform:-10,10"


def with_gap(table, gap):
    return dataclasses.replace(table, lower_bound=table.error * (1 - gap))


def test_the_band_reaches_from_the_error_down_to_the_lower_bound():
    tables = [with_gap(table, 0.1 * table.bits) for table in TABLES if (table.activation, table.kind) == GELU]
    band, whiskers = plot_error(tables).axes[0].collections
    corners = {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 12)}
    for table in tables:
        assert {(table.bits, round(y, 12)) for y in (table.error, table.lower_bound)} <= corners
    drawn = [segment.tolist() for segment in whiskers.get_segments()]
    np.testing.assert_allclose(drawn, [[(t.bits, t.lower_bound), (t.bits, t.error)] for t in tables])


def test_the_lower_panel_holds_the_relative_gaps():
    gaps = dict(zip((1, 2, 3, 4), (0.5, 1e-3, 1e-7, 0.0), strict=True))
    tables = [with_gap(t, gaps[t.bits]) for t in TABLES if (t.activation, t.kind) == GELU]
    figure = plot_error(tables)
    figure.draw_without_rendering()
    line, mark = figure.axes[1].lines
    np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4])
    np.testing.assert_allclose(line.get_ydata(), [0.5, 1e-3, 1e-7, LEAST_GAP], rtol=1e-6)
    assert set(mark.get_ydata()) == {GOAL} == {1e-6}


@pytest.mark.parametrize("bound", [None, 0.0])
def test_without_a_lower_bound_worth_the_name_errors_are_drawn(bound):
    tables = [dataclasses.replace(table, lower_bound=bound) for table in TABLES]
    figure = plot_error(tables)
    figure.draw_without_rendering()
    assert len(figure.axes) == (1 if bound is None else 2)
    assert figure.axes[0].get_ylim()[0] > 0


def test_no_two_activations_look_alike():
    names = [f"f{i}" for i in range(30)]
    tables = [dataclasses.replace(TABLES[0], activation=name) for name in names]
    drawn = plot_error(tables).axes[0].lines
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 30


def test_a_colour_is_an_activation_and_a_style_is_a_kind():
    drawn = lines(plot_error(TABLES))
    for name in ("gelu", "tanh"):
        assert len({drawn[f"{name} {kind}"].get_color() for kind in KINDS}) == 1
    assert drawn["gelu shared"].get_color() != drawn["tanh shared"].get_color()
    for kind, style in LINE_STYLES.items():
        assert drawn[f"gelu {kind}"].get_linestyle() == style
    assert LINE_STYLES == {"interval": "--", "shared": "-", "stochastic": ":"}


def test_exact_tables_are_named_in_words_and_not_drawn():
    figure = plot_error(TABLES + RELU)
    figure.draw_without_rendering()
    assert figure.get_supxlabel() == exact_note(RELU) == "exact (error 0): relu from 1 bit"
    assert not any(label.startswith("relu") for label in lines(figure))
    assert figure.axes[0].get_yscale() == "log"
    figure = plot_error(RELU)
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.axes[0].texts] == [exact_note(RELU)]
    assert lines(figure) == {}
    assert exact_note(TABLES) == ""
    assert plot_error(TABLES).get_supxlabel() == ""
