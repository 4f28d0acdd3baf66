import numpy as np
import pytest
from fewbit.plots.figures.training import Curve, Seeds, plot_seeds, plot_training

EXACT = [[3.0, 2.0, 1.0], [3.5, 2.5, 2.0]]
CURVES = [Curve("1 bit", [3.0, 2.5, 1.25]), Curve("2 bits", [3.0, 3.0, 1.5])]
SEEDS = [
    Seeds("exact", [[3.0, 2.0, 1.0], [4.0, 2.0, 2.0]], [1.0, 2.0]),
    Seeds("1 bit", [[3.0, 2.5, 1.0], [4.0, 2.5, 3.0]], [1.5, 2.5]),
]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_every_curve_is_drawn_over_its_steps_and_the_unigram_entropy_as_a_labelled_line():
    falling, _ = plot_training(EXACT, CURVES, 2.5).axes
    drawn = {line.get_label(): line for line in falling.lines}
    for label, losses in (("exact", [3, 2, 1]), ("1 bit", [3, 2.5, 1.25]), ("2 bits", [3, 3, 1.5])):
        np.testing.assert_array_equal(drawn[label].get_xdata(), [1, 2, 3])
        np.testing.assert_array_equal(drawn[label].get_ydata(), losses)
    assert [set(line.get_ydata()) for line in falling.lines].count({2.5}) == 1
    assert "character frequencies alone" in texts(falling)


def test_differences_are_from_the_first_exact_run_before_the_range_of_all():
    _, differing = plot_training(EXACT, CURVES, 2.5).axes
    drawn = {line.get_label(): line.get_ydata() for line in differing.lines}
    np.testing.assert_array_equal(drawn["1 bit"], [0, 0.5, 0.25])
    np.testing.assert_array_equal(drawn["2 bits"], [0, 1, 0.5])
    (band,) = differing.collections
    corners = band.get_paths()[0].vertices
    assert set(corners[corners[:, 0] == 3][:, 1]) == {0, 1}
    assert "area: range of 2 exact runs, 1 of them from other weights" in texts(differing)


def test_lines_are_labelled_at_their_ends_apart_from_each_other():
    curves = [Curve(f"{bits} bits", [3.0, 2.0, 1.0 + bits / 1e6]) for bits in range(2, 9)]
    falling, differing = plot_training(EXACT, curves, 2.5).axes
    assert texts(falling)[1:] == ["exact", *(curve.name for curve in curves)]
    labels = {text.get_text(): text.xy[1] for text in differing.texts if text.get_text().endswith(" bits")}
    assert set(labels) == {curve.name for curve in curves}
    places = sorted(labels.values())
    assert min(np.diff(places)) >= 0.05


def test_a_curve_has_one_colour_in_both_panels():
    falling, differing = plot_training(EXACT, CURVES, 2.5).axes
    left, right = ({line.get_label(): line.get_color() for line in axes.lines} for axes in (falling, differing))
    assert left["1 bit"] == right["1 bit"] != left["2 bits"] == right["2 bits"]
    assert left["exact"] not in (left["1 bit"], left["2 bits"])


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((1.25, 1.5), "1 bit and 2 bits inside"),
        ((1.0, 2.0), "1 bit and 2 bits inside"),
        ((0.5, 1.5), "2 bits inside; 1 bit outside"),
        ((2.5, 2.01), "1 bit and 2 bits outside"),
    ],
)
def test_the_title_says_who_ends_in_the_band(ends, said):
    curves = [Curve(name, [3.0, 2.5, end]) for name, end in zip(("1 bit", "2 bits"), ends, strict=True)]
    title = plot_training(EXACT, curves, 2.5).get_suptitle()
    assert title == f"{said} the range of 2 exact runs at the end of training"


@pytest.mark.parametrize(("exact", "curves"), [(EXACT[:1], CURVES), (EXACT, [])])
def test_without_a_comparison_there_is_no_claim(exact, curves):
    assert "no band" in plot_training(exact, curves, 2.5).get_suptitle()


def test_what_is_single_is_a_figure_too(tmp_path):
    """A step, a curve, a seed, a variant."""
    plot_training([[3.0]], [Curve("1 bit", [3.0])], 2.5).savefig(tmp_path / "one.png")
    plot_training([[3.0], [3.0]], [], 2.5).savefig(tmp_path / "none.png")
    plot_seeds([Seeds("exact", [[3.0]], [3.0])], 2.5).savefig(tmp_path / "one.png")


def test_of_seeds_the_mean_its_difference_from_the_first_and_the_band_of_its_runs_are_drawn():
    falling, differing, validating = plot_seeds(SEEDS, 2.5).axes
    drawn = {line.get_label(): line.get_ydata() for line in falling.lines}
    np.testing.assert_array_equal(drawn["exact, mean"], [3.5, 2, 1.5])
    np.testing.assert_array_equal(drawn["1 bit, mean"], [3.5, 2.5, 2])
    exact, few = differing.lines
    assert not np.any(exact.get_ydata())
    np.testing.assert_array_equal(few.get_ydata(), [0, 0.5, 0.5])
    for axes, at_the_end in ((falling, {1.0, 2.0}), (differing, {-0.5, 0.5})):
        (band,) = axes.collections
        corners = band.get_paths()[0].vertices
        assert set(corners[corners[:, 0] == 3][:, 1]) == at_the_end
    joined = [list(line.get_ydata()) for line in validating.lines if len(line.get_xdata()) == 2]
    assert [1.0, 1.5] in joined
    assert [2.0, 2.5] in joined
    assert [label.get_text() for label in validating.get_xticklabels()] == ["exact", "1 bit"]
