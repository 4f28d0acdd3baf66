import exact
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.certify import table_error
from fewbit.tables import Table
from solved import solved


def certified(table):
    return table_error(table, parse_activation(table.activation), parse_weight(table.weight))


@pytest.mark.parametrize("weight", exact.WEIGHTS)
@pytest.mark.parametrize(
    ("activation", "kind", "bits"),
    [
        ("gelu", "shared", 3),
        ("silu", "interval", 1),
        ("tanh", "shared", 2),
        ("selu", "shared", 2),
        ("sigmoid", "interval", 2),
    ],
)
def test_error_of_solved_tables_is_the_integral(activation, kind, bits, weight):
    table = solved(activation, bits, kind, weight)
    assert abs(table.error - exact.table_error(table)) <= 1e-13 * table.error
    assert certified(table) == table.error


@pytest.mark.parametrize("weight", exact.WEIGHTS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "softplus(threshold=2)", "softplus"])
def test_error_of_any_table_is_the_integral(activation, weight):
    """Of a table that nobody would solve for: boundaries outside the domain, on a kink, a rounding apart."""
    boundaries = [-50.0, -1.0, np.nextafter(-1.0, 0), 0.0, 2.0, 3.7, 9.999, 50.0]
    table = Table(activation, "shared", weight, boundaries, [0, 1, 2, 0, 3, 1, 2, 3, 0], [-0.1, 0.5, 0.9, 1.1], 0.0)
    expected = exact.table_error(table)
    assert abs(certified(table) - expected) <= 1e-13 * expected


def test_an_exact_table_has_no_error():
    relu = Table("relu", "shared", "uniform:-10,10", [0.0], [0, 1], [0.0, 1.0], 0.0)
    assert certified(relu) == 0.0


@pytest.mark.parametrize("activation", ["gelu", "sigmoid", "tanh", "selu"])
def test_a_wide_domain_hides_nothing(activation):
    """A panel wider than where f' varies would step over all of it and certify an error of 0."""
    limits = parse_activation(activation).derivative(np.array([-1e6, 1e6]))
    narrow, wide = (
        certified(Table(activation, "shared", weight, [0.0], [0, 1], limits, 0.0))
        for weight in ("uniform:-40,40", "uniform:-1e6,1e6")
    )
    assert narrow > 0.1
    assert wide == pytest.approx(narrow, rel=1e-12)
