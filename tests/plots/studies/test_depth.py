"""BLPA at depth: a few steps of a network of 11 layers on the small digits."""

from itertools import pairwise

import pytest
from fewbit.plots.demo.data import digits
from fewbit.plots.studies import depth

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth, "_images", lambda name: digits())
        cases = [case for case in depth.cases() if case["seed"] < 2]
        return [{**case, **depth.measure(case, steps=4, depth=11)} for case in cases]


def test_few_bits_begin_as_exact_and_naive_does_not(rows):
    first = {row["variant"]: row["losses"][0] for row in rows if (row["images"], row["seed"]) == ("mnist", 0)}
    assert first["exact"] == first["8 bits"] == first["4 bits"] != first["naive, 8 bits"]
    saved = {row["variant"]: row["saved"] for row in rows}
    assert saved["4 bits"] < saved["8 bits"] < saved["exact"]


def test_lines_pair_runs_of_one_seed(rows):
    found = {tuple(line.split(":")[0].split()): line for line in depth.lines(rows)}
    assert len(found) == 7
    error = {(row["variant"], row["seed"]): row["error"] for row in rows if row["images"] == "digits"}
    gap = sum(error["4 bits", seed] - error["exact", seed] for seed in (0, 1)) / 2
    assert f"less exact's {gap:+.4f}" in found["digits", "4", "bits", "2", "seeds"]


def test_the_figure_names_each_line_at_its_end(rows):
    left, _, below, _ = depth.draw(rows).axes
    assert sorted(text.get_text() for text in left.texts) == sorted(depth.RUNS["mnist"])
    heights = [text.xy[1] for text in below.texts]
    assert all(later - earlier > 0.069 for earlier, later in pairwise(heights))


def test_every_run_has_an_exact_one_of_its_seed():
    cases = depth.cases()
    assert len({tuple(case.items()) for case in cases}) == len(cases) == 38
    exact = {(case["images"], case["seed"]) for case in cases if case["variant"] == "exact"}
    assert exact == {(case["images"], case["seed"]) for case in cases}
