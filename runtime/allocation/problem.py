"""Prob. (10) of ActNN: the numbers of bits that minimize the gradient's variance under a budget.

    min Σ_i w_i / (2^b_i − 1)²     subject to     Σ_i D_i b_i ≤ budget,  b_i from 1 to 8

An item i is one sample at one layer, w_i its sensitivity (the variance that it causes at 1 bit) and D_i its elements.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...tables import FewbitError
from ...tables.errors import shown

LEAST, MOST = 1, 8
# Variance at b bits relative to 1 bit.
LEFT = 1 / (2.0 ** np.arange(LEAST, MOST + 1) - 1) ** 2


@dataclass(frozen=True)
class Problem:
    """An instance of Prob. (10), its items in one row.

    Attributes:
        w: sensitivities, float64 (items,).
        D: elements, int64 (items,).
        budget: most bits to spend; from Σ D to 8·Σ D.
        shape: of the solution.
    """

    w: np.ndarray
    D: np.ndarray
    budget: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, sensitivity: Any, elements: Any, budget: float) -> "Problem":
        """Return the problem of arrays that broadcast, such as (L, N) and (L, 1).

        Raises:
            FewbitError: a sensitivity is negative or not finite, a number of elements is not a positive integer, or
                the budget does not suffice for 1 bit each.
        """
        try:
            w, D = np.broadcast_arrays(np.asarray(sensitivity, np.float64), np.asarray(elements))
        except (TypeError, ValueError) as error:
            raise FewbitError(f"sensitivities and elements do not go together: {error}") from None
        if not np.issubdtype(D.dtype, np.integer) or (D.size and D.min() < 1):
            raise FewbitError(f"numbers of elements are integers from 1 on, not {shown(elements)}")
        if not (np.isfinite(w) & (w >= 0)).all():
            raise FewbitError("sensitivities are finite and not negative; one of those given is neither")
        total = int(D.sum(dtype=np.int64))
        if not total <= budget < np.inf:  # NaN too
            raise FewbitError(f"1 bit for each of {total} elements takes {total} bits, the budget is {shown(budget)}")
        return cls(w.ravel(), D.ravel().astype(np.int64), min(int(budget), MOST * total), w.shape)


def variance(sensitivity: Any, bits: Any) -> float:
    """Return Σ w / (2^b − 1)² of arrays that broadcast: what Prob. (10) minimizes.

    Example:
        fewbit.allocation.variance([9.0, 1.0], [4, 2])
    """
    return float((np.asarray(sensitivity, np.float64) / (2.0 ** np.asarray(bits, np.float64) - 1) ** 2).sum())
