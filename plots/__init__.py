"""Matplotlib figures: functions from data to a `Figure`. No pyplot, no global state, no display."""

from .approximation import plot_approximation
from .error import plot_error
from .gallery import plot_gallery
from .kinds import plot_kinds
from .panel import Approximated
from .save import FORMATS, check_figure_path, save_figure

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
