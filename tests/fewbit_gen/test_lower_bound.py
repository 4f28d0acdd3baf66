"""The certificate: never above what any table reaches, and within a millionth of what the best one does."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen import solve as solve_within
from fewbit.fewbit_gen.activations import as_activation
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.crossings import nearest_level_table
from fewbit.fewbit_gen.lower_bound import TOLERANCE, certificate
from fewbit.fewbit_gen.moments import Moments
from fewbit.fewbit_gen.weights import histogram
from fewbit.tables import Table
from solved import solved

solve = partial(solve_within, effort=None)  # the same numbers on a machine with little time

SMOOTH = ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "selu", "softplus"]


def problem(activation, weight, cells=1024):
    return Moments.of(parse_activation(activation), parse_weight(weight), cells)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("activation", SMOOTH)
def test_solved_tables_are_the_best_to_a_millionth(activation, kind, bits):
    table = solved(activation, bits, kind)
    assert table.lower_bound <= table.error
    assert table.error - table.lower_bound <= TOLERANCE * table.error


@pytest.mark.parametrize("weight", ["normal:0,1", "uniform:-1,3", "normal:2,0.5"])
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("activation", ["gelu", "tanh", "selu"])
def test_other_weights_are_certified_too(activation, kind, weight):
    table = solved(activation, None, kind, weight, levels=5)
    assert 0 <= table.error - table.lower_bound <= TOLERANCE * table.error


@pytest.mark.parametrize("activation", ["gelu", "selu", "softplus(beta=5,threshold=2)", "hardswish"])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_no_interval_table_beats_the_bound(activation, K):
    act, weight = parse_activation(activation), parse_weight("uniform:-4,4")
    bound = solved(activation, None, "interval", weight.spec, levels=K).lower_bound
    random = np.random.default_rng(0)
    moments = problem(activation, weight.spec)
    for _ in range(25):
        boundaries = np.sort(random.uniform(-4, 4, K - 1))
        w, fw, _ = moments.between(np.concatenate([[-4.0], boundaries, [4.0]]))
        levels = fw / w + moments.centre
        table = Table(activation, "interval", weight.spec, boundaries, np.arange(K), levels, 0.0)
        assert table_error(table, act, weight) >= bound


@pytest.mark.sample(3)
@pytest.mark.parametrize("activation", ["gelu", "sigmoid", "selu"])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_no_set_of_levels_beats_the_bound(activation, K):
    act, weight = parse_activation(activation), parse_weight("uniform:-4,4")
    bound = solved(activation, None, "shared", weight.spec, levels=K).lower_bound
    random = np.random.default_rng(0)
    moments = problem(activation, weight.spec)
    low, high = np.quantile(moments.centred(moments.edges), [0, 1])
    for _ in range(12):
        levels = np.sort(random.uniform(low, high, K))
        boundaries, codes = nearest_level_table(moments, levels)
        codes = np.unique(codes, return_inverse=True)[1]
        used = np.unique(nearest_level_table(moments, levels)[1])
        table = Table(activation, "shared", weight.spec, boundaries, codes, levels[used] + moments.centre, 0.0)
        assert table_error(table, act, weight) >= bound


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("K", [2, 4, 7, 16])
@pytest.mark.parametrize("activation", ["gelu", "tanh", "hardswish"])
def test_a_table_that_is_not_the_best_is_told_a_better_one(activation, K, kind):
    moments = problem(activation, "uniform:-10,10", 4096)
    best = solved(activation, None, kind, levels=K)
    for worse in (1.0001, 1.1, 3.0):
        found = certificate(moments, replace(best, error=worse * best.error, lower_bound=None), K)
        assert found.bound <= best.error * (1 + 1e-12)
        assert found.better is not None
        assert found.better.size <= K - 1
        assert (np.diff(found.better) > 0).all()


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_more_levels_have_a_lower_bound(kind):
    """The bound is that of the levels asked for, not of those that the table has."""
    moments = problem("gelu", "uniform:-10,10", 4096)
    four, five = (solved("gelu", None, kind, levels=K) for K in (4, 5))
    assert certificate(moments, four, 5).bound <= five.error * (1 + 1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("K", [2, 3, 6])
@pytest.mark.parametrize("seed", range(8))
def test_bent_and_broken_derivatives_under_uneven_weights(seed, K, kind):
    """f' in pieces with jumps between, flat ones among them; a weight with holes: certified, and never beaten."""
    random = np.random.default_rng(seed)
    knots = np.sort(random.uniform(-3, 3, 6))
    ends = random.normal(size=(7, 2))
    ends[random.integers(7)] = 0.5  # flat

    def derivative(x):
        piece = np.searchsorted(knots, x, side="left")
        fence = np.concatenate([[-4.0], knots, [4.0]])
        share = (x - fence[piece]) / (fence[piece + 1] - fence[piece])
        return ends[piece, 0] + np.clip(share, 0, 1) * (ends[piece, 1] - ends[piece, 0])

    counts = random.uniform(size=8) * (random.uniform(size=8) < 0.7)
    counts[3] = 1.0
    weight = histogram(np.linspace(-4, 4, 9), counts)
    table = solve(lambda x: x, levels=K, kind=kind, weight=weight, kinks=knots, derivative=derivative)
    assert 0 <= table.error - table.lower_bound <= TOLERANCE * table.error + 1e-15
    act = as_activation(lambda x: x, knots, derivative)
    moments = Moments.of(act, weight, 1024)
    low, high = weight.domain
    for _ in range(12):
        if kind == "shared":
            drawn = np.unique(moments.centred(random.uniform(low, high, K)))
            boundaries, codes = nearest_level_table(moments, drawn)
            used, codes = np.unique(codes, return_inverse=True)
            levels = drawn[used] + moments.centre
        else:
            boundaries, codes = np.sort(random.uniform(low, high, K - 1)), np.arange(K)
            w, fw, _ = moments.between(np.concatenate([[low], boundaries, [high]]))
            levels = fw / np.where(w > 0, w, 1) + moments.centre
        other = Table("drawn", kind, "w", boundaries, codes, levels, 0.0)
        assert table_error(other, act, weight) >= table.lower_bound


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_nothing_is_claimed_of_a_constant_derivative(kind):
    table = solve("gelu", bits=2, kind=kind, weight="normal:100,1")
    assert table.lower_bound == table.error == 0


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_without_a_certificate_the_table_is_the_same_and_there_is_no_bound(kind):
    proven, rough = (solve("silu", bits=3, kind=kind, certify=certify) for certify in (True, False))
    assert rough.key == proven.key
    assert rough.error == proven.error
    assert rough.lower_bound is None
