"""`fewbit.solve`: from an activation and a weight to the best table, exact over a grid, then polished.

moments → exact solver (interval.py, shared.py) → refine → certificate (lower_bound.py) → Table
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tables import DEFAULT_WEIGHT, Kind, Table
from ..tables.errors import FewbitError, shown
from ..tables.table import MAX_LEVELS, check_bits, check_kind
from .activations import Activation, as_activation
from .certify import table_error
from .crossings import cut_by_values
from .interval import solve_interval
from .lower_bound import certificate
from .moments import Moments, evaluate_derivative
from .refine import refine
from .shared import solve_shared
from .stationary_levels import stationary_levels
from .weights import ACCEPTED, Weight, parse_weight

# Cells of the solvers' grids: enough to find the right valley; refinement finds the bottom.
_INTERVAL_CELLS = 4096
_CELLS_PER_LEVEL = 32
_SHARED_CELLS = 16384


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
        certify: prove the table the best to a millionth, which takes a second or, of 256 levels, ten; else its
            `lower_bound` is None.

    A derivative that takes no more values than the table has levels (ReLU) gets its exact table, as small as
    it can be.

    Raises:
        FewbitError: an argument is wrong; the message says what is accepted.
    """
    K = level_count(bits, levels)
    kind = check_kind(kind)
    act = as_activation(activation, kinks, derivative)
    w = parse_weight(weight) if isinstance(weight, str) else weight
    if not isinstance(w, Weight):
        raise FewbitError(f"a weight is {ACCEPTED}, not {shown(w)}")
    exact = _exact_table(act, K, kind, w)
    return exact if exact is not None else _solve(act, K, kind, w, certify)


def level_count(bits: int | None, levels: int | None) -> int:
    """Return the number of levels that `bits` or `levels` asks for, 8 if neither; raises `FewbitError`."""
    if levels is None:
        return 2 ** check_bits(3 if bits is None else bits)
    if bits is not None:
        raise FewbitError("give bits or levels, not both")
    if isinstance(levels, bool) or not isinstance(levels, int | np.integer) or not 2 <= levels <= MAX_LEVELS:
        raise FewbitError(f"levels must be a whole number from 2 to {MAX_LEVELS}, not {shown(levels)}")
    return int(levels)


def _solve(activation: Activation, K: int, kind: Kind, weight: Weight, certify: bool) -> Table:
    moments = problem_moments(activation, weight, kind, K)
    if _is_constant(moments):
        level = np.array([moments.centre])
        return Table(activation.name, kind, weight.spec, np.empty(0), np.zeros(1, np.uint8), level, 0.0, 0.0)
    if kind == "interval":
        table = _polished(moments, kind, solve_interval(moments, K))
    else:
        levels = solve_shared(moments, K)
        table = _polished(moments, kind, 0.5 * (levels[1:] + levels[:-1]))
    if not certify:
        return table
    while True:
        found = certificate(moments, table, K)
        better = table if found.better is None else _polished(moments, kind, found.better)
        if not better.error < table.error:
            return replace(table, lower_bound=min(found.bound, table.error))
        table = better


def _is_constant(moments: Moments) -> bool:
    """Tell whether f' varies by no more than its rounding where the weight is."""
    mass, _, square = moments.prefix[:, -1]
    return bool(square <= mass * (4 * np.finfo(float).eps * moments.centre) ** 2)


def problem_moments(activation: Activation, weight: Weight, kind: Kind, K: int) -> Moments:
    """Return the moments over the grid that tables of `kind` with K levels are solved on."""
    if kind == "interval":
        return Moments.of(activation, weight, max(_INTERVAL_CELLS, _CELLS_PER_LEVEL * K))
    return Moments.of(activation, weight, _SHARED_CELLS, order=4)


def _polished(moments: Moments, kind: Kind, cuts: NDArray[np.float64]) -> Table:
    """Return the stationary table near a start, with its error.

    Args:
        moments: the problem.
        kind: of table.
        cuts: where x, for kind `interval`, or centred f', for kind `shared`, is cut at the start.
    """
    activation, weight = moments.activation, moments.weight
    if kind == "interval":
        boundaries, codes = cuts, np.arange(cuts.size + 1)
    else:
        boundaries, codes = cut_by_values(moments, cuts)
        if boundaries.size > _SHARED_CELLS // 2:  # it oscillates faster than the grid can follow
            raise FewbitError(
                f"the derivative of {activation.name} passes between its levels {boundaries.size} times "
                f"under {weight.spec}, more than can be solved; give a narrower weight or fewer levels"
            )
        codes = np.unique(codes, return_inverse=True)[1]  # 0, 1, … without those that no interval has
        boundaries, codes = stationary_levels(moments, boundaries, codes)
    refined = refine(moments, boundaries, codes)
    table = Table(activation.name, kind, weight.spec, refined.boundaries, codes.astype(np.uint8), refined.levels, 0.0)
    return replace(table, error=table_error(table, activation, weight))


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
