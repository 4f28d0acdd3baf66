"""The certified error of a table, by an independent quadrature."""

import numpy as np
from numpy.typing import NDArray

from ..tables import Table
from .activations import Activation
from .grid import UNSEEN, evaluate_derivative, features, quadrature, resolved_grid, too_fast
from .weights import Weight

Vector = NDArray[np.float64]

_ORDER, _OTHER_ORDER = 32, 21  # of two rules of quadrature, whose difference says how far off both are
# Maximum difference of the two orders on a panel, relative to the error, before the panel is halved.
_APART = 1e-9
_ROUNDING = 8 * np.finfo(float).eps  # of f' near a level
# Halved 53 times, a panel as wide as its ends are far from 0 is down to their last digit.
_MOST_ROUNDS, _MOST_PANELS = 60, 200_000


def table_error(table: Table, activation: Activation, weight: Weight) -> float:
    """Return ∫ (f'(x) − q(x))² w(x) dx over the weight's domain (paper, equation 3); see `integrated_error`.

    For a table of kind ``stochastic`` its mean over the draws.
    """
    return integrated_error(table, activation, weight, table.levels.size)[0]


def integrated_error(
    table: Table, activation: Activation, weight: Weight, K: int, unseen: float = UNSEEN
) -> tuple[float, float]:
    """Return the error of a table, and how much of it the integration grid may have missed: grid.py.

    Gauss–Legendre of order 32 on panels that end at every boundary, every kink and every edge of a grid of
    512 cells, so that the integrand is smooth in each; a panel on which order 21 disagrees is halved. Only squares
    are summed, so that no digits cancel, unlike in the solver's moments.

    Args:
        table: the table; its stored error is ignored.
        activation, weight: the problem.
        K: number of levels that tables of its kind may have.
        unseen: the error that the first grid may miss in a cell: grid.py.

    Returns:
        the error, and the amount that the last grid may miss, which is negligible beside it.

    Raises:
        FewbitError: the two orders do not converge.
    """
    while True:
        error = _integral(table, activation, weight, unseen)
        less = features(activation, weight, unseen).less(error, K)
        if less is None:
            return error, unseen
        unseen = less


def _integral(table: Table, activation: Activation, weight: Weight, unseen: float) -> float:
    """Return the integral on panels that each miss at most `unseen` between their nodes: grid.py."""
    low, high = weight.domain
    inside = table.boundaries[(table.boundaries > low) & (table.boundaries < high)]
    edges = np.union1d(resolved_grid(activation, weight, 512, _ORDER, unseen), inside)
    left, right = edges[:-1], edges[1:]
    within = np.nextafter(left, np.inf) < right  # otherwise the nodes would be the ends
    left, right = left[within], right[within]
    panels, room = _panels(table, activation, weight, left, right, _ORDER)
    total = float(panels.sum())
    agreed = 0.0
    for _ in range(_MOST_ROUNDS):
        off = np.abs(panels - _panels(table, activation, weight, left, right, _OTHER_ORDER)[0])
        middle = 0.5 * (left + right)
        apart = (off > _APART * total + room) & (left < middle) & (middle < right)
        if not apart.any():
            return total
        if 2 * apart.sum() > _MOST_PANELS:
            break
        agreed += float(panels[~apart].sum())
        left, right = (
            np.concatenate([left[apart], middle[apart]]),
            np.concatenate([middle[apart], right[apart]]),
        )
        panels, room = _panels(table, activation, weight, left, right, _ORDER)
        total = agreed + float(panels.sum())
    raise too_fast(activation, weight, float(left[0]))


def _panels(
    table: Table, activation: Activation, weight: Weight, left: Vector, right: Vector, order: int
) -> tuple[Vector, Vector]:
    """Return the integral over every panel, and the error in it due to the rounding of f'."""
    x, dx = quadrature(left, right, order)
    # The middle of a panel determines its levels, so that a node rounded onto a boundary cannot change sides.
    low, high = (level[:, None] for level in table.around(0.5 * (right + left)))
    density = weight.density(x)
    slope = evaluate_derivative(activation, x)
    squares = np.maximum((slope - low) * (high - slope) if table.kind == "stochastic" else (slope - low) ** 2, 0.0)
    squares *= density
    panels = (squares * dx).sum(axis=1)
    rounding = _ROUNDING * np.maximum(np.abs(low), np.abs(high))[:, 0] * np.sqrt((density * dx).sum(axis=1))
    # Nodes are rounded by half a last digit each, which changes the integrand by as much of its range.
    moved = np.ptp(squares, axis=1) * np.spacing(np.maximum(np.abs(left), np.abs(right)))
    with np.errstate(over="ignore"):  # overflow gives no certificate, and the result is rejected
        return panels, rounding * (rounding + 2 * np.sqrt(panels)) + moved
