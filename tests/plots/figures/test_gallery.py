import fewbit
import pytest
from fewbit.fewbit_gen import parse_activation
from fewbit.plots import Approximated, plot_gallery

NAMES = ("relu", "gelu", "silu", "tanh", "selu")


def rows(*names, bits=3):
    activations = map(parse_activation, names)
    return [
        Approximated(a.name, a.derivative, (-10.0, 10.0), [fewbit.load_table(a.name, bits)], a.kinks)
        for a in activations
    ]


def test_a_panel_for_each_activation_in_their_order_under_its_name():
    figure = plot_gallery(rows(*NAMES), columns=2)
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == list(NAMES)
    assert figure.axes[0].get_title() == "relu\nexact, 2 intervals"
    assert figure.axes[1].get_title() == "gelu\nerror 0.00809, 10 intervals"
    assert figure.get_suptitle() == "3 bits, kind shared, weight uniform:-10,10"
    assert plot_gallery(rows("relu", "gelu")).get_suptitle().startswith("3 bits")
    assert plot_gallery(rows("relu")).get_suptitle().startswith("1 bit,")
    (row,) = rows("gelu")
    long = Approximated("x" * 500, row.derivative, row.domain, row.tables)
    (axes,) = plot_gallery([long]).axes
    assert axes.get_title().split("\n")[0] == "x" * 29 + "…"


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 20])
def test_any_number_of_columns_whose_titles_do_not_overlap(columns):
    figure = plot_gallery(rows(*NAMES), columns)
    figure.draw_without_rendering()
    lefts = {round(axes.get_position().x0, 6) for axes in figure.axes}
    assert len(lefts) == min(columns, len(NAMES))
    boxes = [axes.title.get_window_extent() for axes in figure.axes]
    assert columns > 4 or not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
