"""The solver against brute force, and what a plan must never do: get worse with more memory."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from fewbit import FewbitError
from fewbit.runtime.plan.problem import EXACT, GROUPS, RECOMPUTE, Hold, Limits, Option, Price, Problem
from fewbit.runtime.plan.solver import is_feasible, merge, solve, split
from hypothesis import given
from hypothesis import strategies as st

MOMENTS = 8


def option(i, nbytes, noise, seconds, start=0, end=MOMENTS, method=GROUPS, bits=4):
    holds = (Hold(start, end, nbytes),)
    return Option(method, f"t:{i}", bits, (i,), holds, nbytes, noise=noise, seconds=seconds)


@st.composite
def problems(draw):
    tensors = draw(st.integers(1, 4))
    options = []
    for i in range(tensors):
        start = draw(st.integers(0, MOMENTS - 1))
        end = draw(st.integers(start + 1, MOMENTS))
        options.append(option(i, draw(st.integers(50, 100)), 0.0, 0.0, start, end, EXACT, None))
        for bits in range(draw(st.integers(1, 2))):
            costs = draw(st.floats(0.001, 1)), draw(st.floats(0, 0.5))
            options.append(option(i, draw(st.integers(1, 60)), *costs, start, end, bits=bits + 1))
    if draw(st.booleans()):
        covers = tuple(range(tensors))
        holds = (Hold(0, 3, 5), Hold(3, 4, draw(st.integers(10, 200))))
        options.append(Option(RECOMPUTE, "block", None, covers, holds, 5, seconds=draw(st.floats(0, 1))))
    base = np.array(draw(st.lists(st.integers(0, 50), min_size=MOMENTS, max_size=MOMENTS)), np.int64)
    return Problem(tensors, tuple(options), base, draw(st.integers(0, 100)), 1.0)


def coverings(problem):
    """Yield every choice of options that covers each tensor once."""
    for chosen in product((False, True), repeat=len(problem.options)):
        some = tuple(o for o, is_chosen in zip(problem.options, chosen, strict=True) if is_chosen)
        if sorted(i for o in some for i in o.covers) == list(range(problem.tensors)):
            yield some


def peak(problem, chosen):
    return problem.fixed + int(problem.usage(chosen).max())


def price(problem, chosen):
    return sum(Price().of(o, problem.seconds) for o in chosen)


class TestAgainstBruteForce:
    @given(problems(), st.floats(0, 1))
    def test_the_least_price_within_the_memory_is_found(self, problem, part):
        peaks = [peak(problem, chosen) for chosen in coverings(problem)]
        memory = int(min(peaks) + part * (max(peaks) - min(peaks))) + 1
        best = min(price(problem, c) for c in coverings(problem) if peak(problem, c) <= memory)
        found = solve(problem, Limits(memory=memory))
        assert peak(problem, found.chosen) <= memory
        assert found.price == pytest.approx(price(problem, found.chosen))
        assert found.price <= best * (1 + 2e-4) + 1e-9
        assert found.bound <= best * (1 + 1e-6) + 1e-9

    @given(problems(), st.floats(0.05, 1.5))
    def test_the_least_memory_within_an_error_is_found(self, problem, error):
        within = [c for c in coverings(problem) if sum(o.error for o in c) <= error**2]
        found = solve(problem, Limits(error=error))
        assert found.error <= error * (1 + 1e-5)
        assert peak(problem, found.chosen) <= min(peak(problem, c) for c in within) * (1 + 2e-4) + 1

    @given(problems())
    def test_more_memory_never_costs_more(self, problem):
        least = solve(problem, Limits(error=1e3)).price
        prices = []
        for more in (0, 20, 50, 100, 400):
            prices.append(solve(problem, Limits(memory=int(least) + 1 + more)).price)
        assert all(b <= a * (1 + 2e-4) + 1e-9 for a, b in pairwise(prices))

    @given(problems(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, MOMENTS - 1), st.integers(1, 40))))
    def test_no_choice_goes_below_the_floor_where_options_spare_what_is_there_anyway(self, problem, spared):
        options = list(problem.options)
        for i, start, nbytes in spared:
            o = options[i % len(options)]
            options[i % len(options)] = replace(o, holds=(*o.holds, Hold(start, MOMENTS, -nbytes)))
        problem = replace(problem, options=tuple(options))
        assert problem.floor() <= min(peak(problem, chosen) for chosen in coverings(problem))


class TestLimits:
    def test_what_does_not_fit_is_refused_with_the_least_memory(self):
        problem = Problem(
            1, (option(0, 80, 0, 0, method=EXACT, bits=None), option(0, 10, 1, 0)), np.zeros(8, int), 7, 1.0
        )
        assert is_feasible(problem, Limits(memory=17)) and not is_feasible(problem, Limits(memory=16))
        with pytest.raises(FewbitError, match="fits into 16 bytes: the least is 17 bytes"):
            solve(problem, Limits(memory=16))
        with pytest.raises(FewbitError, match=r"no plan is within error=0.1"):
            solve(Problem(1, (option(0, 10, 1, 0),), np.zeros(8, int), 7, 1.0), Limits(error=0.1))
        with pytest.raises(FewbitError, match="limit memory"):
            solve(problem, Limits())

    def test_a_limit_on_time_is_kept(self):
        slow, fast = option(0, 10, 0.0, 0.5), option(0, 10, 0.9, 0.0)
        problem = Problem(1, (slow, fast), np.zeros(8, int), 0, 1.0)
        assert solve(problem, Limits(memory=100)).chosen == (slow,)
        assert solve(problem, Limits(memory=100, time=1.2)).chosen == (fast,)


class TestMerging:
    def test_equal_layers_are_solved_in_runs_and_given_back_one_by_one(self):
        options = [option(i, n, e, 0, 0, 4 + i % 2, bits=b) for i in range(40) for b, n, e in ((1, 1, 4), (4, 9, 1))]
        problem = Problem(40, tuple(options), np.zeros(MOMENTS, np.int64), 0, 1.0)
        merged = merge(problem, ["even" if i % 2 else "odd" for i in range(40)], 24, 24)
        assert len(merged.options) <= 24 < len(options)
        whole = solve(merged, Limits(memory=200))
        each = split(whole, problem.options)
        assert sorted(i for o in each.chosen for i in o.covers) == list(range(40))
        assert problem.usage(each.chosen).tolist() == merged.usage(whole.chosen).tolist()
        assert sum(o.noise for o in each.chosen) == pytest.approx(whole.noise)

    def test_a_small_problem_stays_as_it_is(self):
        problem = Problem(1, (option(0, 1, 0, 0),), np.zeros(8, int), 0, 1.0)
        assert merge(problem, ["a"], 10, 10) is problem
