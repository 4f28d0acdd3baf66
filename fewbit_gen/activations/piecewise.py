"""Activations composed of polynomial pieces: most have a derivative that a small table represents exactly.

Each family is a function with the keyword arguments of its `torch.nn.functional` namesake that returns an
`Activation`. The value of f' at the point where two pieces meet follows torch.

A parameter that bounds a piece may be infinite, which removes the piece. (At an infinite x equal to its bound torch
has f' = 0; here f' has the value of the finite x beside it.)
"""

import math

import numpy as np

from ...tables.errors import FewbitError
from .base import Activation, Function, Vector, before, bound, call_text, finite


def _inside(low: float, high: float, value: float, outside: float) -> Function:
    """Return the function that is `value` where low < x < high and `outside` elsewhere."""
    above = (lambda x: x > low) if low > -math.inf else (lambda x: x >= low)
    below = (lambda x: x < high) if high < math.inf else (lambda x: x <= high)
    return lambda x: np.where(above(x) & below(x), value, outside)


def relu() -> Activation:
    """max(x, 0)."""
    return Activation(
        "relu", lambda x: np.maximum(x, 0.0), lambda x: np.where(x > 0, 1.0, 0.0), kinks=(0.0,), step=True
    )


def relu6() -> Activation:
    """min(max(x, 0), 6)."""
    return Activation(
        "relu6", lambda x: np.clip(x, 0.0, 6.0), _inside(0, 6, 1.0, 0.0), kinks=(0.0, before(6.0)), step=True
    )


def squared_relu() -> Activation:
    """max(x, 0)² (Primer)."""
    return Activation(
        "squared_relu",
        lambda x: np.maximum(x, 0.0) ** 2,
        lambda x: 2 * np.maximum(x, 0.0),
        kinks=(0.0,),
        reach=math.inf,
        turns=(),
    )


def leaky_relu(negative_slope: float = 0.01) -> Activation:
    """x for x > 0, negative_slope · x otherwise."""
    slope = finite("negative_slope", negative_slope)
    return Activation(
        call_text(leaky_relu, negative_slope=slope),
        lambda x: np.where(x > 0, x, slope * x),
        lambda x: np.where(x > 0, 1.0, slope),
        kinks=(0.0,),
        step=True,
    )


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Activation:
    """min(max(x, min_val), max_val); either may be infinite, for a clamp on one side."""
    low, high = bound("min_val", min_val), bound("max_val", max_val)
    if not low < high:
        raise FewbitError(f"hardtanh needs min_val < max_val, not {low:g} and {high:g}")
    return Activation(
        call_text(hardtanh, min_val=low, max_val=high),
        lambda x: np.clip(x, low, high),
        _inside(low, high, 1.0, 0.0),
        # No double lies between two neighbouring ones: f' is 0 throughout.
        kinks=tuple(_finite(low) + [before(x) for x in _finite(high)]) if low < before(high) else (),
        step=True,
    )


def hardsigmoid() -> Activation:
    """min(max(x + 3, 0), 6) / 6."""
    return Activation(
        "hardsigmoid",
        lambda x: np.clip(x + 3, 0.0, 6.0) / 6,
        _inside(-3, 3, 1 / 6, 0.0),
        kinks=(-3.0, before(3.0)),
        step=True,
    )


def hardswish() -> Activation:
    """x · hardsigmoid(x)."""

    def derivative(x: Vector) -> Vector:
        return np.where(x <= -3, 0.0, np.where(x < 3, np.clip(x, -3, 3) / 3 + 0.5, 1.0))

    return Activation(
        "hardswish",
        lambda x: x * np.clip(x + 3, 0.0, 6.0) / 6,
        derivative,
        kinks=(-3.0, before(3.0)),
        reach=3.0,
        turns=(-1.5,),
    )


def hardshrink(lambd: float = 0.5) -> Activation:
    """x where |x| > lambd, 0 otherwise; the identity if lambd is negative, as in torch."""
    lambd = bound("lambd", lambd)
    return Activation(
        call_text(hardshrink, lambd=lambd),
        lambda x: np.where(_dead(x, lambd), 0.0, x),
        lambda x: np.where(_dead(x, lambd), 0.0, 1.0),
        kinks=(before(-lambd), lambd) if 0 <= lambd < math.inf else (),
        step=True,
    )


def softshrink(lambd: float = 0.5) -> Activation:
    """x shrunk towards 0 by lambd, and 0 where |x| ≤ lambd."""
    lambd = finite("lambd", lambd)
    if lambd < 0:
        raise FewbitError(f"softshrink needs a lambd of at least 0, not {lambd:g}")
    return Activation(
        call_text(softshrink, lambd=lambd),
        lambda x: np.where(_dead(x, lambd), 0.0, x - np.copysign(lambd, x)),
        lambda x: np.where(_dead(x, lambd), 0.0, 1.0),
        kinks=(before(-lambd), lambd),
        step=True,
    )


def _dead(x: Vector, lambd: float) -> np.ndarray:
    return (x >= -lambd) & (x <= lambd)


def _finite(x: float) -> list[float]:
    return [x] if math.isfinite(x) else []


def threshold(threshold: float, value: float) -> Activation:
    """x for x > threshold, value otherwise; f' ignores the jump, as in torch."""
    at, value = bound("threshold", threshold), bound("value", value)
    return Activation(
        call_text(_threshold, threshold=at, value=value),
        lambda x: np.where(x > at, x, value),
        lambda x: np.where((x > at) | (at == -math.inf), 1.0, 0.0),
        kinks=tuple(_finite(at)),
        step=True,
    )


_threshold = threshold  # the parameter of the same name shadows it

FAMILIES = (
    *(relu, relu6, squared_relu, leaky_relu, hardtanh, hardsigmoid, hardswish, hardshrink, softshrink, threshold),
)
