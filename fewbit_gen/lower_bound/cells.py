"""The line that a table cuts: the x axis for kind `interval`, the axis of the values g of f' for `shared`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..crossings import near, sums_by_value
from ..moments import Moments
from ..monge import prefix

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Cells:
    """Moments and ranges between neighbouring points of the line.

    Attributes:
        prefix: (3, n + 1) integrals of w, gw and g²w from the first point to every point.
        low, high: (n,) bounds of g in each cell.
        monotone: (n,) whether g goes monotonically from one of these to the other.
    """

    prefix: Vector
    low: Vector
    high: Vector
    monotone: Mask


def interval_cells(moments: Moments, points: Vector) -> Cells:
    """Return cells of the x axis."""
    inner = 0.5 * (points[:-1] + points[1:])
    quarters = np.stack([np.nextafter(points[:-1], np.inf), 0.5 * (points[:-1] + inner), inner,
                         0.5 * (inner + points[1:]), points[1:]])  # fmt: skip
    g = moments.centred(quarters)
    steps = np.diff(g, axis=0)
    monotone = np.logical_or((steps >= 0).all(axis=0), (steps <= 0).all(axis=0))
    low, high = g.min(axis=0), g.max(axis=0)
    beyond = np.where(monotone, 0.0, high - low)  # a turn between samples goes no further
    return Cells(prefix(moments.between(points)), low - beyond, high + beyond, monotone)


def shared_cells(moments: Moments, points: Vector) -> Cells:
    """Return cells of the axis of values g; x belongs to the cell that contains g(x)."""
    *_, per_cell = sums_by_value(moments, points[1:-1], near(moments))
    return Cells(prefix(per_cell), points[:-1], points[1:], np.ones(points.size - 1, dtype=np.bool_))
