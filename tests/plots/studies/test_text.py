import math

import pytest
import torch
from fewbit.plots.studies import text
from fewbit.plots.studies.text import VOCABULARY, standard_library, unigram_entropy
from fewbit.tables import FewbitError


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of ten modules of 100 characters, each its own letter, a to j."""
    for letter in "abcdefghij":
        (tmp_path / f"{letter}.py").write_text(99 * letter + "\n")
    monkeypatch.setattr(text.os, "__file__", str(tmp_path / "os.py"))
    return tmp_path


def characters(codes):
    return bytes(codes.tolist()).decode("ascii")


def test_this_python_has_enough_text_of_its_own():
    corpus = standard_library()
    assert len(corpus.training) > 1_000_000
    assert len(corpus.validation) > 100_000
    assert corpus.training.dtype == torch.uint8
    assert corpus.training.max() < VOCABULARY
    assert "import" in characters(corpus.validation)


def test_the_text_is_the_same_at_every_call():
    a, b = standard_library(20_000), standard_library(20_000)
    assert torch.equal(a.training, b.training)
    assert torch.equal(a.validation, b.validation)
    assert (len(a.training), len(a.validation)) == (18_000, 2_000)


def test_validation_is_on_other_files(library):
    corpus = standard_library()
    assert set(characters(corpus.training)) == {*"abcdefghi", "\n"}
    assert set(characters(corpus.validation)) == {"j", "\n"}


def test_modules_come_in_alphabetical_order_and_those_of_the_build_not_at_all(library):
    (library / "_sysconfigdata.py").write_text("0")
    assert characters(standard_library().training).replace("\n", "")[::99] == "abcdefghi"


def test_characters_beyond_ascii_become_question_marks(library):
    (library / "a.py").write_text("é", encoding="utf-8")
    (library / "b.py").write_bytes(b"\xff")
    assert characters(standard_library().training).startswith("??c")


def test_a_library_without_source_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text.os, "__file__", str(tmp_path / "os.pyc"))
    with pytest.raises(FewbitError, match="no source of its library"):
        standard_library()


def test_unigram_entropy_is_that_of_the_frequencies():
    assert unigram_entropy(torch.tensor([7, 7, 7], dtype=torch.uint8)) == 0
    assert unigram_entropy(torch.arange(128, dtype=torch.uint8)) == pytest.approx(math.log(128))
    uneven = torch.tensor([1, 1, 1, 2], dtype=torch.uint8)
    assert unigram_entropy(uneven) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
