import pytest
from fewbit.cli import plot as plot_module
from fewbit.cli.options import BitsList

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-", "svg": b"<?xml"}


@pytest.mark.parametrize("suffix", MAGIC)
@pytest.mark.parametrize(
    "arguments",
    [
        ["approximation", "gelu", "--bits", "1,2"],
        ["approximation", "relu", "softplus(beta=2)", "--bits", "1,2", "--kind", "interval"],
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


def test_the_real_process_needs_no_display(run_process, tmp_path):
    path = tmp_path / "gelu.png"
    assert run_process("plot", "approximation", "gelu", "--bits", "1", "-o", path, env=None).status == 0
    assert path.read_bytes().startswith(MAGIC["png"])


@pytest.mark.parametrize("command", ["approximation", "error"])
def test_the_output_is_checked_before_anything_is_solved(run, tmp_path, monkeypatch, command):
    def not_yet(*_, **__):
        pytest.fail("solved before the output was checked")

    monkeypatch.setattr(plot_module, "solve", not_yet)
    assert run("plot", command, "gelu", "-o", tmp_path / "missing" / "gelu.png").status == 2


def test_an_exact_table_is_drawn_once_whatever_the_bits(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot_module, "plot_approximation", lambda rows: drawn.extend(rows))
    monkeypatch.setattr(plot_module, "save_figure", lambda *_: None)
    run("plot", "approximation", "relu", "swish", "silu", "--bits", "3,1,1", "-o", tmp_path / "figure.png")
    assert [(row.name, [t.bits for t in row.tables]) for row in drawn] == [("relu", [1]), ("silu", [1, 3])]


def test_a_list_of_bits_is_sorted_and_has_each_once():
    assert BitsList().convert("3,1, 2,1", None, None) == (1, 2, 3)
