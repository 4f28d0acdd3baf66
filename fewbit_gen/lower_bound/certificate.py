"""The optimality certificate of a table: repeated passes over a mesh that is refined where necessary."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...tables import Table
from ..effort import OutOfTime
from ..grid import resolved_grid
from ..moments import Moments
from ..paths import F2, layered, least_penalty, path_to, penalised, reversed_places
from ..penalty import best_penalty
from ..reflection import lost_to_rounding
from .mesh import MAX_CELLS, Indices, Mask, Mesh, Problem, Vector, cut_to_loss, interval_cells, narrowed, shared_cells
from .stochastic import stochastic_bound

TOLERANCE = 1e-6  # target of (error − bound) / error
_FIRST_CELLS = 512
# Permitted loss from moving a boundary to an edge of the first mesh, relative to a level's share of the error; and
# its reduction per pass.
_FIRST_LOSS, _FINER = 1.0, 4
_LAYERS_FROM = 0.1  # the loss below which the table, not the mesh, is the reason that no λ yields K segments
_WORTH_WHILE = 1e-9  # minimum relative improvement of a better table
_PAIRS = 3e9  # limit of compared pairs of edges: about ten seconds
_CELL_PAIRS = 300  # pairs that cost as much time as the moments of a cell


@dataclass(frozen=True)
class Certificate:
    """The result.

    Attributes:
        bound: no table of the kind with K levels has a smaller error.
        better: boundaries, on the line, of a table with a smaller error than the known one, if the search found one
            and stopped; its levels for kind `stochastic`.
    """

    bound: float
    better: Vector | None


def certificate(moments: Moments, table: Table, K: int, tolerance: float = TOLERANCE) -> Certificate:
    """Return a bound on the error of every table of this kind with K levels, or a better table.

    It stops once (error − bound) / error is at most `tolerance`, or when continuing would take too long.

    Args:
        moments: the problem of the table.
        table: a table with its error; the bound is close only if it is the best one.
        K: number of levels, at least that of the table.
        tolerance: the relative gap to reach.
    """
    if K == 1:
        return Certificate(table.error, None)
    if table.kind == "stochastic":
        return Certificate(*stochastic_bound(moments, table, K, tolerance))
    levels = np.sort(table.levels) - moments.centre
    lost = lost_to_rounding(moments, table)
    if table.error <= _rounding(moments.prefix[:, -1:], K, lost):
        return Certificate(0.0, None)  # nothing exceeds rounding
    low, high = float(moments.at_cell_ends.min()), float(moments.at_cell_ends.max())
    if table.kind == "interval":
        edges = resolved_grid(moments.activation, moments.weight, max(_FIRST_CELLS, 4 * K), 8, moments.unseen)
        at, heights = table.boundaries, np.abs(np.diff(table.levels))
        cells_of = partial(interval_cells, moments)
    else:
        margin = 1e-9 * max(1.0, abs(low), abs(high))
        edges = np.linspace(low - margin, high + margin, max(_FIRST_CELLS, 4 * K) + 1)
        at, heights = 0.5 * (levels[1:] + levels[:-1]), np.diff(levels)
        cells_of = partial(shared_cells, moments)
    jump = partial(np.interp, xp=at, fp=heights) if at.size else np.ones_like
    beyond = 0.01 * (high - low)  # between two points of the grid g may go further
    span = (low - beyond, high + beyond)
    return lower_bound(Problem(cells_of, edges, K, table.error, jump, span, lost), tolerance)


@dataclass
class _Budget:
    """The remaining budget in compared pairs of edges: a count instead of a clock, so that results are reproducible."""

    left: float

    def penalised(self, places: Vector, penalty: float) -> tuple[Vector, Indices]:
        """Run the penalised programme and charge its pairs."""
        least_to, origin, pairs = penalised(places, penalty)
        self.left -= pairs
        return least_to, origin

    def least_path(self, places: Vector, sums: dict[float, Vector], penalty: float) -> tuple[float, Indices]:
        """Return the least penalised sum and its path, and store in `sums` the sums to every place."""
        sums[penalty], origin = self.penalised(places, penalty)
        return float(sums[penalty][-1]), path_to(origin, origin.size - 1)


def lower_bound(problem: Problem, tolerance: float = TOLERANCE) -> Certificate:
    """Return a lower bound of the error of all tables, at most `problem.error`; see `certificate`.

    If the time limit of `effort.within` is reached, it is the best bound found until then.
    """
    error, K = problem.error, problem.K
    budget = _Budget(_PAIRS)
    mesh = Mesh(problem.edges, np.ones(problem.edges.size - 1, dtype=np.bool_))
    bound, penalty, loss_allowed = 0.0, None, _FIRST_LOSS
    with suppress(OutOfTime):
        while budget.left > 0 and mesh.edges.size < MAX_CELLS:
            mesh, places = cut_to_loss(problem, mesh, loss_allowed * error / K)
            budget.left -= _CELL_PAIRS * mesh.edges.size
            rounding = _rounding(places, K, problem.rounding)
            enough = _enough(error, tolerance, rounding)
            least = least_penalty(places)
            between = least, max(float(places[F2, -1]), 2 * least)
            sums: dict[float, Vector] = {}
            trial = best_penalty(partial(budget.least_path, places, sums), K, between, penalty, enough)
            penalty = trial.penalty
            bound = max(bound, min(trial.bound - rounding, error))
            better = _better(problem, mesh, places, trial.path)
            if better is not None or trial.bound >= enough:
                return Certificate(bound, better)
            after, _ = budget.penalised(reversed_places(places), penalty)
            through = sums[penalty] + after[::-1] - penalty * K
            alive = np.zeros(mesh.edges.size, dtype=np.bool_)
            alive[mesh.places] = through[1:-1] <= error + rounding
            if trial.missed and loss_allowed < _LAYERS_FROM:
                windows = _windows(problem, mesh, places, penalty, budget) & alive
                layered = _by_layers(problem, mesh, windows, loss_allowed, tolerance, budget)
                return Certificate(max(bound, layered.bound), layered.better)
            mesh, _ = narrowed(mesh, alive)
            loss_allowed = _next_loss(loss_allowed, tolerance)
    return Certificate(bound, None)


def _better(problem: Problem, mesh: Mesh, places: Vector, path: Indices) -> Vector | None:
    """Return the boundaries of `path` if they make a table with a smaller error than the known one."""
    if path.size > problem.K + 1:
        return None
    w, fw, f2 = np.diff(places[: F2 + 1, path], axis=1)
    cost = float(np.maximum(f2 - fw * fw / np.where(w > 0, w, 1), 0.0)[w > 0].sum())
    if cost >= problem.error * (1 - _WORTH_WHILE) - _rounding(places, problem.K, problem.rounding):
        return None
    return np.unique(mesh.edges[mesh.places][path[1:-1] - 1])


def _next_loss(loss: float, tolerance: float) -> float:
    """Return the permitted loss of the next mesh: reduced by a factor, and finally just below the tolerance."""
    least = 0.9 * tolerance
    return loss / _FINER if loss / _FINER > least * np.sqrt(_FINER) or loss <= least else least


def _enough(error: float, tolerance: float, rounding: float) -> float:
    """Return the sum from which a bound is good enough, or from which a finer mesh would only resolve rounding."""
    return error - max(tolerance * error - rounding, rounding)


def _rounding(places: Vector, K: int, lost: float) -> float:
    """Return a bound of the rounding error of a sum of K costs, each the difference of prefix sums.

    `lost` is the error due to the mass, which is larger if nearly all mass lies where f' does not vary.
    """
    return max(lost, 1e-15 * K * float(places[F2, -1]))


def _by_layers(
    problem: Problem, mesh: Mesh, windows: Mask, loss_allowed: float, tolerance: float, budget: _Budget
) -> Certificate:
    """Continue with the layered programme if no λ yields K segments, with a window for each boundary.

    Args:
        problem: the problem to bound.
        mesh: the mesh after the penalised programme.
        windows: (K − 1, n + 1) which edges may be the k-th boundary.
        loss_allowed: permitted loss of that mesh.
        tolerance: the relative gap to reach.
        budget: the remaining budget.
    """
    error, K = problem.error, problem.K
    bound = 0.0
    try:
        while windows.any(axis=1).all():
            mesh, source = narrowed(mesh, np.logical_or.reduce(windows, axis=0))
            windows = _carried(windows, source)
            loss_allowed = _next_loss(loss_allowed, tolerance)
            edges = mesh.edges
            mesh, places = cut_to_loss(problem, mesh, loss_allowed * error / K)
            windows = _carried(windows, np.where(np.isin(mesh.edges, edges), np.searchsorted(edges, mesh.edges), -1))
            windows &= mesh.places
            among = np.cumsum(mesh.places, dtype=np.int64)  # index of each edge among the places; 0 is the start
            layer, edge = np.nonzero(windows)
            members, start = among[edge], np.searchsorted(layer, np.arange(K))
            sizes = np.diff(start).astype(np.float64)
            budget.left -= _CELL_PAIRS * mesh.edges.size + 2 * float((sizes[1:] * sizes[:-1]).sum())
            if budget.left <= 0 or mesh.edges.size > MAX_CELLS:
                return Certificate(bound, None)
            before, least, path = layered(places, members, start)
            last = places.shape[1] - 1
            after, _, _ = layered(
                reversed_places(places), (last - members)[::-1].copy(), (start[-1] - start)[::-1].copy()
            )
            rounding = _rounding(places, K, problem.rounding)
            bound = max(bound, min(least - rounding, error))
            better = _better(problem, mesh, places, path)
            if better is not None or least >= _enough(error, tolerance, rounding):
                return Certificate(bound, better)
            windows[layer, edge] = before + after[::-1] <= error + rounding
    except OutOfTime:
        return Certificate(bound, None)
    return Certificate(error, None)  # a boundary without a place: no table is better than the known one


def _windows(problem: Problem, mesh: Mesh, places: Vector, penalty: float, budget: _Budget) -> Mask:
    """Return (K − 1, n + 1): which edges may be the k-th boundary.

    A path's sum with k segments is at least the least penalised sum less λk, whatever λ.
    """
    error, K = problem.error, problem.K
    k = np.arange(1, K)[:, None]
    before = after = np.full((K - 1, places.shape[1]), -np.inf)
    for factor in (1.0, 1 - 1 / K, 1 + 1 / K, 1 - 4 / K, 1 + 4 / K, 0.25, 4.0):
        trial = penalty * factor
        if trial < least_penalty(places):
            continue
        before = np.maximum(before, budget.penalised(places, trial)[0] - trial * k)
        after = np.maximum(after, budget.penalised(reversed_places(places), trial)[0][::-1] - trial * (K - k))
    windows = np.zeros((K - 1, mesh.edges.size), dtype=np.bool_)
    windows[:, mesh.places] = (before + after)[:, 1:-1] <= error + _rounding(places, K, problem.rounding)
    return windows


def _carried(windows: Mask, source: Indices) -> Mask:
    """Return the windows on a mesh whose edges were `source` of the old one; a new edge inherits its neighbours'."""
    old = np.flatnonzero(source >= 0)
    n = np.arange(source.size)
    left = source[old[np.clip(np.searchsorted(old, n, side="right") - 1, 0, old.size - 1)]]
    right = source[old[np.clip(np.searchsorted(old, n, side="left"), 0, old.size - 1)]]
    return windows[:, left] | windows[:, right]
