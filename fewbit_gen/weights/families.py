"""Weights given by a formula with two parameters."""

import math

import numpy as np

from ...tables.errors import FewbitError, shown
from ...tables.names import number_text
from .weight import FURTHEST, Weight

# Beyond 12 deviations a normal density holds 4e-33 of its mass: below rounding in every integral here.
_NORMAL_REACH = 12.0
# Narrower than this relative to its position, a domain contains too few doubles for the nodes of a quadrature.
_NARROWEST = 1e-12
_LEAST_WIDTH = 1e-305  # its inverse, which is a uniform density, is finite
# Beyond 40 scales a Laplace density holds e⁻⁴⁰ of its mass: less than half a last digit of 1.
_LAPLACE_REACH = 40.0


def uniform(low: float, high: float) -> Weight:
    """w = 1 on [low, high]; raises `FewbitError` if that is empty or out of range."""
    low, high = _checked("uniform", low, high)
    if not low < high:
        raise FewbitError(f"the weight uniform:{low:g},{high:g} covers nothing; write uniform:A,B with A < B")
    if high - low < _NARROWEST * max(abs(low), abs(high)) or high - low < _LEAST_WIDTH:
        raise FewbitError(f"the weight uniform:{low!r},{high!r} is too narrow for its place in double precision")
    return Weight(_text("uniform", low, high), (low, high), lambda x: np.ones_like(x), mass=high - low)


def normal(mean: float, deviation: float) -> Weight:
    """The density of the normal distribution; raises `FewbitError` if it has no width or is out of range."""
    mean, deviation = _checked("normal", mean, deviation)
    domain = _around("normal", mean, deviation, _NORMAL_REACH)
    scale = 1 / (deviation * math.sqrt(2 * math.pi))
    return Weight(
        _text("normal", mean, deviation),
        domain,
        lambda x: scale * np.exp(-0.5 * ((x - mean) / deviation) ** 2),
    )


def laplace(mean: float, scale: float) -> Weight:
    """The density exp(−|x − mean|/scale) / (2 scale); raises `FewbitError` if it has no width or is out of range."""
    mean, scale = _checked("laplace", mean, scale)
    domain = _around("laplace", mean, scale, _LAPLACE_REACH)
    return Weight(
        _text("laplace", mean, scale),
        domain,
        lambda x: np.exp(-np.abs(x - mean) / scale) * (0.5 / scale),
        breakpoints=(mean,),
    )


def _checked(family: str, first: float, second: float) -> tuple[float, float]:
    try:
        first, second = float(first), float(second)
    except OverflowError:
        first = second = math.inf
    except (TypeError, ValueError):
        raise FewbitError(f"a weight {family} takes two numbers, not {shown(first)} and {shown(second)}") from None
    if not (abs(first) <= FURTHEST and abs(second) <= FURTHEST):  # false if one is NaN
        raise FewbitError(
            f"the weight {family}:{first:g},{second:g} is out of range; write {family}:A,B, numbers up to {FURTHEST:g}"
        )
    return first, second


def _around(family: str, mean: float, width: float, reach: float) -> tuple[float, float]:
    """Return the domain mean ± reach · width, wide enough for double precision."""
    if not width > 0:
        raise FewbitError(f"the weight {family}:{mean:g},{width:g} has no width: its second number must be above 0")
    low, high = mean - reach * width, mean + reach * width
    # The domain must contain enough doubles to integrate over.
    if width < _NARROWEST * abs(mean) or width < _LEAST_WIDTH:
        raise FewbitError(f"the weight {family}:{mean:g},{width:g} is too narrow for its mean in double precision")
    return low, high


def _text(family: str, first: float, second: float) -> str:
    return f"{family}:{number_text(first)},{number_text(second)}"
