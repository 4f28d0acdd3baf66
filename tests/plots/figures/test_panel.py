import dataclasses

import fewbit
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight, weights
from fewbit.plots import Approximated, plot_approximation
from fewbit.plots.figures.panel import error_text, visible_span

NEEDLE = weights.histogram([-2, -1, 0, 1e-6, 1, 2], [1, 2, 10, 2, 1])
WEIGHTS = {
    "normal": parse_weight("normal:0,1"),
    "laplace": parse_weight("laplace:1,2"),
    "mixture": parse_weight("0.7*normal:-1,0.5+0.3*laplace:1,2"),
    "measured": weights.samples(np.random.default_rng(0).normal(size=1000)),
    "needle": NEEDLE,
}


def row(weight, name="gelu", bits=2):
    activation = parse_activation(name)
    table = fewbit.solve(activation, bits=bits, weight=weight, certify=False)
    return Approximated(name, activation.derivative, weight.domain, [table], activation.kinks, weight.density)


def area(axes):
    """The outline of the weight: x, and heights in shares of the panel's; None where it is not drawn."""
    found = [c for c in axes.collections if c.get_label() == "$w$, the weight"]
    if not found:
        return None
    (weight,) = found
    return weight.get_paths()[0].vertices


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_the_area_behind_the_derivative_is_proportional_to_the_weight(weight):
    figure = plot_approximation([row(weight)])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    x, height = area(axes).T
    top = height.max()
    drawn = (height > 0) & (height < 0.999) & (x > weight.domain[0]) & (x < weight.domain[1])
    ratio = height[drawn] / weight.density(x[drawn])
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
    assert 0.8 < top <= 1


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_the_weight_does_not_move_the_axis_of_the_derivative(weight):
    drawn = row(weight)
    with_weight, without = (
        plot_approximation([r]).axes[0].get_ylim() for r in (drawn, dataclasses.replace(drawn, weight=None))
    )
    assert with_weight == pytest.approx(without, abs=0.1)


def test_a_weight_that_is_the_same_all_over_is_not_drawn():
    figure = plot_approximation([row(parse_weight("uniform:-10,10"))])
    assert area(figure.axes[0]) is None
    assert "$w$, the weight" not in [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_names_the_weight_once():
    figure = plot_approximation([row(WEIGHTS["normal"]), row(WEIGHTS["normal"], "tanh")])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["the difference", "$f'$, the derivative", "$q$, the table", "$w$, the weight"]
    assert figure.get_suptitle() == "weight normal:0,1"


@pytest.mark.parametrize("name", ["gelu", "relu", "relu6", "squared_relu", "sin", "gaussian"])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_what_is_in_view_is_where_the_weight_lies(weight, name):
    low, high = visible_span(row(weight, name))
    assert weight.domain[0] <= low < high <= weight.domain[1]


def test_tails_without_weight_do_not_squeeze_the_rest_and_a_weight_where_nothing_happens_is_drawn():
    low, high = visible_span(row(parse_weight("normal:0,1"), "squared_relu"))
    assert -6 < low < 0 < 2 < high < 6
    low, high = visible_span(row(parse_weight("uniform:5,10"), "relu"))
    assert 5 <= low < high <= 10


def test_three_digits_of_an_error_are_told():
    table = fewbit.load_table("gelu")
    errors = {0.008: "error 0.00800", 5.9: "error 5.90", 1234.0: "error 1.23e+03", 123.4: "error 123", 0.0: "exact"}
    for error, text in errors.items():
        assert error_text(dataclasses.replace(table, error=error, lower_bound=None)) == text
