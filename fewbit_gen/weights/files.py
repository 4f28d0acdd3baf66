"""Measured weights in files: samples (.npy, .txt, .csv) or a histogram (.npz, .json).

Files are treated as data only: no pickles, no code execution, and a size limit.
"""

import json
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...tables.errors import FewbitError, shown
from ...tables.files import reason
from .measured import histogram, samples
from .weight import Weight

# A billion bytes of doubles can be sorted in seconds and fit in memory twice.
_MOST_BYTES = 1_000_000_000
_MOST_JSON_BYTES = 16_000_000

# Exceptions of zipfile and NumPy for an archive that is damaged, encrypted, compressed in an unknown way or pickled.
_BROKEN_ARCHIVE = (
    *(ValueError, EOFError, SyntaxError, TypeError, KeyError, RuntimeError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)


def read_weight(path: str | os.PathLike[str]) -> Weight:
    """Return the weight in the file `path`, in the format of its suffix; its `spec` identifies its content.

    Raises:
        FewbitError: the file cannot be read or contains no weight; the message begins with its name.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    name = shown(str(path))
    if reader is None:
        raise FewbitError(f"{name}: a weight is in a file named {', '.join(READERS)}")
    try:
        _check_size(path, _MOST_BYTES)
        return reader(path)
    except FewbitError as error:
        raise FewbitError(f"{name}: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise FewbitError(f"cannot read {name}: {reason(error)}") from None
    except MemoryError:
        raise FewbitError(f"{name}: larger than this machine's memory") from None


def _check_size(path: Path, most: int) -> None:
    size = path.stat().st_size
    if not path.is_file():
        raise FewbitError("not a file")
    if size > most:
        raise FewbitError(f"larger than {most} bytes: thin the samples, or make the histogram coarser")


def _npy(path: Path) -> Weight:
    try:
        x = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, SyntaxError, TypeError) as error:
        raise FewbitError(f"not an array of numbers: {_line(error)}") from None
    return samples(x)


def _text(path: Path) -> Weight:
    try:
        # Opened here: NumPy would treat some names as URLs and others as compressed files.
        with open(path, encoding="utf-8-sig") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # empty content is reported below
            x = np.loadtxt(stream, dtype=np.float64, delimiter=",", ndmin=2)
    except ValueError as error:
        raise FewbitError(f"not one number a line: {_line(error)}") from None
    if x.shape[1] != 1:
        raise FewbitError(f"not one number a line: {x.shape[1]} on each")
    return samples(x)


def _npz(path: Path) -> Weight:
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > _MOST_BYTES:
            raise FewbitError(f"unpacks to more than {_MOST_BYTES} bytes")
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in ("edges", "counts") if name in content}
    except FewbitError:
        raise
    except _BROKEN_ARCHIVE as error:
        raise FewbitError(f"not an archive of arrays of numbers: {_line(error)}") from None
    missing = {"edges", "counts"} - set(arrays)
    if missing:
        raise FewbitError(f"the archive lacks {' and '.join(sorted(missing))}: a histogram has edges and counts")
    return histogram(**arrays)


def _json(path: Path) -> Weight:
    _check_size(path, _MOST_JSON_BYTES)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FewbitError(f"not JSON: {_line(error)}") from None
    if not isinstance(content, dict) or not {"edges", "counts"} <= set(content):
        raise FewbitError('not a histogram: expected {"edges": [...], "counts": [...]}')
    return histogram(content["edges"], content["counts"])


READERS: dict[str, Callable[[Path], Weight]] = {
    ".npy": _npy,
    ".txt": _text,
    ".csv": _text,
    ".npz": _npz,
    ".json": _json,
}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
