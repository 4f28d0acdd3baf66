"""The `Table`, its files and the shipped tables: the lowest layer of the package. NumPy only."""

from .errors import FewbitError
from .shipped import DEFAULT_WEIGHT, load_table
from .table import DETERMINISTIC, KINDS, Kind, Table

__all__ = ["DEFAULT_WEIGHT", "DETERMINISTIC", "KINDS", "FewbitError", "Kind", "Table", "load_table"]
