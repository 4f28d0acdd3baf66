"""Memory that a gated MLP keeps for backward, a bar per method, in tensors of tokens × intermediate."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from .style import CYCLE, GREY, INK, entitle, style_axes


@dataclass(frozen=True)
class Kept:
    """Memory kept by one method.

    Attributes:
        name: name of the method.
        units: memory kept besides the block's input, in tensors of tokens × intermediate.
        of_input: memory kept of the block's input, in the same unit.
        measured: whether the numbers were measured, not computed by a formula.
    """

    name: str
    units: float
    of_input: float
    measured: bool = True


def plot_memory(methods: Sequence[Kept], title: str) -> Figure:
    """Return horizontal bars, the first method on top; the grey end of each is the memory kept of the input."""
    figure = Figure(figsize=(8, 1.2 + 0.42 * len(methods)), layout="constrained")
    axes = figure.subplots()
    style_axes(axes)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    entitle(figure, _message(methods))
    for row, method in enumerate(methods):
        hatch = None if method.measured else "///"
        axes.barh(row, method.units, color=CYCLE[0], hatch=hatch, edgecolor="white", height=0.66)
        axes.barh(row, method.of_input, left=method.units, color=GREY, alpha=0.5, height=0.66)
        axes.text(method.units + method.of_input + 0.04, row, f"{method.units:.2f}", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(methods)), [method.name for method in methods], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("tensors of tokens × intermediate; grey: the block's input", fontsize=9, color=INK)
    return figure


def _message(methods: Sequence[Kept]) -> str:
    first, *others = methods
    kept = [method for method in others if method.units]  # the rest compute all again
    if not kept:
        return f"{first.name} keeps {first.units:.2f} tensors beside the input"
    least = min(kept, key=lambda method: method.units)
    return f"Beside the input {least.name} keeps {least.units:.2f} tensors, {first.name} {first.units:.2f}"
