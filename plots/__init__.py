"""Matplotlib figures: functions from data to a `Figure`. No pyplot, no global state, no display."""

from .approximation import Approximated, plot_approximation
from .error import plot_error
from .save import FORMATS, check_figure_path, save_figure

__all__ = ["FORMATS", "Approximated", "check_figure_path", "plot_approximation", "plot_error", "save_figure"]
