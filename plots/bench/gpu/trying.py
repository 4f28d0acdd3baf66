"""What a check says: the calls that it tries, each with its result or its error in a line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Said = Iterator[dict[str, Any]]


def tried(found: dict[str, Any], name: str, call: Callable[[], Any]) -> dict[str, Any]:
    """Return what is found with the result of one more call: what it says, or its error in a line."""
    try:
        said = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found[name] = said if isinstance(said, dict) else "ok"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {"ok": is_right(found), **found}


def is_right(found: Mapping[str, Any]) -> bool:
    """Return whether all calls ended, and all that they say is true."""
    said: Sequence[Any] = [value for name, value in found.items() if name != "warnings"]
    return all(
        value == "ok" or (isinstance(value, dict) and all(part is not False for part in value.values()))
        for value in said
    )
