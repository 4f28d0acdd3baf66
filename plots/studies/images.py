"""Real images that come with a package: scikit-learn's digits and its two photographs. Nothing is downloaded.

digits    1,797 handwritten digits of 8×8 pixels, ten classes
patches   squares of 16×16 pixels of the two photographs, each cut into five columns: which of the ten is it from?
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tables import FewbitError

_PATCH = 16
_COLUMNS = 5  # of a photograph
_TEST_EVERY = 5


@dataclass(frozen=True)
class Images:
    """Images with their classes, 0 to 9, in two parts.

    Attributes:
        name: of the collection.
        training, test: float32 (n, channels, height, width), each channel of mean 0 and deviation 1 in training.
        training_classes, test_classes: int64 (n,).
    """

    name: str
    training: Tensor
    training_classes: Tensor
    test: Tensor
    test_classes: Tensor


def digits() -> Images:
    """Return scikit-learn's digits; every fifth is for the test."""
    data: Any = _sklearn().load_digits()
    return _split("digits", torch.tensor(data.images, dtype=torch.float32)[:, None], torch.tensor(data.target).long())


def patches() -> Images:
    """Return squares of scikit-learn's two photographs; every fifth is for the test, and no two overlap."""
    squares: list[np.ndarray] = []
    classes: list[int] = []
    for number, photograph in enumerate(_sklearn().load_sample_images().images):
        height, width, _ = photograph.shape
        for top in range(0, height - _PATCH + 1, _PATCH):
            for left in range(0, width - _PATCH + 1, _PATCH):
                squares.append(photograph[top : top + _PATCH, left : left + _PATCH].transpose(2, 0, 1))
                classes.append(number * _COLUMNS + (left + _PATCH // 2) * _COLUMNS // width)
    return _split("patches", torch.tensor(np.stack(squares), dtype=torch.float32), torch.tensor(classes))


COLLECTIONS: dict[str, Callable[[], Images]] = {"digits": digits, "patches": patches}


def _sklearn() -> Any:
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise FewbitError(
            "the images come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    return datasets


def _split(name: str, images: Tensor, classes: Tensor) -> Images:
    # In an order that has nothing to do with the classes, and is the same everywhere.
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    images, classes = images[order], classes[order]
    test = torch.arange(len(images)) % _TEST_EVERY == 0
    dims = (0, 2, 3)
    mean, deviation = images[~test].mean(dims, keepdim=True), images[~test].std(dims, keepdim=True)
    images = (images - mean) / deviation
    return Images(name, images[~test], classes[~test], images[test], classes[test])
