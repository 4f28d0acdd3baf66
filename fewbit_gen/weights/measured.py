"""Measured weights: a histogram, or samples converted to one.

The density is constant between two edges and integrates to 1. Empty bins at the ends are removed; empty bins
inside remain, as intervals where the weight is 0.
"""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...tables.errors import FewbitError
from .weight import FURTHEST, Weight

Vector = NDArray[np.float64]

# Every edge is an edge of the solvers' grid, and the solver for `interval` takes quadratic time in its cells.
MOST_BINS = 4096
_MOST_SAMPLE_BINS = 1024
# Bins narrower than this relative to their position cannot separate the nodes of a quadrature.
_NARROWEST = 1e-12


def histogram(edges: ArrayLike, counts: ArrayLike) -> Weight:
    """Return the weight that is constant between `edges` and has masses proportional to `counts`.

    Args:
        edges: (n + 1,) increasing, finite, within ±1e9, n ≤ 4096.
        counts: (n,) finite, ≥ 0, not all 0; need not be integers.

    Raises:
        FewbitError: `edges` or `counts` violate these conditions.
    """
    edges, counts = _numbers("edges", edges), _numbers("counts", counts)
    if counts.size == 0:
        raise FewbitError("the histogram is empty: it has no bins")
    if edges.size != counts.size + 1:
        raise FewbitError(f"a histogram of {counts.size} counts needs {counts.size + 1} edges, not {edges.size}")
    if counts.size > MOST_BINS:
        raise FewbitError(f"a histogram has at most {MOST_BINS} bins, not {counts.size}: merge neighbours")
    _check_range("edge", edges)
    if not np.all(edges[1:] > edges[:-1]):
        raise FewbitError(
            f"the edges of a histogram must increase; edge {_first(edges[1:] <= edges[:-1]) + 1} does not"
        )
    narrow = np.diff(edges) <= _NARROWEST * np.maximum(np.abs(edges[1:]), np.abs(edges[:-1]))
    if narrow.any() or np.diff(edges).min() < 1e-300:
        raise FewbitError("a bin of the histogram is too narrow for its place in double precision")
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        bad = _first(~np.isfinite(counts) | (counts < 0))
        raise FewbitError(f"the counts of a histogram must be finite and not negative; count {bad} is {counts[bad]:g}")
    if not counts.any():
        raise FewbitError("the histogram is empty: all its counts are 0")
    return _piecewise(edges, counts)


def samples(x: ArrayLike) -> Weight:
    """Return the density of the samples `x`: a histogram with about 2 ∛n bins.

    The bins in the middle contain equally many samples, so that they are narrow where samples are dense; towards
    both ends each contains half as many as the one before, so that an outlier does not dilute the bins beside it.
    Edges lie half way between two samples. A value that fills a whole bin (the zeros behind a ReLU) gets its own.

    Args:
        x: any shape, real and finite, within ±1e9, not all equal.

    Raises:
        FewbitError: `x` violates these conditions.
    """
    x = np.sort(_numbers("samples", x, flat=False), axis=None)
    if x.size == 0:
        raise FewbitError("there are no samples")
    _check_range("sample", x)
    ranks = _ranks(x)
    edges = np.concatenate([x[:1], 0.5 * x[ranks - 1] + 0.5 * x[ranks], x[-1:]])
    ranks = np.concatenate([[0], ranks, [x.size]])
    kept = _apart(edges)
    if len(kept) < 2:
        raise FewbitError(f"all samples are {x[0]:g}, or as good as: a weight needs some width")
    return histogram(edges[kept], np.diff(ranks[kept]))


def _ranks(x: Vector) -> NDArray[np.int64]:
    """Return the number of sorted samples below each inner edge, increasing."""
    n = x.size
    bins = min(math.ceil(2 * n ** (1 / 3)), _MOST_SAMPLE_BINS)
    middle = n / bins * np.arange(1, bins)
    tail = 2.0 ** np.arange(math.ceil(math.log2(max(1.0, n / bins))))
    ranks = np.unique(np.rint(np.concatenate([tail, middle, n - tail])).astype(np.int64))
    ranks = ranks[(ranks > 0) & (ranks < n)]
    # An edge among equal samples becomes two edges, one on each side of them.
    tied = x[ranks][x[ranks - 1] == x[ranks]]
    sides = np.concatenate([np.searchsorted(x, tied, side) for side in ("left", "right")])
    ranks = np.unique(np.concatenate([ranks, sides]))
    ranks = ranks[(ranks > 0) & (ranks < n)]
    return ranks[x[ranks - 1] < x[ranks]]


def _apart(edges: Vector) -> list[int]:
    """Return which of the increasing edges to keep so that no two are too close; the first and last are always kept."""
    least = 4 * _NARROWEST * max(abs(edges[0]), abs(edges[-1]), 1e-200)
    kept = [0]
    for i, edge in enumerate(edges[1:-1], start=1):
        if edge - edges[kept[-1]] > least and edges[-1] - edge > least:
            kept.append(i)
    return [*kept, edges.size - 1] if edges[-1] - edges[0] > least else kept[:1]


def _piecewise(edges: Vector, counts: Vector) -> Weight:
    """Return the weight of a histogram, without its empty bins at both ends."""
    filled = np.flatnonzero(counts)
    first, end = filled[0], filled[-1] + 1
    edges, counts = edges[first : end + 1], counts[first:end]
    shares = counts / counts.max()  # a sum of huge counts would overflow
    heights = shares / shares.sum() / np.diff(edges)
    padded = np.concatenate([[0.0], heights, [0.0]])
    content = np.concatenate([edges, heights]) + 0.0
    digest = hashlib.sha256(content.astype("<f8").tobytes()).hexdigest()[:16]
    return Weight(
        f"histogram:{counts.size} bins,{digest}",
        (float(edges[0]), float(edges[-1])),
        lambda x: padded[np.searchsorted(edges, x, side="right")],
        tuple(edges[1:-1].tolist()),
    )


def _numbers(what: str, value: Any, flat: bool = True) -> Vector:
    """Return real numbers as an array of doubles; on failure the message begins with `what`."""
    try:
        array = np.asarray(value)
        # NumPy would convert strings and objects to numbers; True and False are not measurements.
        if array.dtype.kind not in "iuf" and array.size:
            raise TypeError
    except (TypeError, ValueError, OverflowError):
        raise FewbitError(f"{what} must be an array of real numbers") from None
    if flat and array.ndim != 1:
        raise FewbitError(f"{what} must be a flat array, not one of {array.ndim} dimensions")
    with np.errstate(over="ignore"):  # a longdouble that overflows is rejected as infinite
        return array.astype(np.float64)


def _check_range(what: str, values: Vector) -> None:
    outside = ~(np.abs(values) <= FURTHEST)
    if outside.any():
        bad = _first(outside)
        raise FewbitError(f"every {what} must lie within ±{FURTHEST:g}; one is {values[bad]:g}")


def _first(condition: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(condition)[0])
