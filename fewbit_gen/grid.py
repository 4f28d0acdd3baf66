"""The grid that moments are taken on, refined where f' is steep, narrow or varies between nodes.

A cell is fine enough if f' varies too little within it to matter for its mass, and if quadratures of two orders agree
on it; otherwise it is halved. The variation of f' comes from interval arithmetic (activations/enclosure.py), which
covers all points between nodes: a spike, a step of gelu(1e7*x). For a callable only values are available, so only the
quadratures are compared; a feature narrower than a cell of its dense grid that shows at no node stays undetected.

Named families need none of this: their `reach` bounds the region where they vary.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..tables.errors import FewbitError
from .activations import Activation
from .activations.enclosure import rounding_of
from .effort import check
from .weights import Weight

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Limit beyond the grid's own edges; with more, the programmes that cut an axis take minutes.
MOST_ADDED = 100_000
# Cells of the first grid: with bounds of f', and with values only.
_CELLS, _DENSE_CELLS = 2048, 16384
# Initial limits: the error missed in a cell, and the difference of two quadratures, relative to ∫ (f' − mean)² w.
UNSEEN, _UNEVEN = 1e-8, 1e-11
# Final limit of the error missed in a cell, relative to a table's error; and its reduction per step. Below the last
# value, relative to ∫ (f' − mean)² w, differences are rounding of f'.
_PART, _STEP, _LEAST = 1e-5, 1e-4, 1e-24
_ROUNDING = 1e-14  # of a sum of squares
_NEARLY_CONSTANT = 1e-12  # ∫ (f' − mean)² w relative to ∫ f'² w
# After this many halvings, edges are finer than the solvers' own.
_DEEP = 4
_ORDERS = (4, 6)
# Narrower than this share of the line, a cell in which nothing is known about f' contains a pole.
_POLE = 2.0**-80


@dataclass(frozen=True)
class Features:
    """The result of refinement.

    Attributes:
        edges: increasing; edges that the grids need besides their own.
        unseen: the error that a cell may miss, relative to ∫ (f' − mean)² w; 0 if it can miss nothing.
        noise: ∫ δ² w, with δ the bound of the rounding error of f'.
        size: ∫ f'² w.
        variance: ∫ (f' − mean)² w.
    """

    edges: Vector
    unseen: float
    noise: float
    size: float
    variance: float

    def less(self, error: float, levels: int) -> float | None:
        """Return the next, smaller limit if this one is too large beside a table's error; otherwise None."""
        part = _PART * min(max(1.0, levels / 8), 4.0) ** 2
        if not self.variance > 0 or self.unseen <= _LEAST or self.unseen * self.variance <= part * error:
            return None
        # In powers of 100, so that earlier results can be reused.
        wanted = 100.0 ** math.floor(math.log(max(part * error / self.variance, 1e-300), 100))
        return max(wanted, self.unseen * _STEP)


@cache
def _legendre(order: int) -> tuple[Vector, Vector]:
    return np.polynomial.legendre.leggauss(order)


def quadrature(left: Vector, right: Vector, order: int) -> tuple[Vector, Vector]:
    """Return Gauss–Legendre nodes and weights, each (panels, order), on the panels [left_i, right_i]."""
    nodes, weights = _legendre(order)
    half = 0.5 * (right - left)[:, None]
    return left[:, None] + half * (nodes + 1), half * weights


_NONE = Features(np.empty(0), 0.0, 0.0, 0.0, 0.0)


def grid(activation: Activation, weight: Weight, cells: int) -> Vector:
    """Return the edges of a grid over the weight's domain, including every kink of f' and breakpoint of w.

    About `cells` equal cells lie within the activation's reach; beyond it f' is constant and fewer suffice.
    """
    low, high = weight.domain
    reach = activation.reach
    fence = np.unique(np.clip([low, -reach, reach, high], low, high))
    pieces = [
        np.linspace(a, b, 1 + (cells if -reach <= a and b <= reach else max(1, cells // 16)))
        for a, b in pairwise(fence)
    ]
    breaks = [x for x in (*activation.kinks, *weight.breakpoints) if low < x < high]
    return np.unique(np.concatenate([*pieces, breaks]))


def resolved_grid(activation: Activation, weight: Weight, cells: int, order: int, unseen: float = UNSEEN) -> Vector:
    """Return the edges of `grid`, refined where f' is too steep or too narrow for `order` nodes per cell.

    Refined are features (`features` documents `unseen`) and cells over which the integral of f' differs from the
    increase of f. If f itself jumps, refinement cannot remove the difference.

    Raises:
        FewbitError: f' varies so fast nearly everywhere that there would be too many cells.
    """
    edges = _joined(grid(activation, weight, cells), features(activation, weight, unseen).edges)
    if not activation.consistent:
        return edges
    added = [edges]
    left, right = edges[:-1], edges[1:]
    largest = None  # |f'|, relative to which the rounding of a vanishing f' is negligible
    while left.size:
        x, dx = quadrature(left, right, order)
        with np.errstate(all="ignore"):
            slope = activation.derivative(x)
            ends = activation.function(np.stack([np.nextafter(left, np.inf), right]))
            off = np.abs((slope * dx).sum(axis=1) - (ends[1] - ends[0]))
            size = np.abs(slope)
            if largest is None:
                largest = size.max()
                if not np.isfinite(largest):  # the integration reports the error
                    return edges
            room = ((1e-6 * size + 1e-9 * largest + 1e-290) * dx).sum(axis=1) + 1e-11 * np.abs(ends).sum(axis=0)
        middle = 0.5 * (left + right)
        coarse = (off > room) & (middle > left) & (middle < right)  # not where a value is not finite
        added.append(middle[coarse])
        if sum(points.size for points in added[1:]) > MOST_ADDED:
            raise too_fast(activation, weight, float(middle[coarse][0]))
        left, right = (
            np.concatenate([left[coarse], middle[coarse]]),
            np.concatenate([middle[coarse], right[coarse]]),
        )
    return np.unique(np.concatenate(added))


def _joined(edges: Vector, more: Vector) -> Vector:
    """Return `edges` with those of `more` added that differ from them by more than rounding."""
    if not more.size:
        return edges
    after = np.clip(np.searchsorted(edges, more), 1, edges.size - 1)
    distance = np.minimum(np.abs(more - edges[after - 1]), np.abs(edges[after] - more))
    return np.union1d(edges, more[distance > 4 * np.spacing(np.abs(more))])


def evaluate_derivative(activation: Activation, x: Vector) -> Vector:
    """Return f'(x), or raise `FewbitError` if it is not finite."""
    with np.errstate(all="ignore"):
        value = activation.derivative(x)
    if not np.isfinite(value).all():
        where = x[~np.isfinite(value)].flat[0]
        raise FewbitError(
            f"the derivative of {activation.name} is not finite at x = {where:g}: give a weight without it"
        )
    return value


@lru_cache(maxsize=32)
def features(activation: Activation, weight: Weight, unseen: float = UNSEEN) -> Features:
    """Return the features of f' under `weight`; a named family has none.

    Args:
        activation, weight: the problem.
        unseen: the error that a cell may miss, relative to ∫ (f' − mean)² w.

    Raises:
        FewbitError: f' varies so fast nearly everywhere that there would be too many cells, or it has a pole.
    """
    if activation.enclosure is None and activation.consistent:
        return _NONE
    deep = 1 if activation.enclosure is None else _DEEP
    edges = grid(activation, weight, _DENSE_CELLS if activation.enclosure is None else _CELLS)
    span = edges[-1] - edges[0]
    left, right = edges[:-1], edges[1:]
    steep = np.zeros(left.size, bool)  # whether a cell is half of an uneven one, not only of an unknown one
    depth, added, looked = 0, 0, 0
    found: list[Vector] = [np.empty(0)]
    done = _Sums()
    noise = 0.0
    while left.size:
        check()
        cells = _measured(activation, weight, left, right)
        seen = done.with_(cells)
        middle = 0.5 * left + 0.5 * right
        divisible = (left < middle) & (middle < right)
        uneven, coarse = cells.coarse(seen, unseen)
        poles = coarse & ~np.isfinite(cells.spread) & (~divisible | (right - left < _POLE * span))
        if poles.any():
            evaluate_derivative(activation, np.concatenate([left[poles], middle[poles], right[poles]]))
            raise FewbitError(
                f"the derivative of {activation.name} has no bounds near x = {middle[poles][0]:g}: "
                "give a weight that leaves that point out"
            )
        if depth >= deep:
            found.extend([left[steep], right[steep]])
            added += int(steep.sum())
        coarse &= divisible
        looked += 2 * int(coarse.sum())
        if added > MOST_ADDED or looked > 4 * MOST_ADDED:
            if seen.variance <= _NEARLY_CONSTANT * seen.square:
                raise FewbitError(
                    f"the derivative of {activation.name} is so nearly constant under {weight.spec} "
                    "that doubles cannot tell how it varies"
                )
            raise too_fast(activation, weight, float(middle[coarse][0]))
        done = done.with_(cells.of(~coarse))
        noise += _noise(activation, middle[~coarse], cells.mass[~coarse])
        left, right = (
            np.concatenate([left[coarse], middle[coarse]]),
            np.concatenate([middle[coarse], right[coarse]]),
        )
        steep = np.tile(uneven[coarse], 2)
        depth += 1
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.float64(done.scale) ** 2
        size, variance = float(done.square * scale), float(done.variance * scale)
    return Features(np.unique(np.concatenate(found)), unseen, noise, size, variance)


def too_fast(activation: Activation, weight: Weight, x: float) -> FewbitError:
    """Return the error for an f' that varies too fast to be integrated, for instance near `x`."""
    return FewbitError(
        f"the derivative of {activation.name} varies too fast to be integrated under {weight.spec}, "
        f"for instance near x = {x:g}; give a narrower weight"
    )


@dataclass(frozen=True)
class _Cells:
    """Measurements of cells, with f' divided by `scale`.

    Attributes:
        scale: a power of two near the largest |f'| in them.
        mass, first, square: (n,) ∫ w, ∫ f' w and ∫ f'² w.
        spread: (n,) variation of f' in each.
        uneven: (n,) difference of two quadratures of f'² w.
    """

    scale: float
    mass: Vector
    first: Vector
    square: Vector
    spread: Vector
    uneven: Vector

    def of(self, chosen: Mask) -> "_Cells":
        """Return the measurements of the chosen cells."""
        rows = (self.mass, self.first, self.square, self.spread, self.uneven)
        return _Cells(self.scale, *(row[chosen] for row in rows))

    def coarse(self, seen: "_Sums", unseen: float) -> tuple[Mask, Mask]:
        """Return which cells are uneven relative to the sums `seen`, and which are uneven or may miss too much."""
        ratio = self.scale / seen.scale  # at most 1: `seen` includes these cells
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            spread = np.where(self.mass > 0, self.spread, 0.0) * np.sqrt(self.mass) * ratio
            room = _UNEVEN * min(1.0, unseen / UNSEEN) * seen.variance + _ROUNDING * self.square * ratio**2
            uneven = self.uneven * ratio**2 > room
        return uneven, uneven | ~(spread <= np.sqrt(unseen * seen.variance))


@dataclass(frozen=True)
class _Sums:
    """Moments of several cells combined, with f' divided by `scale`."""

    scale: float = 0.0
    mass: float = 0.0
    first: float = 0.0
    square: float = 0.0

    def with_(self, cells: _Cells) -> "_Sums":
        """Return the sums including those of `cells`."""
        scale = max(self.scale, cells.scale)
        old, new = self.scale / scale, cells.scale / scale
        return _Sums(
            scale,
            self.mass + float(cells.mass.sum()),
            self.first * old + float(cells.first.sum()) * new,
            self.square * old**2 + float(cells.square.sum()) * new**2,
        )

    @property
    def variance(self) -> float:
        """∫ (f' − mean)² w / scale²; 0 where it is within rounding."""
        if not self.mass > 0:
            return 0.0
        variance = self.square - self.first**2 / self.mass
        return variance if variance > 1e-15 * self.square else 0.0


def _measured(activation: Activation, weight: Weight, left: Vector, right: Vector) -> _Cells:
    values, masses = [], []
    for order in _ORDERS:
        x, dx = quadrature(left, right, order)
        values.append(evaluate_derivative(activation, x))
        masses.append(weight.density(x) * dx)
    largest = max(float(np.abs(value).max(initial=0.0)) for value in values)
    scale = float(np.ldexp(1.0, np.frexp(largest)[1] - 1)) if largest > 0 else np.finfo(float).tiny
    values = [value / scale for value in values]
    mass = masses[1].sum(axis=1)
    first, square = (
        [(value**power * w).sum(axis=1) for value, w in zip(values, masses, strict=True)] for power in (1, 2)
    )
    # Nodes are rounded by half a last digit each, which changes the integrand by as much of its range.
    last_digit = np.spacing(np.maximum(np.abs(left), np.abs(right)))
    moved = np.ptp(values[1] ** 2 * masses[1], axis=1) / (right - left) * last_digit
    uneven = np.maximum(np.abs(square[0] - square[1]) - _ORDERS[1] * moved, 0.0)
    if activation.enclosure is None:
        spread = np.zeros(left.size)
    else:
        low, high = activation.enclosure(np.nextafter(left, np.inf), right, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            spread = (high - low) / scale
        spread = np.where(np.isnan(spread), np.inf, spread)
    return _Cells(scale, mass, first[1], square[1], spread, uneven)


def _noise(activation: Activation, x: Vector, mass: Vector) -> float:
    if activation.enclosure is None or not x.size:
        return 0.0
    off = np.where(mass > 0, rounding_of(activation.enclosure, x), 0.0)
    with np.errstate(over="ignore"):
        return float((off**2 * mass).sum())
