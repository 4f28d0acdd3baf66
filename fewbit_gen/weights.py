"""Weights w(x) ≥ 0: what is believed of an activation's inputs (equation 4 of the Few-bit Backward paper)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..tables.errors import FewbitError, shown
from ..tables.names import number_text

ACCEPTED = "uniform:A,B with A < B, or normal:MEAN,DEVIATION with DEVIATION > 0"

# Beyond 12 deviations a normal density holds 4e-33 of its mass: below rounding in every integral here.
_NORMAL_REACH = 12.0
_FURTHEST = 1e9


@dataclass(frozen=True)
class Weight:
    """A weight function with the finite interval outside which it is zero (or as good as).

    Attributes:
        spec: canonical text that `parse_weight` reads back, such as ``uniform:-10,10``.
        domain: (A, B), finite, A < B.
        density: w, float64 to float64, elementwise. Uniform is 1 on [A, B], as in the paper's Table 3, and
            so not normalised; normal integrates to 1.
        breakpoints: points inside the domain where w jumps or bends, increasing.
    """

    spec: str
    domain: tuple[float, float]
    density: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    breakpoints: tuple[float, ...] = ()


def uniform(low: float, high: float) -> Weight:
    """w = 1 on [low, high]."""
    if not low < high:
        raise FewbitError(f"the weight uniform:{low:g},{high:g} covers nothing; write {ACCEPTED}")
    return Weight(f"uniform:{number_text(low)},{number_text(high)}", (low, high), lambda x: np.ones_like(x))


def normal(mean: float, deviation: float) -> Weight:
    """The density of the normal distribution."""
    if not deviation > 0:
        raise FewbitError(f"the weight normal:{mean:g},{deviation:g} has no width; write {ACCEPTED}")
    scale = 1 / (deviation * math.sqrt(2 * math.pi))
    reach = _NORMAL_REACH * deviation
    if not (mean - reach < mean + reach and math.isfinite(scale)):
        raise FewbitError(f"the weight normal:{mean:g},{deviation:g} is too narrow for its mean in double precision")
    return Weight(
        f"normal:{number_text(mean)},{number_text(deviation)}",
        (mean - reach, mean + reach),
        lambda x: scale * np.exp(-0.5 * ((x - mean) / deviation) ** 2),
    )


_FAMILIES: dict[str, Callable[[float, float], Weight]] = {"uniform": uniform, "normal": normal}


def parse_weight(spec: str) -> Weight:
    """Return the weight that `spec` describes.

    Raises:
        FewbitError: `spec` is not a weight; the message says what is accepted.
    """
    family, _, numbers = spec.partition(":")
    try:
        first, second = (float(n) for n in numbers.split(","))
        make = _FAMILIES[family.strip().lower()]
    except (KeyError, ValueError):
        raise FewbitError(f"cannot read the weight {shown(spec)}; write {ACCEPTED}") from None
    # Further out, sums in double precision no longer hold what f' does near zero beside the mass far away.
    if not (abs(first) <= _FURTHEST and abs(second) <= _FURTHEST):
        raise FewbitError(f"the weight {shown(spec)} is out of range; write {ACCEPTED}, numbers up to {_FURTHEST:g}")
    return make(first, second)
