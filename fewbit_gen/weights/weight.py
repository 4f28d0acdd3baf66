"""The weight function itself."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Further out, sums in double precision lose the contribution of f' near zero beside the mass far away.
FURTHEST = 1e9


@dataclass(frozen=True)
class Weight:
    """A weight function with the finite interval outside which it is zero, or negligible.

    Attributes:
        spec: canonical text, such as ``uniform:-10,10``. `parse_weight` reads it back, except for a measured weight,
            which is identified by its content: ``histogram:200 bins,0123456789abcdef``.
        domain: (A, B), finite, A < B.
        density: w, float64 to float64, elementwise, within the domain.
        breakpoints: points inside the domain where w jumps, bends or changes its scale, increasing; w is smooth
            between them.
        mass: ∫ w dx. Uniform is 1 on [A, B], as in the paper's Table 3, and has mass B − A; all others have mass 1.
    """

    spec: str
    domain: tuple[float, float]
    density: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    breakpoints: tuple[float, ...] = ()
    mass: float = 1.0
