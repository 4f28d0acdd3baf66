"""Export of tables: options and early checks shared by `fewbit solve` and `fewbit emit`."""

from pathlib import Path
from typing import Literal, cast

from ..tables import FewbitError, Table
from ..tables.exporters import EXPORTERS, check_holds, export, format_of
from ..tables.files import atomic_write, check_writable

FORMATS = (*EXPORTERS, "cuda")
_CUDA_SUFFIXES = {".cuh": "cuda", ".cu": "cuda"}
Bisect = Literal["bisect"]


def choose_format(path: Path | None, file_format: str | None, kind: str) -> str:
    """Return the format to write a table of `kind` in: `file_format` if given, else that of the suffix of `path`.

    Raises:
        FewbitError: the suffix of `path` is unknown, `path` cannot be written, neither is given, or the format holds
            no table of `kind`: told before such a table is solved.
    """
    if path is None and file_format is None:
        raise FewbitError(f"say what to write: --target {'|'.join(FORMATS)}, or -o FILE")
    chosen = file_format or format_of(cast(Path, path), _CUDA_SUFFIXES)
    check_holds(chosen, kind)
    if path is not None:
        check_writable(path)
    return chosen


def table_bytes(table: Table, file_format: str, search: Bisect | None = None) -> bytes:
    """Return the content of a file with `table`, in one of `FORMATS`.

    Args:
        table: the table.
        file_format: one of `FORMATS`.
        search: of the CUDA kernels, for a code; None: the cheapest way that the table allows.
    """
    if file_format != "cuda":
        return export(table, file_format)
    from ..runtime.backends.cuda.codegen import cuda_header, function_of

    return cuda_header(table, *function_of(table.activation), search=search).encode()


def write_table(table: Table, path: Path, file_format: str, search: Bisect | None = None) -> None:
    """Write `table` to `path` atomically, in one of `FORMATS`; raises `FewbitError` if that fails."""
    content = table_bytes(table, file_format, search)
    with atomic_write(path) as stream:
        stream.write(content)
