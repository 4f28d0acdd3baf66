"""Bounds of an expression's derivative on intervals, by interval arithmetic.

Samples of f' carry no information about the values between them: exp(-1e12*(x-3.3333)**2) is 0 at every point of a
grid, and gelu(1e7*x) has slope 0 or 1e7 at all of them. Evaluated on intervals instead of points, the same expression
bounds f' in each cell; where the bounds are wide, the compiler splits the cell.

        enclosed("x*x")   cells [a, b]  →  [2a, 2b] or a wider interval that contains 2x for all x of the cell

`Intervals` is an algebra of syntax.py, on pairs of bounds. A function g is monotone between its turning points
(`Activation.turns`) and kinks, so its range is spanned by its values at the ends and at those points inside.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .base import Activation, Enclosure, Vector
from .syntax import Call, Expression, fold

_LAST_DIGIT = 2.0**-52  # of 1, in double precision
_LIBRARY = 8  # maximum error of exp and the like, in last digits, with a margin for combining a few of them


class Bounds(NamedTuple):
    """Lower and upper bounds, cell by cell; −∞ and ∞ where nothing is known."""

    low: Vector
    high: Vector


class Enclosed(NamedTuple):
    """Bounds of a value and of its derivative by x; the derivative is None if the value does not depend on x."""

    value: Bounds
    slope: Bounds | None


# Type of a node: from bounds of x and the machine epsilon (0 to ignore rounding) to bounds of the node.
Node = Callable[[Bounds, float], Enclosed]


class _Unknown(Exception):
    """The expression contains a function whose turning points are unknown."""


def enclosed(expression: Expression) -> Enclosure | None:
    """Return a function that encloses the derivative of an expression.

    Returns:
        A function from the ends of cells (low, high) and the machine epsilon to bounds of f' on each; with 2⁻⁵² they
        allow for rounding, with 0 they bound f' as computed in doubles. None if the turning points of a function are
        unknown.
    """
    try:
        node = fold(expression, Intervals())
    except _Unknown:
        return None

    def enclosure(low: Vector, high: Vector, digit: float) -> Bounds:
        with np.errstate(all="ignore"):
            value, slope = node(Bounds(low, high), digit)
            slope = slope or _thin(0.0)
            unknown = np.isnan(value.low) | np.isnan(value.high) | np.isnan(slope.low) | np.isnan(slope.high)
            return Bounds(np.where(unknown, -np.inf, slope.low), np.where(unknown, np.inf, slope.high))

    return enclosure


def rounding_of(enclosure: Enclosure, x: Vector) -> Vector:
    """Return bounds of the rounding error of f' at `x` in double precision."""
    low, high = enclosure(x, x, _LAST_DIGIT)
    with np.errstate(invalid="ignore"):
        return 0.5 * (high - low)


def _thin(number: float) -> Bounds:
    return Bounds(np.asarray(number, np.float64), np.asarray(number, np.float64))


def _widened(bounds: Bounds, digit: float) -> Bounds:
    """Return `bounds` widened by the relative error `digit` on either side; overflow widens to infinity."""
    low, high = bounds
    if digit:
        low, high = low - digit * np.abs(low), high + digit * np.abs(high)
    return Bounds(
        np.where(low == np.inf, np.finfo(float).max, low), np.where(high == -np.inf, -np.finfo(float).max, high)
    )


def _sum(u: Bounds, v: Bounds, digit: float) -> Bounds:
    return _widened(Bounds(u.low + v.low, u.high + v.high), digit)


def _total(u: Bounds | None, v: Bounds | None, digit: float) -> Bounds | None:
    if u is None or v is None:
        return v if u is None else u
    return _sum(u, v, digit)


def _product(u: Bounds, v: Bounds, digit: float) -> Bounds:
    corners = [_times(a, b) for a in u for b in v]
    return _widened(Bounds(reduce(np.minimum, corners), reduce(np.maximum, corners)), digit)


def _times(a: Vector, b: Vector) -> Vector:
    """Return a·b with 0·∞ = 0, as an infinite bound stands for a finite value."""
    product = a * b
    return np.where((a == 0) | (b == 0), 0.0, product)


def _quotient(u: Bounds, v: Bounds, digit: float) -> Bounds:
    corners = [a / b for a in u for b in v]
    bounds = _widened(Bounds(reduce(np.minimum, corners), reduce(np.maximum, corners)), digit)
    unknown = ((v.low <= 0) & (v.high >= 0)) | np.isnan(bounds.low) | np.isnan(bounds.high)
    return Bounds(np.where(unknown, -np.inf, bounds.low), np.where(unknown, np.inf, bounds.high))


def _range(function: Callable[[Vector], Vector], points: tuple[float, ...], u: Bounds, digit: float) -> Bounds:
    """Return the range of a function that is monotone between neighbours of `points`."""
    at_low, at_high = function(u.low), function(u.high)
    low, high = np.minimum(at_low, at_high), np.maximum(at_low, at_high)  # NaN if either is NaN
    if points:
        values = function(np.asarray(points))
        for point, value in zip(points, values.tolist(), strict=True):
            inside = (u.low <= point) & (point <= u.high)
            low = np.where(inside, np.minimum(low, value), low)
            high = np.where(inside, np.maximum(high, value), high)
    unknown = np.isnan(low) | np.isnan(high)
    return _widened(Bounds(np.where(unknown, -np.inf, low), np.where(unknown, np.inf, high)), _LIBRARY * digit)


def _sine(u: Bounds, digit: float, phase: float = 0.0) -> Bounds:
    """Return the range of sin(u + phase)."""
    slack = 1e-15 * (1 + np.maximum(np.abs(u.low), np.abs(u.high)))
    first, last = u.low + phase - slack, u.high + phase + slack
    ends = np.sin(u.low + phase), np.sin(u.high + phase)
    peak, trough = (np.floor((last - top) / (2 * math.pi)) >= np.ceil((first - top) / (2 * math.pi))
                    for top in (0.5 * math.pi, -0.5 * math.pi))  # fmt: skip
    wild = ~(np.abs(u.low) < 1e15) | ~(np.abs(u.high) < 1e15)
    pad = 2 * _LIBRARY * digit + (slack if digit else 0.0)
    low = np.where(wild | trough, -1.0, np.minimum(*ends) - pad)
    high = np.where(wild | peak, 1.0, np.maximum(*ends) + pad)
    return Bounds(np.maximum(low, -1.0), np.minimum(high, 1.0))


def _ranges(function: Activation) -> Callable[[Bounds, float], tuple[Bounds, Bounds]]:
    """Return a function that gives the ranges of a function and of its derivative."""
    half = 0.5 * math.pi
    if function.name == "sin":
        return lambda u, digit: (_sine(u, digit), _sine(u, digit, half))
    if function.name == "cos":
        return lambda u, digit: (_sine(u, digit, half), _sine(u, digit, 2 * half))
    if function.name == "tan":

        def tangent(u: Bounds, digit: float) -> tuple[Bounds, Bounds]:
            slack = 1e-15 * (1 + np.maximum(np.abs(u.low), np.abs(u.high)))
            pole = np.floor((u.high + slack) / math.pi - 0.5) >= np.ceil((u.low - slack) / math.pi - 0.5)
            low, high = _widened(Bounds(np.tan(u.low), np.tan(u.high)), 4 * _LIBRARY * digit)
            wild = pole | ~(low <= high)
            value = Bounds(np.where(wild, -np.inf, low), np.where(wild, np.inf, high))
            return value, _sum(_power_range(value, 2.0, digit), _thin(1.0), digit)

        return tangent
    turns = () if function.step else function.turns  # with f' a step function, f is linear between the kinks
    if turns is None:
        raise _Unknown
    kinks = [side for kink in function.kinks for side in (kink, math.nextafter(kink, math.inf))]
    points = (*turns, *kinks)

    def both(u: Bounds, digit: float) -> tuple[Bounds, Bounds]:
        value, outer = _range(function.function, points, u, digit), _range(function.derivative, points, u, digit)
        unknown = (value.low == -np.inf) & (value.high == np.inf)  # such as log where u may be negative
        return value, Bounds(np.where(unknown, -np.inf, outer.low), np.where(unknown, np.inf, outer.high))

    return both


def _power_range(u: Bounds, c: float, digit: float) -> Bounds:
    """Return the range of uᶜ."""
    whole = float(c).is_integer()
    if c == 0:
        return _thin(1.0)
    across = (u.low <= 0) & (u.high >= 0)
    bounds = _range(lambda v: np.power(v, c), (0.0,) if c > 0 else (), u, digit)
    unknown = across if c < 0 else (np.zeros(np.shape(u.low), bool) if whole else u.low < 0)
    return Bounds(np.where(unknown, -np.inf, bounds.low), np.where(unknown, np.inf, bounds.high))


class Intervals:
    """The algebra of bounds of values and of their derivatives by x."""

    def number(self, value: float, exact: bool) -> Node:
        """Return a constant."""
        return lambda x, digit: Enclosed(_widened(_thin(value), 0 if exact else digit), None)

    def variable(self) -> Node:
        """Return x."""
        return lambda x, digit: Enclosed(x, Bounds(np.ones_like(x.low), np.ones_like(x.low)))

    def negate(self, argument: Node) -> Node:
        """Return −u."""

        def turned(u: Bounds) -> Bounds:
            return Bounds(-u.high, -u.low)

        def node(x: Bounds, digit: float) -> Enclosed:
            value, slope = argument(x, digit)
            return Enclosed(turned(value), None if slope is None else turned(slope))

        return node

    def add(self, left: Node, right: Node) -> Node:
        """Return u + v."""

        def node(x: Bounds, digit: float) -> Enclosed:
            (u, du), (v, dv) = left(x, digit), right(x, digit)
            return Enclosed(_sum(u, v, digit), _total(du, dv, digit))

        return node

    def subtract(self, left: Node, right: Node) -> Node:
        """Return u − v."""
        return self.add(left, self.negate(right))

    def multiply(self, left: Node, right: Node) -> Node:
        """Return u v."""

        def node(x: Bounds, digit: float) -> Enclosed:
            (u, du), (v, dv) = left(x, digit), right(x, digit)
            first = None if du is None else _product(du, v, digit)
            second = None if dv is None else _product(u, dv, digit)
            return Enclosed(_product(u, v, digit), _total(first, second, digit))

        return node

    def square(self, u: Node) -> Node:
        """Return u u, which is never negative."""
        return self.power(u, 2.0)

    def divide(self, left: Node, right: Node) -> Node:
        """Return u / v."""

        def node(x: Bounds, digit: float) -> Enclosed:
            (u, du), (v, dv) = left(x, digit), right(x, digit)
            ratio = _quotient(u, v, digit)
            first = None if du is None else _quotient(du, v, digit)
            second = None
            if dv is not None:
                product = _product(ratio, _quotient(dv, v, digit), digit)
                second = Bounds(-product.high, -product.low)
            return Enclosed(ratio, _total(first, second, digit))

        return node

    def power(self, base: Node, c: float) -> Node:
        """Return uᶜ."""

        def node(x: Bounds, digit: float) -> Enclosed:
            u, slope = base(x, digit)
            value = _power_range(u, c, digit)
            if slope is None or c == 0:
                return Enclosed(value, None)
            outer = _product(_thin(c), _power_range(u, c - 1, digit), digit)
            return Enclosed(value, _product(outer, slope, digit))

        return node

    def exponential(self, c: float, exponent: Node) -> Node:
        """Return cᵘ."""

        def node(x: Bounds, digit: float) -> Enclosed:
            u, slope = exponent(x, digit)
            if not c > 0:  # the derivative exists almost nowhere
                nothing = Bounds(np.full(x.low.shape, -np.inf), np.full(x.low.shape, np.inf))
                return Enclosed(nothing, nothing)
            # The rounding error of the exponent is in u; the power adds only the library's.
            value = _range(lambda v: np.power(c, v), (), u, digit)
            rate = _product(value, _widened(_thin(math.log(c)), digit), digit)
            return Enclosed(value, None if slope is None else _product(rate, slope, digit))

        return node

    def call(self, call: Call, argument: Node) -> Node:
        """Return g(u); raises `_Unknown` if g's turning points are."""
        range_of = _ranges(call.function)

        def node(x: Bounds, digit: float) -> Enclosed:
            u, slope = argument(x, digit)
            value, outer = range_of(u, digit)
            return Enclosed(value, None if slope is None else _product(outer, slope, digit))

        return node

    def greatest(self, left: Node, right: Node) -> Node:
        """Return the greater of u and v."""

        def node(x: Bounds, digit: float) -> Enclosed:
            u, v = left(x, digit), right(x, digit)
            chosen = _chosen(u.value.low > v.value.high, u.value.high <= v.value.low, u, v)
            value = Bounds(np.maximum(u.value.low, v.value.low), np.maximum(u.value.high, v.value.high))
            return Enclosed(value, chosen.slope)

        return node

    def least(self, left: Node, right: Node) -> Node:
        """Return the lesser of u and v."""

        def node(x: Bounds, digit: float) -> Enclosed:
            u, v = left(x, digit), right(x, digit)
            chosen = _chosen(u.value.low > v.value.high, u.value.high <= v.value.low, v, u)
            value = Bounds(np.minimum(u.value.low, v.value.low), np.minimum(u.value.high, v.value.high))
            return Enclosed(value, chosen.slope)

        return node

    def choose(self, conditions: Sequence[tuple[bool, Node, Node]], yes: Node, no: Node) -> Node:
        """Return `yes` where the conditions hold, else `no`, and both where that is not sure."""

        def node(x: Bounds, digit: float) -> Enclosed:
            surely, never = np.ones(x.low.shape, bool), np.zeros(x.low.shape, bool)
            for strict, smaller, larger in conditions:
                less, more = smaller(x, digit).value, larger(x, digit).value
                surely &= less.high < more.low if strict else less.high <= more.low
                never |= less.low >= more.high if strict else less.low > more.high
            return _chosen(surely, never, yes(x, digit), no(x, digit))

        return node


def _chosen(surely: NDArray[np.bool_], never: NDArray[np.bool_], yes: Enclosed, no: Enclosed) -> Enclosed:
    """Return `yes` where it is always chosen, `no` where it never is, and elsewhere bounds that contain both."""

    def of(u: Bounds, v: Bounds) -> Bounds:
        low = np.where(surely, u.low, np.where(never, v.low, np.minimum(u.low, v.low)))
        high = np.where(surely, u.high, np.where(never, v.high, np.maximum(u.high, v.high)))
        return Bounds(low, high)

    return Enclosed(of(yes.value, no.value), of(yes.slope or _thin(0.0), no.slope or _thin(0.0)))
