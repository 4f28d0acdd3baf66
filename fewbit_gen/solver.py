"""`fewbit.solve`: from an activation and a weight to the best table, exact over a grid, then polished.

moments → exact solver (interval.py, shared.py) → refine → Table with its error and a lower bound
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..tables import DEFAULT_WEIGHT, Kind, Table
from ..tables.errors import FewbitError, shown
from ..tables.table import MAX_LEVELS, check_bits, check_kind
from .activations import Activation, as_activation
from .certify import table_error
from .crossings import nearest_level_table
from .interval import interval_lower_bound, solve_interval
from .lower_bound import table_lower_bound
from .moments import Moments, evaluate_derivative
from .refine import refine
from .shared import shared_lower_bound, solve_shared
from .weights import ACCEPTED, Weight, parse_weight

# Cells of the solvers' grids. `interval` takes O(n²K): 4096 cells find the right valley and refinement the
# bottom. `shared` takes O(nK log n) and its lower bound tightens with the grid.
_INTERVAL_CELLS = 4096
_SHARED_CELLS = 16384
# Up to here a certificate to 1e-6 takes a second or two; beyond, one pass over the solver's own grid must do.
_CERTIFIED_LEVELS = 32


def solve(
    activation: str | Activation | Callable[..., Any],
    bits: int | None = None,
    kind: str = "shared",
    weight: str | Weight = DEFAULT_WEIGHT,
    *,
    levels: int | None = None,
    kinks: Sequence[float] = (),
    derivative: Callable[..., Any] | None = None,
    certify: bool = True,
) -> Table:
    """Return the table of least error ∫ (f'(x) − q(x))² w(x) dx.

    Args:
        activation: a name (``gelu``), a call (``softplus(beta=2)``), an expression (``x*sigmoid(1.702*x)``), an
            `Activation`, or a callable: elementwise on float64 torch tensors and differentiable there or, with
            `derivative`, on NumPy arrays.
        bits: 1 to 8, for 2^bits levels; 3 if neither this nor `levels` is given.
        kind: ``shared`` or ``interval`` (every interval has a level of its own, as in the paper).
        weight: ``uniform:A,B`` or ``normal:MEAN,DEVIATION``.
        levels: the number of levels K, 2 to 256, instead of `bits`.
        kinks: points where f' jumps or bends, beside those that are known or found.
        derivative: f' of a callable, elementwise on NumPy arrays, in place of torch's.
        certify: prove up to 32 levels best to a millionth, which can take seconds; else `lower_bound` is rough.

    A derivative that takes no more values than the table has levels (ReLU) gets its exact table, as small as
    it can be.

    Raises:
        FewbitError: an argument is wrong; the message says what is accepted.
    """
    K = _level_count(bits, levels)
    kind = check_kind(kind)
    act = as_activation(activation, kinks, derivative)
    w = parse_weight(weight) if isinstance(weight, str) else weight
    if not isinstance(w, Weight):
        raise FewbitError(f"a weight is {ACCEPTED}, not {shown(w)}")
    exact = _exact_table(act, K, kind, w)
    return exact if exact is not None else _solve(act, K, kind, w, certify)


def _level_count(bits: int | None, levels: int | None) -> int:
    if levels is None:
        return 2 ** check_bits(3 if bits is None else bits)
    if bits is not None:
        raise FewbitError("give bits or levels, not both")
    if isinstance(levels, bool) or not isinstance(levels, int | np.integer) or not 2 <= levels <= MAX_LEVELS:
        raise FewbitError(f"levels must be a whole number from 2 to {MAX_LEVELS}, not {shown(levels)}")
    return int(levels)


def _solve(activation: Activation, K: int, kind: Kind, weight: Weight, certify: bool) -> Table:
    if kind == "interval":
        moments = Moments.of(activation, weight, _INTERVAL_CELLS)
        boundaries = solve_interval(moments, K)
        codes = np.arange(boundaries.size + 1)
        bound = interval_lower_bound(moments, K)
    else:
        moments = Moments.of(activation, weight, _SHARED_CELLS, order=4)
        clusters = solve_shared(moments, K)
        boundaries, codes = nearest_level_table(moments, clusters.levels)
        if boundaries.size > _SHARED_CELLS // 2:  # it oscillates faster than the grid can follow
            raise FewbitError(
                f"the derivative of {activation.name} passes between its levels {boundaries.size} times "
                f"under {weight.spec}, more than can be solved; give a narrower weight or fewer levels"
            )
        bound = shared_lower_bound(moments, clusters.error)
    codes = _compact(codes)
    refined = refine(moments, boundaries, codes)
    table = Table(activation.name, kind, weight.spec, refined.boundaries, codes, refined.levels, 0.0)
    error = table_error(table, activation, weight)
    if certify and K <= _CERTIFIED_LEVELS:
        bound = max(bound, table_lower_bound(moments, kind, K, error))
    return _with_error(table, error, bound)


def _exact_table(activation: Activation, K: int, kind: Kind, weight: Weight) -> Table | None:
    """Return the table of a piecewise-constant derivative, or None where there is none with K levels."""
    if not activation.step:
        return None
    kinks = np.asarray(activation.kinks)
    # At a kink f' has its value from the left, as a table has at a boundary.
    last = np.nextafter(kinks[-1:], np.inf) if kinks.size else np.zeros(1)
    values = evaluate_derivative(activation, np.concatenate([kinks, last]))
    jumps = values[1:] != values[:-1]
    kinks, values = kinks[jumps], values[np.append(True, jumps)]
    if kind == "interval":
        levels, codes = values, np.arange(values.size)
    else:
        levels, codes = np.unique(values, return_inverse=True)
    if levels.size > K:
        return None
    return Table(activation.name, kind, weight.spec, kinks, codes.astype(np.uint8), levels, 0.0, 0.0)


def _compact(codes: np.ndarray) -> np.ndarray:
    """Renumber codes 0 … K − 1 in their order, leaving out those that no interval has."""
    return np.unique(codes, return_inverse=True)[1]


def _with_error(table: Table, error: float, bound: float) -> Table:
    return Table(
        table.activation,
        table.kind,
        table.weight,
        table.boundaries,
        table.codes,
        table.levels,
        error,
        min(bound, error),  # quadratures differ in their last digits
    )
