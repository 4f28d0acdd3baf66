"""A proof of a table's lower bound, which proofs/checker.py verifies in ball arithmetic; it says what a proof is.

V_k is the least cost of k segments up to t that can be shown with linear pieces on the cells of a mesh: one forward
programme finds it, a backward one the least cost from there to the end. Where both together stay below the bound that
is to be reached, the best table may have its k-th boundary, and cells are halved; elsewhere they stay coarse. So cells
become small about the boundaries of the best table (or of both, if it has a mirror image) and nowhere else.

The slope of V_k in a cell decouples the levels a, b on the two sides of a boundary: a cost of min(A, B) is at least
min(A, p) + min(B, p) − p, whatever p, and is equal to it for p between A = (g − a)² and B = (g − b)².
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tables import Table
from ..tables.errors import FewbitError, shown
from ..tables.shipped import shipped_activations
from ..tables.table import table_to_dict
from .activations import parse_activation
from .crossings import cut_by_values, repeated
from .lower_bound.mesh import Cells, interval_cells, shared_cells
from .moments import Moments
from .solver import problem_moments
from .weights import parse_weight

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

FORMAT = 1
TOLERANCE = 1e-6  # of (error − bound) / error
_AIM = 0.8 * TOLERANCE  # the rounding below takes .15 of it
_ROUNDING = 1.5e-7  # of the error: by which the bound is lowered at least, for the rounding of the numbers here
_MOST_LEVELS = 16  # of tables of 1 to 4 bits
_FIRST_CELLS = 64
_PASSES, _MOST_CELLS = 80, 2_000  # of a layer
_PATIENT = 6  # times that only the worst mergers are undone
_FINER = 4.0  # the reduction of the permitted loss of a cell per pass
_LEAST_LOSS = 0.03  # of what a layer may lose
_ROUNDED = 1e-14  # of f', relative to its range
_THIRDS = 60  # each takes one off: of two cells 3·10⁻¹¹ is left
_FAR = (-1e9, -1e3, -40.0, 40.0, 1e3, 1e9)
_DIGITS, _HALVINGS = 40, 8  # binary digits of the edges of the first mesh, and how often its narrowest cells are halved


@dataclass(frozen=True)
class _Layer:
    """A mesh of the line, (n + 1,) edges, and the slope of V on each of its cells, (n,)."""

    edges: Vector
    slopes: Vector


@dataclass(frozen=True)
class _Line:
    """The line that tables are cut from.

    Attributes:
        stochastic: whether segments cost what kind ``stochastic`` does.
        edges: of the first mesh, raw.
        centre: what raw points exceed centred ones by.
        cells_of: returns the cells between raw points.
        narrowest: width of a cell.
    """

    stochastic: bool
    edges: Vector
    centre: float
    cells_of: Callable[[Vector], Cells]
    narrowest: float


@dataclass(frozen=True)
class _Boxes:
    """The cells of a layer.

    Attributes:
        begin, end: (n,) their ends, centred.
        at_begin, at_end: (3, n) the integrals of w, gw and g²w up to there.
        low, high: (n,) bounds of g.
        mean: (n,) of g.
        mass, measure: (n,) the integral of w, and μ.
        slope: (n,) of V.
    """

    begin: Vector
    end: Vector
    at_begin: Vector
    at_end: Vector
    low: Vector
    high: Vector
    mean: Vector
    mass: Vector
    measure: Vector
    slope: Vector

    @staticmethod
    def of(layer: _Layer, line: _Line, points: Vector, cells: Cells) -> "_Boxes":
        """Return the cells of `layer`; its edges are among `points`, which `cells` lie between."""
        at = np.searchsorted(points, layer.edges)
        begin, end = layer.edges[:-1] - line.centre, layer.edges[1:] - line.centre
        at_begin, at_end = cells.prefix[:, at[:-1]], cells.prefix[:, at[1:]]
        first = np.minimum(at[:-1], cells.low.size - 1)
        low, high = np.minimum.reduceat(cells.low, first), np.maximum.reduceat(cells.high, first)
        mass, gw, _ = at_end - at_begin
        mean = np.where(mass > 0, np.clip(gw / np.where(mass > 0, mass, 1), low, high), 0.5 * (low + high))
        measure = end - begin if line.stochastic else np.maximum(mass, 0.0)
        return _Boxes(begin, end, at_begin, at_end, low, high, mean, mass, measure, layer.slopes)


@dataclass(frozen=True)
class _Steps:
    """From cell i of a layer to cell j of the next, (n, m) each.

    Attributes:
        rise: how much V may rise.
        slopes: what V's slope in i, and in j, should be.
        losses: about how much less `rise` is for the sizes of i and of j.
    """

    rise: Vector
    slopes: tuple[Vector, Vector]
    losses: tuple[Vector, Vector]


def _steps(a: _Boxes, b: _Boxes, stochastic: bool, least: float) -> _Steps:
    """Return the steps from `a` to `b`; a mass below `least` is taken for rounding."""
    w, fw, f2 = b.at_begin[:, None, :] - a.at_end[:, :, None]
    apart = (b.begin[None, :] > a.end[:, None]) & ((w > least) | stochastic)
    w = np.where(apart, w, 0.0)
    x, y, p, q = a.measure[:, None], b.measure[None, :], a.slope[:, None], b.slope[None, :]
    if stochastic:
        s, t = a.end[:, None], b.begin[None, :]
        cost = (s + t) * fw - s * t * w - f2
        left, right = t * w - fw, fw - s * w
        slopes = left, right
        losses = x * (a.mass[:, None] * (t - s + x) + y * w), y * (b.mass[None, :] * (t - s + y) + x * w)
        fine = cost + np.minimum(x * p, x * left) + np.minimum(0.0, y * (right - q))
    else:
        mean = fw / np.where(w > 0, w, 1)
        cost = f2 - fw * mean
        d, r = [], []
        for box, axis in ((a, 1), (b, 0)):
            low, high = np.expand_dims(box.low, axis), np.expand_dims(box.high, axis)
            d.append(np.maximum(np.maximum(low - mean, mean - high), 0.0) ** 2)
            r.append(np.maximum(high - mean, mean - low))
        slopes = (a.mean[:, None] - mean) ** 2, (b.mean[None, :] - mean) ** 2
        bend = (x * r[0] + y * r[1]) / np.maximum(w + x + y, 1e-300)
        losses = x * (r[0] ** 2 - d[0] + r[0] * bend), y * (r[1] ** 2 - d[1] + r[1] * bend)
        fine = np.full(w.shape, np.inf)
        for u in (0.0, x):
            for v in (0.0, y):
                mass = np.maximum(w + u + v, 1e-300)
                corner = u * d[0] + v * (d[1] - q) + (x - u) * p - (u * r[0] + v * r[1]) ** 2 / mass
                fine = np.minimum(fine, cost + corner)
    crude = np.where(apart, np.maximum(cost, 0.0), 0.0) - y * q
    rise = np.where(apart, np.maximum(fine, crude), crude)
    return _Steps(np.where(a.begin[:, None] < b.end[None, :], rise, np.inf), slopes, losses)


@dataclass(frozen=True)
class _Bounds:
    """What a pass finds for the cells of a layer, (n,) each.

    Attributes:
        forward: the greatest V that can be shown at a cell's begin.
        through: that and the least cost from there to the end.
        slope: what V's slope should be.
        loss: about how much of `through` is lost to the size of the cell.
        measure: μ.
    """

    forward: Vector
    through: Vector
    slope: Vector
    loss: Vector
    measure: Vector


@dataclass(frozen=True)
class _Proof:
    """A bound, and for each layer what a pass finds and the mesh that proves it."""

    bound: float
    found: list[_Bounds]
    layers: list[_Layer]


def _pass(line: _Line, layers: list[_Layer]) -> tuple[float, list[_Bounds]]:
    """Return the bound that a proof on these meshes shows, and what it finds for each layer."""
    ends = line.edges[[0, -1]]
    # With the first edges, where f' turns, f' is monotone between points.
    points = np.unique(np.concatenate([line.edges, *(layer.edges for layer in layers)]))
    cells = line.cells_of(points)
    least = 1e-14 * float(cells.prefix[0, -1])
    chain = (_Layer(ends[[0, 0]], np.zeros(1)), *layers, _Layer(ends[[1, 1]], np.zeros(1)))
    boxes = [_Boxes.of(layer, line, points, cells) for layer in chain]
    steps = [_steps(a, b, line.stochastic, least) for a, b in pairwise(boxes)]
    forward, origins = [np.zeros(1)], []
    for step in steps:
        total = forward[-1][:, None] + step.rise
        origins.append(total.argmin(axis=0))
        forward.append(total.min(axis=0))
    after, found = np.zeros(1), []
    for k in reversed(range(1, len(steps))):
        total = steps[k].rise + after[None, :]
        after, target, origin = total.min(axis=1), total.argmin(axis=1), origins[k - 1]
        every = np.arange(after.size)
        slope = np.minimum(steps[k - 1].slopes[1][origin, every], steps[k].slopes[0][every, target])
        loss = np.maximum(steps[k - 1].losses[1][origin, every], steps[k].losses[0][every, target])
        measure = np.maximum(boxes[k].measure, 1e-300)
        found.append(_Bounds(forward[k], forward[k] + after, np.maximum(slope, 0.0), loss, measure))
    return float(forward[-1][0]), found[::-1]


def _divided(layer: _Layer, found: _Bounds, alive: float, loss: float, narrowest: float) -> _Layer:
    """Return the mesh with cells divided that stay below `alive` and lose more than `loss`."""
    wide = (found.through < alive) & (found.loss > loss) & (np.diff(layer.edges) >= 4 * narrowest)
    parts = np.where(wide, np.where(found.loss > _FINER * loss, 4, 2), 1)
    cell, nth = repeated(parts)
    begin = layer.edges[cell] + np.diff(layer.edges)[cell] * (nth / parts[cell])
    return _Layer(np.append(begin, layer.edges[-1]), found.slope[cell])


def _merged(line: _Line, proof: _Proof, target: float) -> _Proof:
    """Return meshes of fewer cells that still prove `target`: neighbours that exceed it by far become one.

    A path below `target` leads only through cells below it. So it suffices to undo the mergers there.
    """
    keep = [np.append(True, ~_pairs(x.through - 4 * x.loss > target)) for x in proof.found]
    attempts = 0
    while True:
        meshes = [_kept(layer, few) for layer, few in zip(proof.layers, keep, strict=True)]
        bound, after = _pass(line, meshes)
        if bound >= target:
            return _Proof(bound, after, meshes)
        worst = 0.5 * (bound + target) if attempts < _PATIENT else target
        for few, x in zip(keep, after, strict=True):
            few |= (x.through < worst)[np.cumsum(few) - 1]
        attempts += 1


def _pairs(sure: Mask) -> Mask:
    """Return for each cell but the first whether it joins the one before it, which joins none: both are sure."""
    joins = sure[1:] & sure[:-1]
    run = np.arange(joins.size) - np.maximum.accumulate(np.where(joins, -1, np.arange(joins.size)))
    return joins & (run % 2 == 1)


def _kept(layer: _Layer, keep: Mask) -> _Layer:
    """Return the mesh with each cell that is not kept joined to the one before it."""
    return _Layer(
        np.append(layer.edges[:-1][keep], layer.edges[-1]), np.minimum.reduceat(layer.slopes, np.flatnonzero(keep))
    )


def _proven(line: _Line, error: float, segments: int) -> _Proof:
    """Return the first proof that comes near enough to `error`, or the last one tried."""
    layers = [_Layer(line.edges, np.zeros(line.edges.size - 1)) for _ in range(segments - 1)]
    allowed, least, target = error / segments, _LEAST_LOSS * TOLERANCE * error / segments, error * (1 - _AIM)
    proof = _Proof(*_pass(line, layers), layers)
    for _ in range(_PASSES):
        if proof.bound >= target or any(layer.slopes.size > _MOST_CELLS for layer in layers):
            break
        found = proof.found
        while allowed > least and not any(((x.through < target) & (x.loss > allowed)).any() for x in found):
            allowed /= _FINER
        found = [replace(x, slope=np.minimum(x.slope, error / segments / x.measure)) for x in found]
        layers = [_divided(layer, x, target, allowed, line.narrowest) for layer, x in zip(layers, found, strict=True)]
        proof = _Proof(*_pass(line, layers), layers)
        allowed /= _FINER
    return _merged(line, proof, target) if proof.bound >= target and layers else proof


def check_provable(activation: str, weight: str, levels: int = 2) -> None:
    """Raise FewbitError unless the checker knows the problem, for as many levels as the best table has."""
    what = None
    if activation not in shipped_activations():
        what = f"{shown(activation)}, which `fewbit tables list` does not have"
    elif weight.partition(":")[0] not in ("uniform", "normal"):
        what = f"the weight {shown(weight)}: give uniform:A,B or normal:MEAN,DEVIATION"
    elif levels > _MOST_LEVELS:
        what = f"{levels} levels: give {_MOST_LEVELS} at most"
    if what:
        raise FewbitError(f"no proof is written for {what}")


def prove(table: Table) -> dict[str, Any]:
    """Return a proof that no table of this kind with as many levels is better, to a millionth, as JSON values.

    Args:
        table: the best table, with its error, of a named activation under a weight ``uniform:…`` or ``normal:…``.

    Raises:
        FewbitError: the checker does not know the problem, or the proof does not get as near.
    """
    K = table.levels.size
    check_provable(table.activation, table.weight, K)
    content = {"format": FORMAT, "levels": K, "table": table_to_dict(table)}
    if table.error == 0:
        return content | {"bound": 0.0, "line": [], "layers": []}
    stochastic = table.kind == "stochastic"
    moments = problem_moments(parse_activation(table.activation), parse_weight(table.weight), table.kind, K)
    extremes = _extremes(moments, _FAR if stochastic else ())
    line = _line(moments, table, extremes)
    segments = K - stochastic
    proof = _proven(line, table.error, segments)
    lowered = max(_ROUNDING * table.error, 4 * np.finfo(float).eps * float(moments.prefix[2, -1])) / segments
    bound = proof.bound - segments * lowered
    gap = (table.error - bound) / table.error
    if gap > TOLERANCE:
        raise FewbitError(f"no proof of {table!r}: it reaches a bound {gap:.2g} below the error, not {TOLERANCE:g}")
    points = np.unique(np.concatenate([line.edges[[0, -1]], *(layer.edges for layer in proof.layers)]))
    content |= {
        "bound": bound,
        "line": line.edges[[0, -1]].tolist(),
        "layers": [
            {
                "edges": layer.edges.tolist(),
                "slopes": layer.slopes.tolist(),
                "values": (x.forward - k * lowered).tolist(),
            }
            for k, (layer, x) in enumerate(zip(proof.layers, proof.found, strict=True), start=1)
        ],
    }
    if table.kind != "interval":
        content["crossings"] = cut_by_values(moments, points - line.centre)[0].tolist()
    return content | ({"extremes": extremes.tolist()} if stochastic else {})


def _line(moments: Moments, table: Table, extremes: Vector) -> _Line:
    """Return the line of a table's kind, with the edges of a first mesh."""
    stochastic, centre = table.kind == "stochastic", 0.0 if table.kind == "interval" else moments.centre
    if table.kind == "interval":
        low, high = moments.edges[[0, -1]]
        inner, cells_of = np.append(_turns(moments), moments.activation.kinks), partial(interval_cells, moments)
    else:
        low, high = moments.centred(extremes) + centre
        inner, cells_of = np.empty(0), lambda points: shared_cells(moments, points - moments.centre)
        room = _ROUNDED * max(abs(low), abs(high))
        if stochastic:  # within the values that are shown, and those of the table
            low, high = max(low + room, table.levels[0]), min(high - room, table.levels[-1])
        else:
            low, high = low - room, high + room
    # Multiples of one unit, and halves of halves of such: no two edges differ by rounding alone.
    unit = 2.0 ** (np.frexp(high - low)[1] - _DIGITS)
    outwards = table.kind == "shared"
    low, high = (
        (np.floor(low / unit), np.ceil(high / unit)) if outwards else (np.ceil(low / unit), np.floor(high / unit))
    )
    low, high = low * unit, high * unit
    inner = np.round(np.append(np.linspace(low, high, _FIRST_CELLS + 1), inner) / unit) * unit
    edges = np.unique(np.concatenate([[low], inner[(inner > low) & (inner < high)], [high]]))
    return _Line(stochastic, edges, centre, cells_of, unit * 2.0**-_HALVINGS)


def _turns(moments: Moments) -> Vector:
    """Return where f' turns on the grid, as nearly as doubles can tell."""
    g = np.append(moments.at_cell_ends[0, :1], moments.at_cell_ends[1])
    steps = np.diff(g)
    steps = np.where(np.abs(steps) > _ROUNDED * moments.spread, np.sign(steps), 0.0)
    at = np.flatnonzero(steps[1:] * steps[:-1] < 0)
    rising, low, high = steps[at], moments.edges[at], moments.edges[at + 2]
    for _ in range(_THIRDS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        beyond = rising * moments.centred(second) > rising * moments.centred(first)
        low, high = np.where(beyond, first, low), np.where(beyond, high, second)
    return 0.5 * (low + high)


def _extremes(moments: Moments, further: tuple[float, ...]) -> Vector:
    """Return points at which f' is as small, and as large, as it gets on the grid and at points further out."""
    x = np.concatenate([_turns(moments), *moments.cell_ends, further])
    g = moments.centred(x)
    return x[[g.argmin(), g.argmax()]]
