"""ResNet-18 with few-bit activations: a few steps on the small digits."""

import pytest
from fewbit.plots.demo.data import digits
from fewbit.plots.studies import curves

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "_images", digits)
        cases = [{"activation": "GELU", "bits": bits, "seed": seed} for bits in (0, 1, 3) for seed in (0, 1)]
        return [{**case, **curves.measure(case, steps=10)} for case in cases]


def test_all_bits_of_a_seed_begin_at_the_same_loss(rows):
    first = {(row["seed"], row["losses"][0]) for row in rows}
    assert len(first) == 2 and len({row["losses"][-1] for row in rows}) == len(rows)


def test_lines_pair_runs_of_one_seed(rows):
    one, three, *together = curves.lines(rows)
    assert one.startswith("GELU  1 bits, 2 seeds") and three.startswith("GELU  3 bits, 2 seeds")
    assert [line.split(":")[0] for line in together] == ["all   1 bits", "all   3 bits"]
    loss = {(row["bits"], row["seed"]): row["loss"] for row in rows}
    gap = (loss[1, 0] - loss[0, 0] + loss[1, 1] - loss[0, 1]) / 2
    assert f"test loss {gap:+.4f}" in one


def test_the_figure_has_a_row_for_each_activation(rows):
    assert len(curves.draw(rows).axes) == 6
