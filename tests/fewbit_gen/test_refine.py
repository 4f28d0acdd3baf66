from functools import partial

import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen import solve as solve_within
from fewbit.fewbit_gen.activations import as_activation
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.grid import quadrature
from fewbit.fewbit_gen.moments import Moments
from fewbit.fewbit_gen.refine import refine
from fewbit.tables import Table
from hypothesis import example, given, settings
from hypothesis import strategies as st
from solved import solved

solve = partial(solve_within, effort=None)  # the same numbers on a machine with little time

PAPER = ("relu", "gelu", "silu", "sigmoid", "tanh", "selu", "softplus")
WEIGHTS = ("uniform:-10,10", "normal:0,1")
MOMENTS = {
    (name, weight): Moments.of(parse_activation(name), parse_weight(weight), 512)
    for name in ("gelu", "tanh", "selu", "softplus(threshold=2)")
    for weight in WEIGHTS
}


def with_means(moments, boundaries, codes):
    """The table of these boundaries with the best levels they allow."""
    low, high = moments.edges[[0, -1]]
    w, fw, _ = moments.between(np.concatenate([[low], boundaries, [high]]))
    w, fw = np.bincount(codes, weights=w), np.bincount(codes, weights=fw)
    levels = np.where(w > 0, fw / np.where(w > 0, w, 1), 0) + moments.centre
    return Table("any", "shared", moments.weight.spec, boundaries, codes, levels, 0.0)


@st.composite
def starts(draw):
    """Boundaries anywhere, crowded and in empty tails too; codes as an interval table's or as any shared one's."""
    low, high = -11.9, 11.9
    inside = st.floats(low, high) | st.floats(-0.1, 0.1) | st.sampled_from([0.0, 2.0])
    boundaries = np.array(sorted(draw(st.sets(inside, max_size=8))))
    m = boundaries.size + 1
    codes = np.arange(m)
    if draw(st.booleans()):
        codes = np.unique(draw(st.lists(st.integers(0, 3), min_size=m, max_size=m)), return_inverse=True)[1]
    return boundaries, codes


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "weight"), MOMENTS)
@settings(max_examples=25)
@given(starts())
# An interval of no mass to speak of comes to be alone with a level that is a ratio of two roundings.
@example((np.array([-4, -3, 0, 0.125, 0.25, 0.5, 1, 2]), np.array([0, 1, 2, 2, 0, 0, 0, 1, 0])))
def test_is_never_worse_than_its_start(name, weight, start):
    moments = MOMENTS[name, weight]
    boundaries, codes = start
    low, high = moments.edges[[0, -1]]
    keep = (boundaries > low) & (boundaries < high)
    boundaries, codes = boundaries[keep], np.unique(codes[np.append(True, keep)], return_inverse=True)[1]
    refined = refine(moments, boundaries, codes)
    before = with_means(moments, boundaries, codes)
    after = Table("any", "shared", weight, refined.boundaries, codes, refined.levels, 0.0)
    assert np.all((refined.boundaries > low) & (refined.boundaries < high))
    # Costs are differences of sums to W and F², which are good to some last digits of F².
    rounding = 1e-14 * moments.prefix[2, -1]
    errors = [table_error(t, moments.activation, moments.weight) for t in (before, after)]
    assert errors[1] <= errors[0] * (1 + 1e-12) + rounding  # sums of some thousand panels


def largest_residual(table):
    """How far f' is from the middle of its two levels at the worst boundary that no jump across the middle holds."""
    activation = parse_activation(table.activation)
    y = table.levels[table.codes]
    middle, s = 0.5 * (y[1:] + y[:-1]), table.boundaries
    here, there = activation.derivative(s) - middle, activation.derivative(np.nextafter(s, np.inf)) - middle
    held = np.isin(s, activation.kinks) & (here * there <= 0)
    return np.abs(here[~held]).max(initial=0)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PAPER)
def test_solved_tables_are_stationary(name, bits, kind, weight):
    """f' is halfway between the two levels at every boundary, or jumps across the middle; levels are weighted means."""
    table = solved(name, bits, kind, weight)
    activation, w = parse_activation(name), parse_weight(weight)
    assert largest_residual(table) <= 1e-10

    low, high = w.domain
    edges = np.union1d(np.linspace(low, high, 401), [*table.boundaries, *activation.kinks])
    edges = edges[(edges >= low) & (edges <= high)]
    x, dx = quadrature(edges[:-1], edges[1:], 16)
    mass = w.density(x) * dx
    codes = table.encode(x.mean(axis=1))[:, None] + np.zeros_like(x, int)
    total = np.bincount(codes.ravel(), weights=mass.ravel(), minlength=table.levels.size)
    mean = np.bincount(codes.ravel(), weights=(activation.derivative(x) * mass).ravel(), minlength=total.size) / total
    # A mean taken from differences of sums over all the mass has their rounding, the larger the less mass it has.
    assert np.all(np.abs(mean - table.levels) <= 1e-12 + 1e-14 * mass.sum() / total)


def test_a_newton_step_that_overshoots_is_halved():
    """Here full steps never go down, and moving each boundary alone ends at a residual of 2e-9."""
    assert largest_residual(solve("tanh", levels=16, kind="interval", weight="uniform:-100,100")) <= 1e-10


@pytest.mark.parametrize("name", [name for name in PAPER if name != "relu"])
def test_moves_boundaries_off_the_grid(name):
    """To points that no grid has: only those on a kink stay."""
    activation = parse_activation(name)
    boundaries = solved(name, 3, "interval").boundaries
    on_grid = np.isin(boundaries, Moments.of(activation, parse_weight("uniform:-10,10"), 4096).edges)
    assert np.all(on_grid == np.isin(boundaries, activation.kinks))


def test_finds_the_optimum_of_an_odd_start():
    """From three boundaries on one side of tanh' it comes back with a table whose residual it reports."""
    moments = MOMENTS["tanh", "uniform:-10,10"]
    refined = refine(moments, np.array([5.0, 6.0, 7.0]), np.arange(4))
    y = refined.levels
    residual = moments.activation.derivative(refined.boundaries) - 0.5 * (y[1:] + y[:-1])
    assert abs(np.abs(residual).max() - refined.residual) <= 1e-15


def test_newton_on_many_boundaries():
    """As many as 4,500, where a step by a full matrix takes seconds, are stationary to the rounding of f'."""
    table = solve("sin(20*x)", levels=16, weight="laplace:0.3,0.7", certify=False)
    assert table.boundaries.size > 4000
    activation = as_activation(table.activation)
    y = table.levels[table.codes]
    residual = activation.derivative(table.boundaries) - 0.5 * (y[1:] + y[:-1])
    assert np.abs(residual).max() <= 1e-10


def test_a_sparse_newton_step_is_the_dense_one(monkeypatch):
    dense = solve("sin(3*x)", levels=5, kind="interval", certify=False)
    monkeypatch.setattr("fewbit.fewbit_gen.refine._DENSE", 0)
    sparse = solve("sin(3*x)", levels=5, kind="interval", certify=False)
    np.testing.assert_allclose(sparse.boundaries, dense.boundaries, rtol=0, atol=1e-12)
