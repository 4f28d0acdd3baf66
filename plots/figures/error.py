"""Error against bits for every activation and both kinds of table, with the gap to the lower bound.

The upper panel shows the errors, each with a band down to its lower bound: no table lies below the band. Where the band
is too thin to see, the lower panel shows its relative width: (error − bound) / error.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ...tables import KINDS, Table
from ...tables.names import counted
from .style import CYCLE, GREY, INK, MARKERS, entitle, shortened, style_axes

LINE_STYLES: dict[str, Literal["--", "-", ":"]] = {"interval": "--", "shared": "-", "stochastic": ":"}
# Quadratures differ in their last digits: below this gap, error and bound are equal to rounding.
LEAST_GAP = 1e-12
GOAL = 1e-6  # relative gap to the lower bound that every shipped table must reach


class _Line(NamedTuple):
    kind: str
    label: str
    look: dict[str, Any]
    tables: list[Table]  # by bits


def plot_error(tables: Sequence[Table]) -> Figure:
    """Return a figure of error (log scale) against bits: a colour and marker per activation, a line style per kind.

    Exact tables cannot be drawn on a log scale: a line of text lists them.
    """
    inexact = [table for table in tables if table.error > 0]
    bounded = [table for table in inexact if table.lower_bound is not None]
    figure = Figure(figsize=(7.4, 6.2 if bounded else 4.6), layout="constrained", facecolor="white")
    count = 2 if bounded else 1
    bits = sorted({t.bits for t in inexact or tables})
    grid = figure.subplots(count, 1, squeeze=False, sharex=True, height_ratios=(3.0, 1.3)[:count])
    panels: list[Axes] = grid[:, 0].tolist()
    for axes in panels:
        style_axes(axes)
    panels[0].set_ylabel(r"error  $\int\,(f'(x) - q(x))^2\,w(x)\,dx$", fontsize=10.5, color=INK)
    panels[-1].set_xlabel("bits per element", fontsize=10.5, color=INK)
    panels[-1].set_xticks(bits)
    panels[-1].set_xlim(bits[0] - 0.35, bits[-1] + 0.35)
    title = ", ".join(dict.fromkeys(f"weight {shortened(t.weight, 60)}" for t in tables))
    panels[0].set_title(title, fontsize=9.5, color=INK)
    note = exact_note(tables)
    if not inexact:
        panels[0].set_axis_off()
        panels[0].text(0.5, 0.5, note, ha="center", va="center", fontsize=11, color=INK, transform=panels[0].transAxes)
        return figure
    lines = list(_lines(inexact))
    entitle(figure, _message(lines))
    _draw_errors(panels[0], lines)
    _add_legends(panels[0], lines)
    if bounded:
        _draw_gaps(panels[1], lines)
    if note:
        figure.supxlabel(note, fontsize=9, color=INK)
    return figure


def exact_note(tables: Sequence[Table]) -> str:
    """Return a line that lists the activations with exact tables and the fewest bits of each, or an empty text."""
    fewest: dict[str, int] = {}
    for table in tables:
        if table.error == 0:
            fewest[table.activation] = min(table.bits, fewest.get(table.activation, table.bits))
    parts = [f"{name} from {counted(bits, 'bit')}" for name, bits in fewest.items()]
    return f"exact (error 0): {', '.join(parts)}" if parts else ""


def gap(table: Table) -> float:
    """Return (error − lower bound) / error, at least `LEAST_GAP` to be finite on a log scale."""
    bound = table.error if table.lower_bound is None else table.lower_bound
    return max(1 - bound / table.error, LEAST_GAP)


def _message(lines: Sequence[_Line]) -> str:
    """Say by how much a bit divides the error, over the lines of more than one table: on average, and single bits."""
    ends = [(line.tables[0], line.tables[-1]) for line in lines if len(line.tables) > 1]
    if not ends:
        return "The error of tables"
    average = _range(map(_factor, *zip(*ends, strict=True)))
    single = _range(_factor(*pair) for line in lines for pair in pairwise(line.tables))
    return f"A bit divides the error by {average}" + (
        "" if average == single else f" on average, single bits by {single}"
    )


def _factor(few: Table, more: Table) -> float:
    """Return by how much a bit divides the error, from one table to another of more bits."""
    return (few.error / more.error) ** (1 / (more.bits - few.bits))


def _range(factors: Iterable[float]) -> str:
    low, high = (f"{factor:.1f}" for factor in itemgetter(0, -1)(sorted(factors)))
    return low if low == high else f"{low} to {high}"


def _lines(tables: Sequence[Table]) -> Iterator[_Line]:
    """Yield the lines, those of the activations in the order of their right ends, top to bottom."""
    last: dict[str, tuple[int, float]] = {}
    for table in tables:
        last[table.activation] = max(last.get(table.activation, (0, 0.0)), (table.bits, table.error))
    for index, name in enumerate(sorted(last, key=lambda name: last[name][1], reverse=True)):
        # Colours repeat after eight and markers shift by one then, so styles are distinct up to 64 activations.
        marker = MARKERS[(index + index // len(CYCLE)) % len(MARKERS)]
        look = {"color": CYCLE[index % len(CYCLE)], "marker": marker, "markersize": 5.5, "linewidth": 1.4}
        for kind in KINDS:
            line = sorted((t for t in tables if (t.activation, t.kind) == (name, kind)), key=lambda t: t.bits)
            if line:
                yield _Line(kind, name, look, line)


def _draw_errors(axes: Axes, lines: Sequence[_Line]) -> None:
    axes.set_yscale("log")
    for line in lines:
        bits, errors = [t.bits for t in line.tables], [t.error for t in line.tables]
        bounds = [t.error * (1 - gap(t)) for t in line.tables]
        # A bound of 0 carries no information and cannot be drawn on a log scale: the band then ends a decade below.
        bounds = [max(b, e / 10) for b, e in zip(bounds, errors, strict=True)]
        axes.fill_between(bits, bounds, errors, color=line.look["color"], alpha=0.25, linewidth=0)
        axes.vlines(bits, bounds, errors, color=line.look["color"], alpha=0.5, linewidth=1.2)
        axes.plot(
            *(bits, errors),
            **line.look,
            linestyle=LINE_STYLES[line.kind],
            # Where both kinds are equal (a monotone f') the shared line is visible inside the open marker.
            markerfacecolor="white" if line.kind == "interval" else None,
            label=f"{line.label} {line.kind}",
        )


def _draw_gaps(axes: Axes, lines: Sequence[_Line]) -> None:
    axes.set_yscale("log")
    axes.set_ylabel("relative gap\nto the lower bound", fontsize=10.5, color=INK)
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    known = [gap(table) for line in lines for table in line.tables if table.lower_bound is not None]
    axes.set_ylim(min(0.1 * GOAL, 0.5 * min(known)), max(10 * GOAL, min(1.0, 2 * max(known))))
    for line in lines:
        bounded = [table for table in line.tables if table.lower_bound is not None]
        axes.plot(
            [table.bits for table in bounded],
            [gap(table) for table in bounded],
            **{**line.look, "markersize": 4, "linewidth": 1.0},
            linestyle=LINE_STYLES[line.kind],
            markerfacecolor="white" if line.kind == "interval" else None,
        )
    axes.axhline(GOAL, color=GREY, linewidth=1.0, linestyle=":", zorder=1)
    beside = axes.get_yaxis_transform()
    axes.text(1.01, GOAL, "a millionth", transform=beside, va="center", fontsize=9, color=INK)
    axes.yaxis.set_major_formatter(FuncFormatter(_gap_label))


def _gap_label(value: float, _: int) -> str:
    return f"{100 * value:g} %" if value >= 1e-4 else f"{value:.0e}".replace("e-0", "e-")


def _add_legends(axes: Axes, lines: Sequence[_Line]) -> None:
    looks = {line.label: line.look for line in lines}
    names = [Line2D([], [], **look, label=shortened(name, 24)) for name, look in looks.items()]
    kinds: list[Artist] = [
        Line2D([], [], color=INK, linewidth=1.4, linestyle=LINE_STYLES[kind], label=kind)
        for kind in KINDS
        if any(line.kind == kind for line in lines)
    ]
    if any(table.lower_bound is not None for line in lines for table in line.tables):
        kinds.append(Patch(color=INK, alpha=0.25, linewidth=0, label="down to the lower bound"))
    look = {"fontsize": 9.5, "labelcolor": INK, "handlelength": 2.6, "framealpha": 1.0, "edgecolor": "none"}
    # Errors decrease with the bits, so the upper right corner is free for the legend of kinds.
    axes.add_artist(axes.legend(handles=kinds, loc="upper right", **look))
    axes.legend(handles=names, loc="upper left", bbox_to_anchor=(1.0, 1.0), **look)
