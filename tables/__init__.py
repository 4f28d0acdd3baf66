"""The ground floor: the `Table`, its files, and the tables that are shipped. NumPy only."""

from .errors import FewbitError
from .shipped import DEFAULT_WEIGHT, load_table
from .table import KINDS, Kind, Table

__all__ = ["DEFAULT_WEIGHT", "KINDS", "FewbitError", "Kind", "Table", "load_table"]
