import numpy as np
import pytest
from fewbit.plots import save_figure
from fewbit.plots.figures.actnn_training import Variant, message, plot_actnn_training

VARIANTS = [
    Variant("exact", [[3.0, 2.0], [5.0, 4.0]], [1.0, 2.0], 2**20),
    Variant("L3", [[4.0, 2.0], [5.0, 6.0]], [1.005, 2.004], 2**18),
]


def test_a_task_is_a_row_of_losses_ends_and_bytes(tmp_path):
    figure = plot_actnn_training({"images": VARIANTS, "text": VARIANTS})
    falling, ending, keeping, *_ = figure.axes
    assert len(figure.axes) == 6
    curves = {line.get_label(): line.get_ydata() for line in falling.lines}
    np.testing.assert_array_equal(curves["L3"], [0.5, 1.0])
    assert [text.get_text() for text in falling.texts] == ["exact", "L3"]
    assert [bar.get_width() for bar in keeping.patches] == [1.0, 0.25]
    assert any("4.0× less" in text.get_text() for text in keeping.texts)
    assert [label.get_text() for label in ending.get_yticklabels()] == ["L3"]
    assert figure.get_suptitle() == "Ends as exact training: L3 (4× less memory)"
    save_figure(figure, tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("losses", "said"), [([1.5, 2.501], "above it beyond chance: L3"), ([1.5, 3.5], "undecided: L3")]
)
def test_who_ends_above_exact_runs_on_one_task_is_told_apart_by_paired_intervals(losses, said):
    far = Variant("L3", VARIANTS[1].losses, losses, 2**18)
    assert message({"images": VARIANTS, "text": [VARIANTS[0], far]}) == said


def test_six_lines_at_most_are_drawn():
    many = [Variant(f"L{i}", VARIANTS[1].losses, [1.5, 2.5], 2**18) for i in range(8)]
    falling, ending, keeping = plot_actnn_training({"images": [VARIANTS[0], *many]}).axes
    assert len(falling.texts) == 5 and len(ending.get_yticklabels()) == 8 and len(keeping.patches) == 9
