"""JSON reading and writing: numbers round-trip to the same bits, and a broken file raises a one-line error."""

import json
import os
from typing import Any

from .errors import FewbitError
from .files import reason

# A table of 256 shared levels takes about 30 kB; a far larger file is not a table.
_MAX_BYTES = 16_000_000


def dumps(value: dict[str, Any]) -> str:
    """Return `value` as indented JSON text with a newline at the end."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the JSON value in the file `path`; raises `FewbitError`, naming the file, if it holds no valid JSON."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise FewbitError(f"cannot read {os.fspath(path)}: {reason(error)}") from None
    if len(content) > _MAX_BYTES:
        raise FewbitError(f"{os.fspath(path)}: larger than {_MAX_BYTES} bytes, so not a table")
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise FewbitError(f"{os.fspath(path)}: not JSON: {why}") from None
