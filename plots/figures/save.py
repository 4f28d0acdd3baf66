"""Saving of figures: atomic, in the format given by the file's suffix."""

import os
from pathlib import Path

from matplotlib.figure import Figure

from ...tables.errors import FewbitError
from ...tables.files import atomic_write, check_writable

FORMATS = ("png", "svg", "pdf")
_DPI = 200


def check_figure_path(path: str | os.PathLike[str]) -> str:
    """Return the format for a figure saved at `path`; writes nothing.

    Raises:
        FewbitError: the suffix is not one of `FORMATS`, or the file could not be written.
    """
    suffix = Path(path).suffix
    accepted = ", ".join(f".{name}" for name in FORMATS)
    if suffix[1:].lower() not in FORMATS:
        problem = f"has the suffix {suffix}" if suffix else "has no suffix"
        raise FewbitError(f"cannot save a figure as {os.fspath(path)}: the name {problem}; accepted: {accepted}")
    check_writable(path)
    return suffix[1:].lower()


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write `figure` to `path` atomically.

    Raises:
        FewbitError: as for `check_figure_path`, or the disk is full.
    """
    kind = check_figure_path(path)
    # No date in the file: the same figure always gives the same bytes.
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with atomic_write(path) as stream:
        figure.savefig(stream, format=kind, dpi=_DPI, metadata=undated)
