"""The compiler's model of an activation: f, its derivative f', and the points where f' is not smooth.

Table intervals are closed on the right, so a kink is always the last double of the piece on its left. Where torch
gives f'(k) the value from the right (relu6 at 6), the kink is therefore the double before k: `before(k)`.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...tables.errors import FewbitError
from ...tables.names import number_text

Vector = NDArray[np.float64]
Function = Callable[[Vector], Vector]
# Type of a function from the ends of cells and the machine epsilon to bounds of f' on each cell: enclosure.py.
Enclosure = Callable[[Vector, Vector, float], tuple[Vector, Vector]]


@dataclass(frozen=True)
class Activation:
    """A pointwise activation f: R → R.

    Attributes:
        name: canonical text that `parse_activation` reads back, such as ``softplus(beta=2)``; for a callable, its
            display name.
        function: f, float64 to float64, elementwise.
        derivative: f', float64 to float64, elementwise; at a kink its value from the left.
        kinks: points where f' jumps or bends, increasing.
        step: whether f' is constant between kinks, so that a finite table represents it exactly.
        reach: beyond ±reach f' needs no fine grid: it is constant to a double's last digit except for a jump at a
            kink, or as flat as a power of x is far out. Infinity if f' never settles.
        base: the name of an activation g and a number a > 0 with f'(x) = g'(a·x), or None.
        consistent: whether `derivative` is the derivative of `function` wherever that does not jump, so that one can
            check the other. A callable may define its own derivative.
        turns: points such that f and f' are both monotone between neighbours among them and the kinks; None if
            unknown.
        enclosure: bounds of f' on cells (enclosure.py); None if only values of f' are available.
    """

    name: str
    function: Function
    derivative: Function
    kinks: tuple[float, ...] = ()
    step: bool = False
    reach: float = 40.0  # e⁻⁴⁰ is less than half a last digit of 1
    base: tuple[str, float] | None = None
    consistent: bool = True
    turns: tuple[float, ...] | None = None
    enclosure: Enclosure | None = None


def times_power_of_two(activation: Activation, exponent: int) -> Activation:
    """Return the activation 2^exponent · f, exact except where it leaves the range of doubles."""

    def scaled(function: Function) -> Function:
        return lambda x: np.ldexp(function(x), exponent)

    def enclosure(low: Vector, high: Vector, digit: float) -> tuple[Vector, Vector]:
        least, most = inner(low, high, digit) if inner else (low, high)
        return np.ldexp(least, exponent), np.ldexp(most, exponent)

    inner = activation.enclosure
    return replace(
        activation,
        function=scaled(activation.function),
        derivative=scaled(activation.derivative),
        enclosure=enclosure if inner else None,
        base=None,
    )


def before(x: float) -> float:
    """Return the last double below `x`."""
    return math.nextafter(x, -math.inf)


def after(x: float) -> float:
    """Return the first double above `x`."""
    return math.nextafter(x, math.inf)


def finite(name: str, value: float) -> float:
    """Return the parameter `name` as a float, or raise `FewbitError` if it is not finite."""
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise FewbitError(f"{name} must be a finite number, not {value}")
    return value + 0.0  # −0 is 0


def bound(name: str, value: float) -> float:
    """Return the parameter `name`, which may be infinite, as a float, or raise `FewbitError` if it is NaN."""
    if isinstance(value, float | np.floating) and math.isnan(value):
        raise FewbitError(f"{name} must be a number or infinite, not nan")
    return float(value) if isinstance(value, float | np.floating) and math.isinf(value) else finite(name, value)


def bounded(x: Vector) -> Vector:
    """Return `x` clipped to ±10⁸, where f' has long settled: this keeps ∞·0 out of formulas."""
    return np.clip(x, -1e8, 1e8)


def over(reach: float, scale: float) -> float:
    """Return `reach` / |`scale`|: how far f'(scale·x) reaches if f'(x) reaches `reach`."""
    return reach / abs(scale) if abs(scale) > 1e-300 else math.inf


def call_text(family: Callable[..., Activation], **arguments: float) -> str:
    """Return the canonical name of `family` called with `arguments`, omitting defaults."""
    defaults = {p.name: p.default for p in inspect.signature(family).parameters.values()}
    given = [f"{key}={number_text(value)}" for key, value in arguments.items() if value != defaults[key]]
    return f"{family.__name__}({','.join(given)})" if given else family.__name__
