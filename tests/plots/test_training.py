import numpy as np
from fewbit.plots.training import Curve, Seeds, plot_seeds, plot_training

CURVES = [Curve("exact", [3.0, 2.0, 1.0], 1.25), Curve("1 bit", [3.0, 2.5, 1.25], 1.5)]
SEEDS = [
    Seeds("exact", [[3.0, 2.0, 1.0], [4.0, 2.0, 2.0]], [1.0, 2.0]),
    Seeds("1 bit", [[3.0, 2.5, 1.0], [4.0, 2.5, 3.0]], [1.5, 2.5]),
]


def test_every_curve_is_drawn_over_its_steps():
    falling, _ = plot_training(CURVES, 2.5).axes
    drawn = {line.get_label(): line for line in falling.lines}
    for label, losses in (("exact (validation 1.250)", [3, 2, 1]), ("1 bit (validation 1.500)", [3, 2.5, 1.25])):
        np.testing.assert_array_equal(drawn[label].get_xdata(), [1, 2, 3])
        np.testing.assert_array_equal(drawn[label].get_ydata(), losses)


def test_the_unigram_entropy_is_a_horizontal_line():
    falling, _ = plot_training(CURVES, 2.5).axes
    (line,) = [line for line in falling.lines if line.get_label() == "unigram entropy"]
    assert set(line.get_ydata()) == {2.5}


def test_differences_are_from_the_first_curve():
    _, differing = plot_training(CURVES, 2.5).axes
    first, second = differing.lines
    assert not np.any(first.get_ydata())
    np.testing.assert_array_equal(second.get_ydata(), [0, 0.5, 0.25])
    assert "exact" in differing.get_title()


def test_a_curve_has_one_colour_in_both_panels():
    falling, differing = plot_training(CURVES, 2.5).axes
    colours = [line.get_color() for line in falling.lines if line.get_label() != "unigram entropy"]
    assert colours == [line.get_color() for line in differing.lines]
    assert len(set(colours)) == 2


def test_a_single_curve_of_a_single_step_is_a_figure_too(tmp_path):
    plot_training([Curve("exact", [3.0], 3.0)], 2.5).savefig(tmp_path / "one.png")


def test_of_seeds_the_mean_is_drawn_and_its_difference_from_the_first():
    falling, differing, _ = plot_seeds(SEEDS, 2.5).axes
    drawn = {line.get_label(): line.get_ydata() for line in falling.lines}
    np.testing.assert_array_equal(drawn["exact, mean"], [3.5, 2, 1.5])
    np.testing.assert_array_equal(drawn["1 bit, mean"], [3.5, 2.5, 2])
    exact, few = differing.lines
    assert not np.any(exact.get_ydata())
    np.testing.assert_array_equal(few.get_ydata(), [0, 0.5, 0.5])


def test_the_band_is_from_the_lowest_to_the_highest_run_of_the_first():
    falling, differing, _ = plot_seeds(SEEDS, 2.5).axes
    for axes, at_the_end in ((falling, {1.0, 2.0}), (differing, {-0.5, 0.5})):
        (band,) = axes.collections
        corners = band.get_paths()[0].vertices
        assert set(corners[corners[:, 0] == 3][:, 1]) == at_the_end


def test_every_seed_has_a_point_of_validation_loss_and_a_line_to_the_other_variants():
    *_, validating = plot_seeds(SEEDS, 2.5).axes
    joined = [list(line.get_ydata()) for line in validating.lines if len(line.get_xdata()) == 2]
    assert [1.0, 1.5] in joined
    assert [2.0, 2.5] in joined
    assert [label.get_text() for label in validating.get_xticklabels()] == ["exact", "1 bit"]


def test_one_seed_of_one_variant_and_one_step_is_a_figure_too(tmp_path):
    plot_seeds([Seeds("exact", [[3.0]], [3.0])], 2.5).savefig(tmp_path / "one.png")
