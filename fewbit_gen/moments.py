"""The cost of a table: weighted moments of f' by Gauss–Legendre quadrature (paper, Appendix G).

    W = ∫ w dx      FW = ∫ g w dx      F² = ∫ g² w dx      with g = f' − centre

over the cells of a grid. An interval then costs F² − FW²/W, whatever the solver. f' is centred at its
weighted mean because the cost is a difference: what the mean contributes to F² and FW²/W would only cancel,
and take digits with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..tables.errors import FewbitError
from .activations import Activation
from .weights import Weight

Vector = NDArray[np.float64]

# Beyond the grid's own; the programmes that cut an axis of more take minutes.
_MOST_ADDED = 100_000


@cache
def _legendre(order: int) -> tuple[Vector, Vector]:
    return np.polynomial.legendre.leggauss(order)


def quadrature(left: Vector, right: Vector, order: int) -> tuple[Vector, Vector]:
    """Return Gauss–Legendre nodes and weights, each (panels, order), on the panels [left_i, right_i]."""
    nodes, weights = _legendre(order)
    half = 0.5 * (right - left)[:, None]
    return left[:, None] + half * (nodes + 1), half * weights


def grid(activation: Activation, weight: Weight, cells: int) -> Vector:
    """Return the edges of a grid over the weight's domain, with every kink of f' and breakpoint of w among them.

    About `cells` equal cells lie within the activation's reach; beyond it f' is constant and fewer will do.
    """
    low, high = weight.domain
    reach = activation.reach
    fence = np.unique(np.clip([low, -reach, reach, high], low, high))
    pieces = [
        np.linspace(a, b, 1 + (cells if -reach <= a and b <= reach else max(1, cells // 16)))
        for a, b in pairwise(fence)
    ]
    breaks = [x for x in (*activation.kinks, *weight.breakpoints) if low < x < high]
    return np.unique(np.concatenate([*pieces, breaks]))


def resolved_grid(activation: Activation, weight: Weight, cells: int, order: int) -> Vector:
    """Return the edges of `grid`, with more where f' is too steep or too narrow for `order` nodes a cell.

    There the integral of f' over a cell is not what f rises by. Where f itself jumps that can be no better in any cell.

    Raises:
        FewbitError: f' varies so fast nearly everywhere that cells would become too many.
    """
    edges = grid(activation, weight, cells)
    if not activation.consistent:
        return edges
    added = [edges]
    left, right = edges[:-1], edges[1:]
    largest = None  # |f'|, beside which the rounding of a vanishing one is nothing
    while left.size:
        x, dx = quadrature(left, right, order)
        with np.errstate(all="ignore"):
            slope = activation.derivative(x)
            ends = activation.function(np.stack([np.nextafter(left, np.inf), right]))
            off = np.abs((slope * dx).sum(axis=1) - (ends[1] - ends[0]))
            size = np.abs(slope)
            if largest is None:
                largest = size.max()
                if not np.isfinite(largest):  # what integrates it refuses it
                    return edges
            room = ((1e-6 * size + 1e-9 * largest + 1e-290) * dx).sum(axis=1) + 1e-11 * np.abs(ends).sum(axis=0)
        middle = 0.5 * (left + right)
        coarse = (off > room) & (middle > left) & (middle < right)  # not where a number is not finite
        added.append(middle[coarse])
        if sum(points.size for points in added[1:]) > _MOST_ADDED:
            where = middle[coarse][0]
            raise FewbitError(
                f"the derivative of {activation.name} varies too fast to be integrated under {weight.spec}, "
                f"for instance near x = {where:g}; give a narrower weight"
            )
        left, right = (
            np.concatenate([left[coarse], middle[coarse]]),
            np.concatenate([middle[coarse], right[coarse]]),
        )
    return np.unique(np.concatenate(added))


@dataclass(frozen=True)
class Moments:
    """Moments of one activation's derivative under one weight, cell by cell.

    Attributes:
        activation, weight: what was integrated.
        edges: (n + 1,) the grid.
        centre: what is subtracted from f'.
        cells: (3, n) rows W, FW and F² of every cell.
        prefix: (3, n + 1) their integrals from edges[0] to every edge.
    """

    activation: Activation
    weight: Weight
    edges: Vector
    centre: float
    cells: Vector
    prefix: Vector

    @staticmethod
    def of(activation: Activation, weight: Weight, cells: int, order: int = 8) -> Moments:
        """Integrate over `cells` cells with `order` nodes in each.

        Raises:
            FewbitError: f' is not finite somewhere on the domain, or the weight holds no mass.
        """
        edges = resolved_grid(activation, weight, cells, order)
        x, dx = quadrature(edges[:-1], edges[1:], order)
        derivative = evaluate_derivative(activation, x)
        mass = weight.density(x) * dx
        total = mass.sum()
        if not total > 0:
            raise FewbitError(f"the weight {weight.spec} holds no mass")
        centre = float((derivative * mass).sum() / total)
        moments = _cell_moments(derivative - centre, mass)
        # Extended precision where the machine has it: the solvers take differences of these sums.
        sums = np.cumsum(moments, axis=1, dtype=np.longdouble).astype(np.float64)
        prefix = np.concatenate([np.zeros((3, 1)), sums], axis=1)
        return Moments(activation, weight, edges, centre, moments, prefix)

    def centred(self, x: Vector) -> Vector:
        """Return g(x) = f'(x) − centre."""
        return evaluate_derivative(self.activation, x) - self.centre

    def between(self, points: Vector) -> Vector:
        """Return W, FW and F² between consecutive `points`, rows of (3, len(points) − 1).

        Args:
            points: increasing, within the domain; they need not lie on the grid.
        """
        cell = np.clip(np.searchsorted(self.edges, points, side="right") - 1, 0, self.edges.size - 2)
        x, dx = quadrature(self.edges[cell], points, 8)
        partial = _cell_moments(self.centred(x), self.weight.density(x) * dx)
        return np.diff(self.prefix[:, cell] + partial, axis=1)


def evaluate_derivative(activation: Activation, x: Vector) -> Vector:
    """Return f'(x), or raise `FewbitError` where it is not finite."""
    with np.errstate(all="ignore"):
        value = activation.derivative(x)
    if not np.isfinite(value).all():
        where = x[~np.isfinite(value)].flat[0]
        raise FewbitError(f"the derivative of {activation.name} is not finite at x = {where:g}")
    return value


def _cell_moments(g: Vector, mass: Vector) -> Vector:
    return np.stack([mass.sum(axis=1), (g * mass).sum(axis=1), (g * g * mass).sum(axis=1)])
