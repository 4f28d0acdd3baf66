"""The certificate: never above what any table reaches, and within a millionth of what the best one does."""

import numpy as np
import pytest
from fewbit.fewbit_gen import lower_bound, parse_activation, parse_weight, solve
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.crossings import nearest_level_table
from fewbit.fewbit_gen.lower_bound import TOLERANCE, table_lower_bound
from fewbit.fewbit_gen.moments import Moments
from fewbit.tables import Table

SMOOTH = ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "selu", "softplus"]


def problem(activation, weight, cells=1024):
    return Moments.of(parse_activation(activation), parse_weight(weight), cells)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("activation", SMOOTH)
def test_solved_tables_are_the_best_to_a_millionth(activation, kind, bits):
    table = solve(activation, bits=bits, kind=kind)
    assert table.lower_bound <= table.error
    assert table.error - table.lower_bound <= TOLERANCE * table.error


@pytest.mark.parametrize("weight", ["normal:0,1", "uniform:-1,3", "normal:2,0.5"])
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("activation", ["gelu", "tanh", "selu"])
def test_other_weights_are_certified_too(activation, kind, weight):
    table = solve(activation, levels=5, kind=kind, weight=weight)
    assert 0 <= table.error - table.lower_bound <= TOLERANCE * table.error


@pytest.mark.parametrize("activation", ["gelu", "selu", "softplus(beta=5,threshold=2)", "hardswish"])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_no_interval_table_beats_the_bound(activation, K):
    act, weight = parse_activation(activation), parse_weight("uniform:-4,4")
    bound = solve(activation, levels=K, kind="interval", weight=weight.spec).lower_bound
    random = np.random.default_rng(0)
    moments = problem(activation, weight.spec)
    for _ in range(100):
        boundaries = np.sort(random.uniform(-4, 4, K - 1))
        w, fw, _ = moments.between(np.concatenate([[-4.0], boundaries, [4.0]]))
        levels = fw / w + moments.centre
        table = Table(activation, "interval", weight.spec, boundaries, np.arange(K), levels, 0.0)
        assert table_error(table, act, weight) >= bound


@pytest.mark.parametrize("activation", ["gelu", "sigmoid", "selu"])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_no_set_of_levels_beats_the_bound(activation, K):
    act, weight = parse_activation(activation), parse_weight("uniform:-4,4")
    bound = solve(activation, levels=K, weight=weight.spec).lower_bound
    random = np.random.default_rng(0)
    moments = problem(activation, weight.spec)
    low, high = np.quantile(moments.centred(moments.edges), [0, 1])
    for _ in range(50):
        levels = np.sort(random.uniform(low, high, K))
        boundaries, codes = nearest_level_table(moments, levels)
        codes = np.unique(codes, return_inverse=True)[1]
        used = np.unique(nearest_level_table(moments, levels)[1])
        table = Table(activation, "shared", weight.spec, boundaries, codes, levels[used] + moments.centre, 0.0)
        assert table_error(table, act, weight) >= bound


@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize("worse", [1.0001, 1.1, 3.0])
def test_a_table_that_is_not_the_best_is_not_certified_as_such(kind, worse, monkeypatch):
    monkeypatch.setattr(lower_bound, "_EFFORT", 2e7)  # the windows never close, so all of it is spent
    best = solve("gelu", bits=2, kind=kind)
    bound = table_lower_bound(problem("gelu", "uniform:-10,10", 4096), kind, 4, worse * best.error)
    assert bound <= best.error * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_nothing_is_claimed_of_a_constant_derivative(kind):
    table = solve("gelu", bits=2, kind=kind, weight="normal:100,1")
    assert table.lower_bound == table.error == 0


@pytest.mark.parametrize("kind", ["interval", "shared"])
def test_without_a_certificate_the_table_is_the_same_and_the_bound_rough(kind):
    proven, rough = (solve("silu", bits=3, kind=kind, certify=certify) for certify in (True, False))
    assert rough.key == proven.key
    assert rough.lower_bound < proven.lower_bound <= proven.error == rough.error
