"""Matplotlib figures: functions from data to a `Figure`, without pyplot, global state or a display.

Each is loaded when it is first asked for: benches and studies stand in this package too, and load no matplotlib.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .figures.approximation import plot_approximation
    from .figures.error import plot_error
    from .figures.gallery import plot_gallery
    from .figures.kinds import plot_kinds
    from .figures.panel import Approximated
    from .figures.save import FORMATS, check_figure_path, save_figure

_HOMES = {
    "FORMATS": "save",
    "Approximated": "panel",
    "check_figure_path": "save",
    "plot_approximation": "approximation",
    "plot_error": "error",
    "plot_gallery": "gallery",
    "plot_kinds": "kinds",
    "save_figure": "save",
}

__all__ = [
    "FORMATS",
    "Approximated",
    "check_figure_path",
    "plot_approximation",
    "plot_error",
    "plot_gallery",
    "plot_kinds",
    "save_figure",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".figures.{_HOMES[name]}", __name__), name)
