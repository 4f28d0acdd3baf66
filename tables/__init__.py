"""The `Table`, its files and the shipped tables: the lowest layer of the package. NumPy only.

Names are imported when they are first used: `fewbit --help` and an error need no NumPy, which takes longest to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import FewbitError
    from .shipped import DEFAULT_WEIGHT, load_table
    from .table import DETERMINISTIC, KINDS, Kind, Table

__all__ = ["DEFAULT_WEIGHT", "DETERMINISTIC", "KINDS", "FewbitError", "Kind", "Table", "load_table"]
_HOMES = {
    "FewbitError": ".errors",
    **dict.fromkeys(("DEFAULT_WEIGHT", "load_table"), ".shipped"),
    **dict.fromkeys(("DETERMINISTIC", "KINDS", "Kind", "Table"), ".table"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
