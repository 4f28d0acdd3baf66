"""Tables as files for other programs: each exporter turns a `Table` into the bytes of one file.

    json     all fields; `Table.from_json` reads it back
    npz      all fields; `numpy.load` reads it without pickle
    csv      one row an interval
    python   a module without dependencies: encode(x) and q(x)
    c        a C99 header: lookup functions for double and float

Every number is written so that it reads back to the same bits. The same table gives the same bytes.
"""

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import FewbitError, shown
from ..files import atomic_write
from ..json_format import dumps
from ..table import DETERMINISTIC, Table, table_to_dict
from .c_header import c_header
from .csv_rows import csv_rows
from .npz_archive import npz_archive
from .python_module import python_module

EXPORTERS: dict[str, Callable[[Table], bytes]] = {
    "json": lambda table: dumps(table_to_dict(table)).encode(),
    "npz": npz_archive,
    "csv": lambda table: csv_rows(table).encode(),
    "python": lambda table: python_module(table).encode(),
    "c": lambda table: c_header(table).encode(),
}
_OF_ANY_KIND = ("json", "npz", "csv")  # the others hold a function, whose value is that of x alone
SUFFIXES = {".json": "json", ".npz": "npz", ".csv": "csv", ".py": "python", ".h": "c"}


def format_of(path: str | os.PathLike[str], others: dict[str, str] | None = None) -> str:
    """Return the format that the suffix of `path` stands for; raises `FewbitError` if the suffix is not a known one.

    Args:
        path: a file.
        others: further formats by suffix.
    """
    known = SUFFIXES | (others or {})
    suffix = Path(path).suffix.lower()
    if suffix not in known:
        raise FewbitError(f"cannot tell the format of {os.fspath(path)} from its name; accepted: {', '.join(known)}")
    return known[suffix]


def export(table: Table, file_format: str) -> bytes:
    """Return the content of a file that holds `table`.

    Args:
        table: the table.
        file_format: one of `EXPORTERS`.

    Raises:
        FewbitError: `file_format` is not a key of `EXPORTERS`, or holds no table of kind ``stochastic``.
    """
    if file_format not in EXPORTERS:
        raise FewbitError(f"unknown format {shown(file_format)}; accepted: {', '.join(EXPORTERS)}")
    check_holds(file_format, table.kind)
    return EXPORTERS[file_format](table)


def check_holds(file_format: str, kind: str) -> None:
    """Raise `FewbitError` if `file_format` holds no table of `kind`: source code gives one value at x.

    Args:
        file_format: one of `EXPORTERS`, or ``cuda``.
        kind: of a table.
    """
    if kind not in DETERMINISTIC and file_format not in _OF_ANY_KIND:
        raise FewbitError(
            f"a table of kind {kind} has no one value at x, which {file_format} would give: "
            f"export it as {', '.join(_OF_ANY_KIND)}"
        )


def write_export(table: Table, path: str | os.PathLike[str], file_format: str | None = None) -> None:
    """Write `table` to `path` atomically.

    Args:
        table: the table.
        path: the file.
        file_format: one of `EXPORTERS`; None takes the format from the suffix of `path`.

    Raises:
        FewbitError: `file_format` is not a key of `EXPORTERS`, or the file cannot be written.
    """
    content = export(table, format_of(path) if file_format is None else file_format)
    with atomic_write(path) as stream:
        stream.write(content)


__all__ = ["EXPORTERS", "SUFFIXES", "check_holds", "export", "format_of", "write_export"]
