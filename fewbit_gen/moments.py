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
        edges = grid(activation, weight, cells)
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
