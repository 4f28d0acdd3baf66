"""The data that all studies train on. It comes with Python and scikit-learn; nothing is downloaded.

digits      1,797 handwritten digits of 8×8 pixels, ten classes
patches     squares of 16×16 pixels of scikit-learn's two photographs, each cut into five columns: which of the ten
            is it from?
text        the source of Python's own standard library, a character its ASCII code
words       those of the same text, by frequency
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tables import FewbitError

# ---- images ----------------------------------------------------------------------------------------------------------

_PATCH = 16
_COLUMNS = 5  # of a photograph
_HELD_OUT_EVERY = 5  # images


@dataclass(frozen=True)
class Images:
    """Images with their classes, 0 to 9, in two parts.

    Attributes:
        name: of the collection.
        training, test: float32 (n, channels, height, width).
        training_classes, test_classes: int64 (n,).
    """

    name: str
    training: Tensor
    training_classes: Tensor
    test: Tensor
    test_classes: Tensor


def pixels_of_digits() -> tuple[Tensor, Tensor]:
    """Return all digits as scikit-learn orders them, float32 (1797, 1, 8, 8) from 0 to 1, and their classes."""
    data: Any = _sklearn().load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target).long()


def digits(*, normalized: bool = True) -> Images:
    """Return scikit-learn's digits in their own order, the last of every five for the test.

    Args:
        normalized: whether training pixels have mean 0 and deviation 1; otherwise pixels are from 0 to 1.
    """
    images, classes = pixels_of_digits()
    whole = _split("digits", images, classes, _HELD_OUT_EVERY - 1)
    return _normalized(whole) if normalized else whole


def shuffled_digits() -> Images:
    """Return scikit-learn's digits in random order, the first of every five for the test; normalized."""
    return _normalized(_split("digits", *_shuffled(*pixels_of_digits())))


def patches() -> Images:
    """Return squares of scikit-learn's two photographs, shuffled, normalized by channel; no two of them overlap."""
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


COLLECTIONS: dict[str, Callable[[], Images]] = {"digits": shuffled_digits, "patches": patches}


def _sklearn() -> Any:
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise FewbitError(
            "the images come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    return datasets


def _shuffled(images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in an order that has nothing to do with the classes, and is the same everywhere."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    return images[order], classes[order]


def _split(name: str, images: Tensor, classes: Tensor, first: int = 0) -> Images:
    """Return every fifth image, from that at `first` on, for the test, the others to train on."""
    test = torch.arange(len(images)) % _HELD_OUT_EVERY == first
    return Images(name, images[~test], classes[~test], images[test], classes[test])


def _normalized(images: Images) -> Images:
    """Return the images with mean 0 and deviation 1 of each channel over what is trained on."""
    dims = (0, 2, 3)
    mean, deviation = images.training.mean(dims, keepdim=True), images.training.std(dims, keepdim=True)
    training, test = ((part - mean) / deviation for part in (images.training, images.test))
    return Images(images.name, training, images.training_classes, test, images.test_classes)


# ---- text ------------------------------------------------------------------------------------------------------------

VOCABULARY = 128
CHARACTERS = 2_500_000  # of all files together; every current Python has more, so that this is the size everywhere
_VALIDATION_EVERY = 10  # files
_WORD = re.compile(r"[A-Za-z_]+|\d+|\n|[^\sA-Za-z_\d]")


@dataclass(frozen=True)
class Corpus:
    """Text in two parts.

    Attributes:
        training: ASCII codes, uint8 (n,), of the files to train on, one after the other.
        validation: ASCII codes, uint8 (m,), of other files.
    """

    training: Tensor
    validation: Tensor


def standard_library(characters: int = CHARACTERS) -> Corpus:
    """Return the first `characters` (or fewer, if there are not as many) of the standard library's modules.

    They come in alphabetical order, every tenth for validation. The few characters beyond ASCII become "?": so the
    vocabulary is 128 on every machine, while the text itself is that of the Python at hand.

    Raises:
        FewbitError: this Python comes without the source of its library.
    """
    folder = Path(os.__file__).parent
    # What begins with an underscore may be of the build and not of the library, such as _sysconfigdata.
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    held_out = files[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]
    if not held_out:
        raise FewbitError(f"there is no text to train on: this Python has no source of its library in {folder}")
    kept = [path for path in files if path not in held_out]
    validation = characters // _VALIDATION_EVERY
    return Corpus(_encode(kept, characters - validation), _encode(held_out, validation))


def library_words(characters: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the words of the standard library to train on and to validate on, int64 (n,).

    Words are identifiers, numbers and signs; a number is a word's place by frequency, 0 whatever is not among the
    `vocabulary` − 1 most frequent.
    """
    corpus = standard_library(characters)
    texts = [_WORD.findall(bytes(part.tolist()).decode("ascii")) for part in (corpus.training, corpus.validation)]
    common = Counter(texts[0]).most_common(vocabulary - 1)
    numbers = {word: i for i, (word, _) in enumerate(common, start=1)}
    training, validation = (torch.tensor([numbers.get(word, 0) for word in text]) for text in texts)
    return training, validation


def unigram_entropy(text: Tensor) -> float:
    """Return the entropy of a character of `text` in nats: the loss of who knows how often each occurs, and no more."""
    counts = torch.bincount(text, minlength=VOCABULARY).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def random_windows(text: Tensor, count: int, context: int, draw: torch.Generator) -> Tensor:
    """Return `count` windows of context + 1 characters from anywhere in `text`, int64 (count, context + 1)."""
    return _windows(text, torch.randint(len(text) - context, (count,), generator=draw), context)


def spread_windows(text: Tensor, count: int, context: int) -> Tensor:
    """Return `count` windows of context + 1 characters, evenly spread over `text`, int64 (count, context + 1)."""
    return _windows(text, torch.arange(count) * (len(text) - context - 1) // max(1, count - 1), context)


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


def _encode(files: Iterable[Path], characters: int) -> Tensor:
    text = "".join(path.read_text("utf-8", errors="replace") for path in files)[:characters]
    return torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
