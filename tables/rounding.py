"""float64 numbers as floats, rounded so that comparisons and products come out as they must."""

import numpy as np
from numpy.typing import NDArray


def nearest_float(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the float nearest to each value: infinity beyond the floats, as the hardware has it."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float32)


def float_below(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float that is not above each value: −∞ below the floats.

    Then x > value holds for a float x exactly where x > float does.
    """
    nearest = nearest_float(values)
    with np.errstate(over="ignore", under="ignore"):
        below = np.nextafter(nearest, np.float32(-np.inf))
    return np.where(nearest > values, below, nearest)
