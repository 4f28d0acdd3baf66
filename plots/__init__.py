"""Matplotlib figures: functions from data to a `Figure`, without pyplot, global state or a display."""

from .figures.approximation import plot_approximation
from .figures.error import plot_error
from .figures.gallery import plot_gallery
from .figures.kinds import plot_kinds
from .figures.panel import Approximated
from .figures.save import FORMATS, check_figure_path, save_figure

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
