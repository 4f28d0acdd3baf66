import numpy as np
import pytest
from fewbit.cli import plot as plot_module
from fewbit.cli.options import BitsList
from fewbit.fewbit_gen import parse_weight
from fewbit.fewbit_gen.activations import FAMILIES

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-", "svg": b"<?xml"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("suffix", MAGIC)
@pytest.mark.parametrize(
    "arguments",
    [
        ["approximation", "gelu", "--bits", "1,2"],
        ["approximation", "relu", "softplus(beta=2)", "--bits", "1,2", "--kind", "interval"],
        ["gallery", "gelu", "relu", "x*sigmoid(2*x)", "--bits", "1", "--columns", "2", "--weight", "laplace:0,1"],
        ["kinds", "gelu", "relu", "--bits", "1"],
        ["error", "gelu", "relu", "--bits", "1,2"],
        ["error", "relu"],
        ["error", "tanh", "--kind", "shared", "--bits", "1", "--weight", "normal:0,1"],
    ],
    ids=" ".join,
)
def test_a_figure_is_written_in_the_format_of_its_name(run, tmp_path, suffix, arguments):
    path = tmp_path / f"figure.{suffix}"
    outcome = run("plot", *arguments, "-o", path)
    assert (outcome.status, outcome.out, outcome.err) == (0, "", f"wrote {path}\n")
    assert path.read_bytes().startswith(MAGIC[suffix])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.deep
def test_the_real_process_needs_no_display(run_process, tmp_path):
    path = tmp_path / "gelu.png"
    assert run_process("plot", "approximation", "gelu", "--bits", "1", "-o", path, env=None).status == 0
    assert path.read_bytes().startswith(MAGIC["png"])


@pytest.mark.parametrize("command", ["approximation", "gallery", "kinds", "error"])
def test_the_output_is_checked_before_anything_is_solved(run, tmp_path, monkeypatch, command):
    def not_yet(*_, **__):
        pytest.fail("solved before the output was checked")

    monkeypatch.setattr(plot_module, "find_or_solve", not_yet)
    assert run("plot", command, "gelu", "-o", tmp_path / "missing" / "gelu.png").status == 2


def test_an_exact_table_is_drawn_once_whatever_the_bits(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot_module, "plot_approximation", lambda rows: drawn.extend(rows))
    monkeypatch.setattr(plot_module, "write_figure", lambda *_: None)
    run("plot", "approximation", "relu", "swish", "silu", "--bits", "3,1,1", "-o", tmp_path / "figure.png")
    assert [(row.name, [t.bits for t in row.tables]) for row in drawn] == [("relu", [1]), ("silu", [1, 3])]


def test_the_gallery_shows_every_activation_known_by_name(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot_module, "plot_gallery", lambda rows, columns: drawn.extend(rows))
    monkeypatch.setattr(plot_module, "write_figure", lambda *_: None)
    assert run("plot", "gallery", "--bits", "1", "-o", tmp_path / "figure.png").status == 0
    assert [row.name.partition("(")[0] for row in drawn] == list(FAMILIES)


@pytest.mark.parametrize("command", ["approximation", "gallery", "kinds"])
def test_the_weight_may_be_a_file_and_is_drawn(run, tmp_path, monkeypatch, command):
    drawn = []
    monkeypatch.setattr(plot_module, f"plot_{command}", lambda rows, *_: drawn.extend(rows))
    monkeypatch.setattr(plot_module, "write_figure", lambda *_: None)
    (tmp_path / "x.txt").write_text("-1\n0\n1\n2\n")
    weight = parse_weight(str(tmp_path / "x.txt"))
    options = ["--bits", "1", "--weight", tmp_path / "x.txt", "-o", tmp_path / "figure.png"]
    assert run("plot", command, "gelu", *options).status == 0
    x = np.linspace(-1, 2, 50)
    (row,) = drawn
    np.testing.assert_array_equal(row.weight(x), weight.density(x))
    assert {table.weight for table in row.tables} == {weight.spec}


def test_a_list_of_bits_is_sorted_and_has_each_once():
    assert BitsList().convert("3,1, 2,1", None, None) == (1, 2, 3)
