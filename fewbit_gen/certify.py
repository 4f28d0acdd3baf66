"""The proof that comes with a table: its error by an independent quadrature."""

import numpy as np

from ..tables import Table
from .activations import Activation
from .moments import evaluate_derivative, quadrature, resolved_grid
from .weights import Weight


def table_error(table: Table, activation: Activation, weight: Weight) -> float:
    """Return ∫ (f'(x) − q(x))² w(x) dx over the weight's domain (paper, equation 3).

    Gauss–Legendre of order 32 on panels that end at every boundary, every kink and every edge of a grid of
    512 cells, so that the integrand is smooth in each. Squares are summed, never differences: no digits
    cancel, unlike in the solver's moments.
    """
    low, high = weight.domain
    inside = table.boundaries[(table.boundaries > low) & (table.boundaries < high)]
    edges = np.union1d(resolved_grid(activation, weight, 512, 32), inside)
    left, right = edges[:-1], edges[1:]
    within = np.nextafter(left, np.inf) < right  # else the panel is a rounding, and its nodes are its ends
    left, right = left[within], right[within]
    x, dx = quadrature(left, right, 32)
    # One level a panel: its middle decides, so that a node rounded onto a boundary cannot change sides.
    level = table(0.5 * (right + left))[:, None]
    panels = ((evaluate_derivative(activation, x) - level) ** 2 * weight.density(x) * dx).sum(axis=1)
    return float(panels.sum())
