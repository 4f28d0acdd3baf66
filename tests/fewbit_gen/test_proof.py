"""What is proven, and what cannot be; the proofs themselves are tested with their checker."""

from dataclasses import replace

import fewbit
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.proof import TOLERANCE, prove
from fewbit.tables import FewbitError


@pytest.mark.parametrize("kind", ["interval", "shared", "stochastic"])
def test_the_bound_is_near_the_error_and_below_the_certificate_at_most_by_that(kind):
    table = fewbit.load_table("silu", 2, kind)
    bound = prove(table)["bound"]
    assert table.error * (1 - TOLERANCE) <= bound <= table.error
    assert bound == pytest.approx(table.lower_bound, rel=TOLERANCE)


def test_an_exact_table_needs_no_layers():
    assert prove(fewbit.load_table("relu", 1))["layers"] == []


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_a_table_that_is_not_the_best_has_no_proof(kind):
    table = fewbit.load_table("gelu", 1, kind)
    worse = replace(table, boundaries=table.boundaries + 0.1, lower_bound=None)
    error = table_error(worse, parse_activation("gelu"), parse_weight(table.weight))
    with pytest.raises(FewbitError, match="no proof of Table"):
        prove(replace(worse, error=error))


@pytest.mark.parametrize(
    ("activation", "arguments"),
    [("softplus(beta=2)", {}), ("x*sigmoid(x)", {}), ("gelu", {"weight": "laplace:0,1"}), ("gelu", {"levels": 17})],
)
def test_what_the_checker_does_not_know_is_refused(activation, arguments):
    table = fewbit.solve(activation, certify=False, **({"levels": 2} | arguments))
    with pytest.raises(FewbitError, match="no proof is written for "):
        prove(table)
