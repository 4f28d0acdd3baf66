import numpy as np
from fewbit.plots import save_figure
from fewbit.plots.figures.actnn_training import Variant, plot_actnn_training

VARIANTS = [
    Variant("exact", [[3.0, 2.0], [5.0, 4.0]], [1.0, 2.0], 2**20),
    Variant("L3", [[4.0, 2.0], [5.0, 6.0]], [1.5, 2.5], 2**18),
]


def test_a_task_is_a_row_of_losses_ends_and_bytes(tmp_path):
    figure = plot_actnn_training({"images": VARIANTS, "text": VARIANTS})
    falling, ending, keeping, *_ = figure.axes
    assert len(figure.axes) == 6
    curves = {line.get_label(): line.get_ydata() for line in falling.lines}
    np.testing.assert_array_equal(curves["L3"], [4.5, 4.0])
    assert [bar.get_width() for bar in keeping.patches] == [1.0, 0.25]
    assert any("4.0× less" in text.get_text() for text in keeping.texts)
    assert [label.get_text() for label in ending.get_yticklabels()] == ["exact", "L3"]
    save_figure(figure, tmp_path / "figure.png")
