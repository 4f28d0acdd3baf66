from fewbit.plots.figures.throughput import plot_throughput

ROWS = [
    {"who": who, "which": which, "dtype": dtype, "n": n, "bits": bits, "gbs": gbs + n / 2**20, "share": 0.9}
    for dtype in ("bfloat16", "float32")
    for n in (2**22, 2**20)
    for who, which, bits, gbs in [
        *(("copy", "copy", 0, 4000.0), ("torch", "forward", 16, 3500.0), ("torch", "both", 16, 3000.0)),
        *(("fewbit", "forward", 3, 3900.0), ("fewbit", "forward", 4, 3800.0), ("fewbit", "backward", 3, 3950.0)),
    ]
]


def test_a_panel_a_dtype_and_a_line_a_pass_by_size():
    figure = plot_throughput(ROWS, "Some GPU")
    assert [axes.get_title() for axes in figure.axes] == ["bfloat16", "float32"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"copy", "torch forward", "fewbit forward", "fewbit backward"}
    x, y = lines["fewbit forward"].get_data()
    assert (list(x), list(y)) == ([2**20, 2**22], [3901.0, 3904.0])
    assert figure.get_suptitle() == "GELU, 3 bits, Some GPU"
    lines = {line.get_label(): line for line in plot_throughput(ROWS, "Some GPU", bits=4).axes[0].lines}
    assert list(lines["fewbit forward"].get_ydata()) == [3801.0, 3804.0]
    assert "fewbit backward" not in lines
