"""Tables into files: the options that `fewbit solve` and `fewbit emit` share, and the checks before any work."""

from pathlib import Path

from ..tables import FewbitError
from ..tables.exporters import EXPORTERS, format_of
from ..tables.files import check_writable

# cuda is named so that asking for it is answered; there is no exporter of that name.
FORMATS = (*EXPORTERS, "cuda")


def choose_format(path: Path | None, file_format: str | None) -> str:
    """Return the format to write: `file_format` if given, else the one that the name of `path` asks for.

    Raises:
        FewbitError: there is no such exporter, or `path` tells no format or cannot be written.
    """
    if file_format == "cuda":
        raise FewbitError(f"cuda is written by the CUDA kernels, which this fewbit lacks; use {', '.join(EXPORTERS)}")
    if path is None:
        if file_format is None:
            raise FewbitError(f"say what to write: --target {'|'.join(EXPORTERS)}, or -o FILE")
        return file_format
    chosen = file_format or format_of(path)
    check_writable(path)
    return chosen
