import os

import pytest
from fewbit.plots import FORMATS, check_figure_path, save_figure
from fewbit.tables import FewbitError
from matplotlib.figure import Figure

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-", "svg": b"<?xml"}


@pytest.fixture
def figure():
    figure = Figure(figsize=(2, 2))
    figure.add_subplot().plot([0, 1], [1, 0])
    return figure


@pytest.mark.parametrize("name", FORMATS)
def test_the_suffix_chooses_the_format(figure, tmp_path, name):
    for path in (tmp_path / f"figure.{name}", tmp_path / f"FIGURE.{name.upper()}"):
        save_figure(figure, path)
        assert path.read_bytes().startswith(MAGIC[name])


@pytest.mark.parametrize("name", ["figure.gif", "figure", "figure.", ".png", "figure.png.txt"])
def test_an_unknown_suffix_is_told_with_what_is_accepted(figure, tmp_path, name):
    with pytest.raises(FewbitError, match=r"accepted: \.png, \.svg, \.pdf$"):
        save_figure(figure, tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_path_is_checked_before_anything_is_drawn_and_not_touched(tmp_path):
    with pytest.raises(FewbitError, match="there is no folder"):
        check_figure_path(tmp_path / "missing" / "figure.png")
    assert check_figure_path(tmp_path / "figure.svg") == "svg"
    assert os.listdir(tmp_path) == []


def test_a_failure_while_drawing_leaves_the_old_file_alone(figure, tmp_path, monkeypatch):
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def half(stream, **_):
        stream.write(b"half")
        raise RuntimeError

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(RuntimeError):
        save_figure(figure, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["figure.png"]
