"""Rounding of float64 to float32 that keeps comparisons and products correct."""

import numpy as np
from numpy.typing import NDArray


def nearest_float(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the float nearest to each value: infinity where it overflows, as in hardware."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float32)


def float_below(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float that is not above each value: −∞ below the range of floats.

    Then x > value holds for a float x exactly where x > float does.
    """
    nearest = nearest_float(values)
    with np.errstate(over="ignore", under="ignore"):
        below = np.nextafter(nearest, np.float32(-np.inf))
    return np.where(nearest > values, below, nearest)
