"""The text to train on: the source of Python's own standard library, which any machine with Python has.

    training    the modules in alphabetical order but for every tenth
    validation  every tenth module: files of which nothing is trained on

A character is its ASCII code; the few characters beyond ASCII become "?". So the vocabulary is 128 on every machine,
while the text itself is that of the Python at hand.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...tables import FewbitError

VOCABULARY = 128
CHARACTERS = 2_500_000  # of all files together; every current Python has more, so that this is the size everywhere
_VALIDATION_EVERY = 10  # files


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


def unigram_entropy(text: Tensor) -> float:
    """Return the entropy of a character of `text` in nats: the loss of who knows how often each occurs, and no more."""
    counts = torch.bincount(text, minlength=VOCABULARY).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def _encode(files: Iterable[Path], characters: int) -> Tensor:
    text = "".join(path.read_text("utf-8", errors="replace") for path in files)[:characters]
    return torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
