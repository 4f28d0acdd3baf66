"""A mixture: a weighted sum of several weights."""

import numpy as np
from numpy.typing import NDArray

from ...tables.errors import FewbitError, shown
from ...tables.names import number_text
from .weight import Weight

MOST_PARTS = 10
_SMALLEST_SHARE, _LARGEST_SHARE = 1e-100, 1e100  # the quotient of two is finite
_LEAST_PART = 1e-15  # of the sum of shares: the limit of double precision in sums
# Grid points in each part's domain. Otherwise a narrow part in the domain of a wide one could fall between two
# cells of the grid; for a normal part they lie 3/8 of its deviation apart.
_MARKS = 65


def mixture(*parts: tuple[float, Weight]) -> Weight:
    """Return the weighted sum of densities, each normalized to mass 1, with shares normalized to sum 1.

    >>> mixture((0.7, normal(0, 1)), (0.3, laplace(1, 2))).spec
    '0.7*normal:0,1+0.3*laplace:1,2'

    Args:
        parts: 1 to 10 pairs of a share, above 1e-15 of the sum of shares, and a weight that is not a mixture itself.

    Raises:
        FewbitError: there are no parts or too many, or a part is not such a pair.
    """
    if not 1 <= len(parts) <= MOST_PARTS:
        raise FewbitError(f"a mixture has 1 to {MOST_PARTS} parts, not {len(parts)}")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], Weight)):
            raise FewbitError(f"a part of a mixture is a pair of a share and a Weight, not {shown(part)}")
    shares = [_share(share) for share, _ in parts]
    weights = [weight for _, weight in parts]
    if any("*" in weight.spec for weight in weights):
        raise FewbitError("a part of a mixture cannot be a mixture: give its parts")
    total = sum(shares)
    if min(shares) < _LEAST_PART * total:
        raise FewbitError(
            f"a share of {min(shares):g} beside {max(shares):g} is lost in double precision: leave that part out"
        )
    low, high = min(w.domain[0] for w in weights), max(w.domain[1] for w in weights)
    scaled = [(share / total / w.mass, w) for share, w in zip(shares, weights, strict=True)]

    def density(x: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = np.zeros(np.shape(x))
        for factor, weight in scaled:
            left, right = weight.domain
            # Clipped, because a density need not be defined outside its domain.
            within = (left <= x) & (x <= right)
            sums += np.where(within, factor * weight.density(np.clip(x, left, right)), 0.0)
        return sums

    marks = [np.concatenate([np.linspace(*w.domain, _MARKS), w.breakpoints]) for w in weights]
    inside = [x for x in np.unique(np.concatenate(marks)).tolist() if low < x < high]
    spec = "+".join(f"{number_text(share)}*{w.spec}" for share, w in zip(shares, weights, strict=True))
    return Weight(spec, (low, high), density, tuple(inside))


def _share(value: float) -> float:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not _SMALLEST_SHARE <= value <= _LARGEST_SHARE:
        raise FewbitError(
            f"a share in a mixture must be a number from {_SMALLEST_SHARE:g} to {_LARGEST_SHARE:g}, not {shown(value)}"
        )
    return float(value)
