from itertools import combinations, pairwise

import numpy as np
import pytest
from cell_problems import ROUNDING, plain_programme, problem
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.interval import solve_interval
from fewbit.fewbit_gen.moments import Moments
from hypothesis import given
from hypothesis import strategies as st


def segment(moments, j, i):
    """The cost of one level over cells j … i − 1, from the cells themselves."""
    w, fw, f2 = moments.cells[:, j:i].sum(axis=1)
    return max(0.0, f2 - fw * fw / w) if w > 0 else 0.0


def cost(moments, boundaries):
    fence = [0, *np.searchsorted(moments.edges, boundaries), moments.edges.size - 1]
    return sum(segment(moments, j, i) for j, i in pairwise(fence))


def least_cost(moments, K):
    """By trying all boundaries."""
    n = moments.edges.size - 1
    choices = combinations(range(1, n), min(K, n) - 1)
    return min(cost(moments, moments.edges[list(choice)]) for choice in choices)


cells = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-8, 8), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.5, 1e-3]), min_size=n, max_size=n),
    )
)


@given(cells, st.integers(1, 4))
def test_is_as_good_as_trying_all_boundaries(cells, K):
    moments = problem(*cells)
    found = solve_interval(moments, K)
    assert found.size <= K - 1
    assert np.all(np.diff(found) > 0)
    assert np.isin(found, moments.edges[1:-1]).all()
    assert cost(moments, found) <= least_cost(moments, K) + ROUNDING * moments.prefix[2, -1]


@pytest.mark.sample(5)
@pytest.mark.parametrize("K", [2, 3, 8, 21])
@pytest.mark.parametrize("shape", ["random", "walk", "steps", "gaps"])
def test_is_as_good_as_the_plain_programme(shape, K):
    """On grids of several blocks, where the search backwards stops early."""
    rng = np.random.default_rng(K)
    n = 700
    values = {
        "random": rng.normal(size=n),
        "walk": np.cumsum(rng.normal(size=n)),
        "steps": np.repeat(rng.normal(size=10), n // 10),
        "gaps": np.sin(np.arange(n) / 40),
    }[shape]
    weights = rng.uniform(size=n) * (rng.uniform(size=n) > (0.5 if shape == "gaps" else 0.0))
    moments = problem(values, weights, within=0.01 * rng.uniform(size=n))
    expected = plain_programme(moments.prefix, K)
    assert abs(cost(moments, solve_interval(moments, K)) - expected) <= ROUNDING * moments.prefix[2, -1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("weight", ["uniform:-10,10", "normal:0,1"])
@pytest.mark.parametrize("activation", ["gelu", "silu", "selu", "tanh"])
def test_is_as_good_as_the_plain_programme_on_activations(activation, weight):
    moments = Moments.of(parse_activation(activation), parse_weight(weight), 600)
    for K in (2, 3, 5, 16):
        expected = plain_programme(moments.prefix, K)
        assert abs(cost(moments, solve_interval(moments, K)) - expected) <= ROUNDING * moments.prefix[2, -1]


def divide_and_conquer(moments, K):
    """The programme with the best cut before i taken to move right with i."""
    n = moments.edges.size - 1
    best = [segment(moments, 0, i) for i in range(n + 1)]
    for _ in range(1, K):
        layer = [0.0] * (n + 1)
        todo = [(0, n, 0, n)]
        while todo:
            low, high, first, last = todo.pop()
            if low > high:
                continue
            i = (low + high) // 2
            layer[i], cut = min((best[j] + segment(moments, j, i), j) for j in range(first, min(i, last) + 1))
            todo += [(low, i - 1, first, cut), (i + 1, high, cut, last)]
        best = layer
    return best[n]


def test_divide_and_conquer_would_be_wrong():
    """Why the programme is O(n²K): f' of GELU is not monotone, and the faster search loses."""
    moments = Moments.of(parse_activation("gelu"), parse_weight("uniform:-10,10"), 200)
    excess = [divide_and_conquer(moments, K) / cost(moments, solve_interval(moments, K)) for K in range(2, 9)]
    assert min(excess) >= 1 - 1e-9
    assert max(excess) > 1.001


def test_uses_no_boundary_that_buys_nothing():
    assert solve_interval(problem([1.0] * 9, [1.0] * 9), 4).size == 0
    assert solve_interval(problem([1, 1, 1, 5, 5, 5], [1.0] * 6), 4).tolist() == [3.0]


def test_more_levels_than_cells():
    assert solve_interval(problem([1, 2, 3], [1.0] * 3), 256).tolist() == [1.0, 2.0]
    assert solve_interval(problem([1], [1.0]), 256).size == 0
