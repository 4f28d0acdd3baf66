"""The exact solver for kind `shared`: weighted 1-D k-means of the values of f'.

If intervals may share levels, only the values of f' matter, not their positions. Sorted, they are a line to be cut into
K clusters (monge.py), each with its mean as level.
"""

import numpy as np
from numpy.typing import NDArray

from .moments import Moments
from .monge import FW, W, best_cuts, prefix


def solve_shared(moments: Moments, K: int) -> NDArray[np.float64]:
    """Return at most K levels, centred and increasing, that least-squares fit the mean of f' in every cell.

    Exact over the grid. O(n log n) time and O(n) memory unless costs tie; then O(nK log n) and O(nK).
    """
    w, fw = moments.cells[0], moments.cells[1]
    holds = w > 0
    values = fw[holds] / w[holds]
    order = np.argsort(values, kind="stable")
    values, w = values[order], w[holds][order]
    sums = prefix(np.stack([w, values * w, values * values * w]))
    cuts = best_cuts(sums, min(K, values.size))
    mass, integral = np.diff(sums[[W, FW]][:, cuts], axis=1)
    holds = mass > 0  # a mass is lost beside one 10¹⁶ times larger
    return np.unique(integral[holds] / mass[holds])
