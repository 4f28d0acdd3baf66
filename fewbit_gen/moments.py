"""The cost of a table: weighted moments of f' by Gauss–Legendre quadrature (paper, Appendix G).

    W = ∫ w dx      FW = ∫ g w dx      F² = ∫ g² w dx      with g = f' − centre

over the cells of a grid. An interval then costs F² − FW²/W, for every solver. f' is centred at its weighted mean
because the cost is a difference: the contributions of the mean to F² and FW²/W would cancel and lose digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..tables import Table
from ..tables.errors import FewbitError
from .activations import Activation
from .effort import check
from .grid import UNSEEN, evaluate_derivative, quadrature, resolved_grid
from .monge import prefix
from .weights import Weight

Vector = NDArray[np.float64]

# Cells of the solvers' grids: enough to find the right basin; refinement finds the minimum. `shared` and `stochastic`
# sort the values of f' and take n log n, `interval` n².
INTERVAL_CELLS, CELLS_PER_LEVEL, SHARED_CELLS = 4096, 32, 16384
_PIECE = 1 << 19  # points at which f' is evaluated between two checks of the clock
_MASS = 1e-6  # tolerance for the mass of a weight


@dataclass(frozen=True)
class Moments:
    """Moments of one activation's derivative under one weight, cell by cell.

    Attributes:
        activation, weight: the problem.
        edges: (n + 1,) the grid.
        centre: the constant subtracted from f'.
        cells: (3, n) rows W, FW and F² of every cell.
        prefix: (3, n + 1) their integrals from edges[0] to every edge.
        unseen: the error that the grid may miss in a cell: grid.py.
        spread: the largest |f' − centre|, or |f'| if that overflows.
        two_sided: whether `between` sums what is right of the middle of the mass from the right end: reflection.py.
    """

    activation: Activation
    weight: Weight
    edges: Vector
    centre: float
    cells: Vector
    prefix: Vector
    unseen: float = UNSEEN
    spread: float = 1.0
    two_sided: bool = False

    @staticmethod
    def of(
        activation: Activation,
        weight: Weight,
        cells: int,
        order: int = 8,
        unseen: float = UNSEEN,
        two_sided: bool = False,
    ) -> Moments:
        """Integrate over `cells` cells with `order` nodes in each.

        Raises:
            FewbitError: f' is not finite somewhere on the domain, or the weight does not have its nominal mass.
        """
        edges = resolved_grid(activation, weight, cells, order, unseen)
        x, dx = quadrature(edges[:-1], edges[1:], order)
        derivative = evaluate_derivative(activation, x)
        mass = weight.density(x) * dx
        total = mass.sum()
        if not abs(total - weight.mass) <= _MASS * weight.mass:
            raise FewbitError(f"the weight {weight.spec} holds no mass that double precision could integrate")
        with np.errstate(over="ignore", invalid="ignore"):  # f' beyond 1e150: the solver scales it
            centre = float((derivative * mass).sum() / total)
            moments = _cell_moments(derivative - centre, mass)
            spread = float(np.abs(derivative - centre).max())
            sums = prefix(moments)  # in extended precision where there is some: solvers take their differences
        spread = spread if np.isfinite(spread) else float(np.abs(derivative).max())
        return Moments(activation, weight, edges, centre, moments, sums, unseen, spread, two_sided)

    @cached_property
    def cell_ends(self) -> Vector:
        """(2, n) both ends of each cell, inside the cell: at a kink f' differs from the neighbour's."""
        return np.stack([np.nextafter(self.edges[:-1], np.inf), self.edges[1:]])

    @cached_property
    def at_cell_ends(self) -> Vector:
        """(2, n) g there."""
        return self.centred(self.cell_ends)

    @property
    def rounding(self) -> float:
        """Return what rounding may make of a table's error, a difference of such sums: some last digits of ∫ g²."""
        return 1e-15 * self.prefix[2, -1]

    def centred(self, x: Vector) -> Vector:
        """Return g(x) = f'(x) − centre."""
        pieces = _in_pieces(lambda piece: evaluate_derivative(self.activation, piece) - self.centre, x.ravel(), _PIECE)
        return pieces.reshape(x.shape)

    def between(self, points: Vector) -> Vector:
        """Return W, FW and F² between consecutive `points`, an array (3, len(points) − 1).

        Args:
            points: increasing, within the domain; they need not be grid points.
        """
        sums = np.diff(_in_pieces(self._up_to, points, _PIECE // 8), axis=1)
        if not self.two_sided:
            return sums
        right = -np.diff(_in_pieces(self._from, points, _PIECE // 8), axis=1)
        middle = self.edges[np.searchsorted(self.prefix[0], 0.5 * self.prefix[0, -1])]
        return np.where(points[:-1] >= middle, right, sums)

    def step(self, points: Vector) -> Vector:
        """Return the step for estimating the slope of f' at each point: smaller where cells are narrow."""
        cell = np.clip(np.searchsorted(self.edges, points, side="right") - 1, 0, self.edges.size - 2)
        width = self.edges[cell + 1] - self.edges[cell]
        near = np.minimum(1e-6 * min(self.activation.reach, self.edges[-1] - self.edges[0]), 0.05 * width)
        return np.maximum(near, 1e-300)  # a cell may be as narrow as the smallest double

    def error(self, table: Table) -> tuple[float, float]:
        """Return the error of a table of this problem, a difference of moments, and a bound of its rounding error."""
        fence = np.clip(table.boundaries, *self.edges[[0, -1]])
        w, fw, f2 = self.between(np.concatenate([self.edges[:1], fence, self.edges[-1:]]))
        level = table.levels[table.codes] - self.centre
        if table.kind == "stochastic":
            above = table.levels[np.minimum(table.codes.astype(np.intp) + 1, table.levels.size - 1)] - self.centre
            error = float(((level + above) * fw - level * above * w - f2).sum())
            level = np.maximum(np.abs(level), np.abs(above))
        else:
            error = float((f2 - 2 * level * fw + level * level * w).sum())
        # Each moment is the difference of sums from the first edge on, which may be far larger: where nearly all mass
        # is to the left of the region where f' varies, their last digits are lost.
        mass, _, square = self._up_to(np.append(fence, self.edges[-1]))
        lost = (np.abs(level) * np.sqrt(mass) + np.sqrt(np.maximum(square, 0.0))) ** 2
        return error, 4 * np.finfo(float).eps * float(lost.sum())

    def _up_to(self, points: Vector) -> Vector:
        """Return (3, n) W, FW and F² from the first edge to every point."""
        cell = np.clip(np.searchsorted(self.edges, points, side="right") - 1, 0, self.edges.size - 2)
        x, dx = quadrature(self.edges[cell], points, 8)
        return self.prefix[:, cell] + _cell_moments(self.centred(x), self.weight.density(x) * dx)

    @cached_property
    def _suffix(self) -> Vector:
        """(3, n + 1) the integrals from every edge to the last."""
        return prefix(self.cells[:, ::-1])[:, ::-1]

    def _from(self, points: Vector) -> Vector:
        """Return (3, n) W, FW and F² from every point to the last edge."""
        cell = np.clip(np.searchsorted(self.edges, points, side="left") - 1, 0, self.edges.size - 2)
        x, dx = quadrature(points, self.edges[cell + 1], 8)
        return self._suffix[:, cell + 1] + _cell_moments(self.centred(x), self.weight.density(x) * dx)


def _in_pieces(function: Callable[[Vector], Vector], x: Vector, size: int) -> Vector:
    """Return function(x), whose last axis is that of `x`, evaluated on `size` points at a time.

    Raises:
        OutOfTime: the time limit is reached.
    """
    if x.size <= size:
        return function(x)
    found = []
    for i in range(0, x.size, size):
        check()
        found.append(function(x[i : i + size]))
    return np.concatenate(found, axis=-1)


def _cell_moments(g: Vector, mass: Vector) -> Vector:
    return np.stack([mass.sum(axis=1), (g * mass).sum(axis=1), (g * g * mass).sum(axis=1)])
