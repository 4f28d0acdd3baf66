from itertools import combinations, product

import numpy as np
import pytest
from cell_problems import ROUNDING, plain_programme, problem
from fewbit.fewbit_gen.shared import solve_shared
from hypothesis import given
from hypothesis import strategies as st


def cost(values, weights, levels):
    """Every value goes to the nearest level."""
    return float((np.asarray(weights) * np.min((np.asarray(values)[:, None] - levels) ** 2, axis=1)).sum())


def spread(values, weights):
    values, weights = np.asarray(values, float), np.asarray(weights, float)
    total = weights.sum()
    mean = (values * weights).sum() / total if total > 0 else 0.0
    return float((weights * (values - mean) ** 2).sum())


def least_cost(values, weights, K):
    """By trying all partitions of the sorted values."""
    order = np.argsort(values, kind="stable")
    values, weights = np.asarray(values)[order], np.asarray(weights)[order]
    n = values.size
    return min(
        sum(spread(values[j:i], weights[j:i]) for j, i in zip((0, *cuts), (*cuts, n), strict=True))
        for cuts in combinations(range(1, n), min(K, n) - 1)
    )


cells = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-8, 8), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 1.0, 2.5, 1e-3]), min_size=n, max_size=n).filter(any),
    )
)


@given(cells, st.integers(1, 4))
def test_is_as_good_as_trying_all_partitions(cells, K):
    values, weights = cells
    moments = problem(values, weights)
    found = solve_shared(moments, K)
    least = least_cost(values, weights, K)
    rounding = ROUNDING * moments.prefix[2, -1]
    assert 1 <= found.size <= K
    assert np.all(np.diff(found) > 0)
    assert cost(values, weights, found) <= least + rounding


@pytest.mark.parametrize("seed", range(5))
def test_no_grouping_of_the_cells_is_better_than_a_partition_of_their_values(seed):
    rng = np.random.default_rng(seed)
    values, weights, K = rng.normal(size=7), rng.uniform(size=7), 3
    groupings = np.array(list(product(range(K), repeat=7)))
    least = min(sum(spread(values[g == k], weights[g == k]) for k in range(K)) for g in groupings)
    assert cost(values, weights, solve_shared(problem(values, weights), K)) == pytest.approx(least, abs=1e-13)


@pytest.mark.sample(3)
@pytest.mark.parametrize("K", [2, 3, 8, 100])
@pytest.mark.parametrize("shape", ["random", "ties", "skewed"])
def test_is_as_good_as_the_plain_programme(shape, K):
    rng = np.random.default_rng(K)
    n = 400
    values = {
        "random": rng.normal(size=n),
        "ties": rng.integers(0, 30, n).astype(float),
        "skewed": np.exp(3 * rng.normal(size=n)),
    }[shape]
    weights = rng.uniform(size=n)
    order = np.argsort(values)
    line = problem(values[order], weights[order]).prefix
    found = solve_shared(problem(values, weights), K)
    assert abs(cost(values, weights, found) - plain_programme(line, K)) <= ROUNDING * line[2, -1]


def test_more_levels_than_values():
    assert solve_shared(problem([3, 1, 3, 2], [1.0, 1.0, 1.0, 0.0]), 256).tolist() == [1.0, 3.0]
