"""`fewbit.solve`: the best table for an activation and a weight, exact over a grid, then refined.

moments → exact solver (interval.py, shared.py) → refine → certificate (lower_bound/) → Table
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tables import DEFAULT_WEIGHT, Kind, Table
from ..tables.compiling import announced_compilation
from ..tables.errors import FewbitError, shown
from ..tables.table import MAX_LEVELS, check_bits, check_kind
from .activations import Activation, as_activation, times_power_of_two
from .certify import integrated_error
from .crossings import cut_by_values
from .effort import SECONDS, OutOfTime, check_effort, unhurried, within
from .grid import UNSEEN, evaluate_derivative, features
from .interval import solve_interval
from .lower_bound import certificate
from .moments import CELLS_PER_LEVEL, INTERVAL_CELLS, SHARED_CELLS, Moments
from .refine import refine
from .reflection import PLAIN, View, best_view, reflected, reflected_table, reflected_weight
from .shared import solve_shared
from .stationary_levels import stationary_levels
from .stochastic import Segments, everywhere, range_of, refined_levels, solve_stochastic
from .weights import ACCEPTED, Weight, parse_weight

# If f' varies by less than 2^-16 or more than 2^16 it is scaled, if the factor is within the range of doubles.
_ABOUT_ONE, _LARGEST_EXPONENT = 16, 1100
# Relative to the error: the permitted contribution of the rounding of f', unless that is negligible beside f'; and the
# permitted error of the lower bound.
_ROUGH, _NOISY, _NEGLIGIBLE = 1e-3, 1e-12, 1e-9
# Permitted difference of two integrals of one error: relative to it, and to ∫ (f' − mean)² w, the source of one.
_AGREED, _ROUNDING = 1e-5, 1e-12
_MOST_LOST = 0.05  # of the error: the permitted further contribution of rounding in sums of mass


@announced_compilation()
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
    effort: float | None = SECONDS,
) -> Table:
    """Return the table of least error ∫ (f'(x) − q(x))² w(x) dx.

    Args:
        activation: a name (``gelu``), a call (``softplus(beta=2)``), an expression (``x*sigmoid(1.702*x)``), an
            `Activation`, or a callable: elementwise on float64 torch tensors and differentiable there or, with
            `derivative`, on NumPy arrays.
        bits: 1 to 8, for 2^bits levels; 3 if neither this nor `levels` is given.
        kind: ``shared``, ``interval`` (each interval has its own level, as in the paper) or ``stochastic`` (levels to
            round f' to at random, without bias; f' has to be bounded).
        weight: ``uniform:A,B`` or ``normal:MEAN,DEVIATION``.
        levels: the number of levels K, 2 to 256, instead of `bits`.
        kinks: points where f' jumps or bends, in addition to those known or detected.
        derivative: f' of a callable, elementwise on NumPy arrays, in place of torch's.
        certify: whether to prove the table optimal to a millionth, which takes a second, or ten for 256 levels;
            otherwise its `lower_bound` is None.
        effort: time limit in seconds; the `lower_bound` is then the best one found within it. None for no limit, which
            gives the same numbers on every machine.

    A derivative with no more values than the table has levels (ReLU) gets its exact table, with the fewest levels
    possible.

    Raises:
        FewbitError: an argument is invalid; the message says what is accepted. Or f' cannot be integrated in double
            precision to the accuracy that a table states, has no bounds (kind ``stochastic``), or `effort` is exceeded
            before there is a table.

    Returns:
        The table; `table.lower_bound` is what no table of its kind and size can beat.

    Example:
        table = fewbit.solve("gelu", bits=3)
        table.error, table.lower_bound, table(0.5)
    """
    K = level_count(bits, levels)
    kind = check_kind(kind)
    seconds = check_effort(effort)
    try:
        with within(seconds):
            act = as_activation(activation, kinks, derivative)
            w = parse_weight(weight) if isinstance(weight, str) else weight
            if not isinstance(w, Weight):
                raise FewbitError(f"a weight is {ACCEPTED}, not {shown(w)}")
            exact = _exact_table(act, K, kind, w)
            return exact if exact is not None else _solve(act, K, kind, w, certify)
    except OutOfTime:
        raise FewbitError(
            f"no table within {seconds:g} seconds; give more effort, a narrower weight or fewer levels"
        ) from None


def level_count(bits: int | None, levels: int | None) -> int:
    """Return the number of levels that `bits` or `levels` specifies, 8 if neither; raises `FewbitError`."""
    if levels is None:
        return 2 ** check_bits(3 if bits is None else bits)
    if bits is not None:
        raise FewbitError("give bits or levels, not both")
    if isinstance(levels, bool) or not isinstance(levels, int | np.integer) or not 2 <= levels <= MAX_LEVELS:
        raise FewbitError(f"levels must be a whole number from 2 to {MAX_LEVELS}, not {shown(levels)}")
    return int(levels)


def _solve(activation: Activation, K: int, kind: Kind, weight: Weight, certify: bool, view: View = PLAIN) -> Table:
    """Return the best table over a grid that misses nothing that matters to its error, refined.

    f' is divided by a power of two if its variation is far from 1: otherwise its squares could leave the range of
    doubles, and thresholds for rounding would be wrong. If its tail is lost, the problem is reflected: reflection.py.
    """
    if kind == "stochastic":
        weight = everywhere(activation, weight)
    exponent, unseen = 0, UNSEEN
    while True:
        scaled = activation if exponent == 0 else times_power_of_two(activation, -exponent)
        moments = problem_moments(scaled, weight, kind, K, unseen, view.two_sided)
        size = int(np.frexp(moments.spread)[1])
        if moments.spread > 0 and abs(size) > _ABOUT_ONE and abs(exponent + size) <= _LARGEST_EXPONENT:
            exponent += size
            continue
        table = solve_on_grid(moments, K, kind)
        with unhurried():
            _, less = integrated_error(table, scaled, weight, K, unseen)
        known = features(scaled, weight, unseen).edges
        if np.array_equal(known, features(scaled, weight, less).edges):
            break
        unseen = less
    moments = replace(moments, unseen=less)
    other = best_view(moments, table) if view == PLAIN else PLAIN
    if other != PLAIN:
        image = _solve(reflected(activation, other), K, kind, reflected_weight(weight, other), certify, other)
        return reflected_table(image, other)
    if table.levels.size == 1:
        table = replace(table, lower_bound=0.0)
    elif certify:
        table = with_lower_bound(moments, table, K, kind)
    return _scaled_table(check_integrals(table, moments), exponent)


def solve_on_grid(moments: Moments, K: int, kind: Kind) -> Table:
    """Return the best table over the grid, refined."""
    if kind == "stochastic":
        ends = range_of(moments.activation, moments)
        if ends[1] - ends[0] > 4 * np.finfo(float).eps * max(abs(moments.centre), *map(abs, ends)):
            return polish(moments, kind, solve_stochastic(moments, ends, K))
    if kind == "stochastic" or _is_constant(moments):
        level = np.array([moments.centre])
        spec = moments.weight.spec
        table = Table(moments.activation.name, kind, spec, np.empty(0), np.zeros(1, np.uint8), level, 0.0)
        return replace(table, error=_table_error(table, moments))
    if kind == "interval":
        return polish(moments, kind, solve_interval(moments, K))
    levels = solve_shared(moments, K)
    return polish(moments, kind, 0.5 * (levels[1:] + levels[:-1]))


def with_lower_bound(moments: Moments, table: Table, K: int, kind: Kind) -> Table:
    """Return `table`, or a better one found by the certificate, with its lower bound."""
    while True:
        found = certificate(moments, table, K)
        try:
            better = table if found.better is None else polish(moments, kind, found.better)
        except OutOfTime:
            better = table
        if not better.error < table.error:
            return replace(table, lower_bound=min(found.bound, table.error))
        table = better


def check_integrals(table: Table, moments: Moments) -> Table:
    """Return `table` with its error and bound limited to what is proven.

    Raises:
        FewbitError: the rounding of f' exceeds the error, or the solver's integral differs from the certificate's.
    """
    found = features(moments.activation, moments.weight, moments.unseen)
    # By the triangle inequality: √error is off by at most √noise.
    # (a segment's b − a, which multiplies the rounding of f' in a variance, is √6 deviations where values are spread)
    share = math.sqrt(6.0) if table.kind == "stochastic" else 2.0
    allowance = share * math.sqrt(table.error * found.noise) + found.noise
    if not (allowance <= _ROUGH * table.error or found.noise <= _NOISY**2 * found.size):
        raise FewbitError(
            f"the derivative of {table.activation} loses its digits in double precision under {table.weight}; "
            "write it so that nothing cancels"
        )
    error, rounding = moments.error(table)
    apart = abs(table.error - error)
    if not apart <= _AGREED * table.error + _ROUNDING * float(moments.prefix[2, -1]) + min(
        rounding, _MOST_LOST * table.error
    ):
        raise FewbitError(
            f"two integrals of the derivative of {table.activation} under {table.weight} differ, by {apart:.2g}; "
            "give a narrower weight"
        )
    if table.lower_bound is None or allowance <= _NEGLIGIBLE * table.error:
        return table
    return replace(table, lower_bound=max(0.0, table.lower_bound - allowance))


def _scaled_table(table: Table, exponent: int) -> Table:
    """Return the table of 2^exponent · f'; raises `FewbitError` if its numbers overflow."""
    if exponent == 0:
        return table
    with np.errstate(over="ignore", under="ignore"):
        levels = np.ldexp(table.levels, exponent)
        error = float(np.ldexp(table.error, 2 * exponent))
        bound = None if table.lower_bound is None else float(np.ldexp(table.lower_bound, 2 * exponent))
    if not (np.isfinite(levels).all() and math.isfinite(error)):
        raise FewbitError(f"the error of a table of {table.activation} is beyond double precision; scale it down")
    if table.error > 0 and error < np.finfo(float).tiny:
        raise FewbitError(f"the error of a table of {table.activation} is below double precision; scale it up")
    return replace(table, levels=levels, error=error, lower_bound=bound)


def _table_error(table: Table, moments: Moments) -> float:
    with unhurried():
        return integrated_error(table, moments.activation, moments.weight, table.levels.size, moments.unseen)[0]


def _is_constant(moments: Moments) -> bool:
    """Return whether f' varies by no more than its rounding on the support of the weight."""
    mass, _, square = moments.prefix[:, -1]
    return bool(np.sqrt(max(square, 0.0)) <= np.sqrt(mass) * 4 * np.finfo(float).eps * abs(moments.centre))


def problem_moments(
    activation: Activation, weight: Weight, kind: Kind, K: int, unseen: float = UNSEEN, two_sided: bool = False
) -> Moments:
    """Return the moments over the grid that tables of `kind` with K levels are solved on."""
    if kind == "stochastic":
        weight = everywhere(activation, weight)
    if kind == "interval":
        return Moments.of(activation, weight, max(INTERVAL_CELLS, CELLS_PER_LEVEL * K), unseen=unseen)
    return Moments.of(activation, weight, SHARED_CELLS, 4, unseen, two_sided)


def uniform_error(activation: Activation, weight: Weight, K: int) -> float:
    """Return the error of rounding at random to K levels at equal distances, from the least to the greatest f'."""
    moments = problem_moments(activation, weight, "stochastic", K)
    return Segments.of(moments, np.linspace(*range_of(activation, moments), K)).error


def polish(moments: Moments, kind: Kind, cuts: NDArray[np.float64]) -> Table:
    """Return the stationary table near a starting point, with its error.

    Args:
        moments: the problem.
        kind: of table.
        cuts: initial cuts of x for kind `interval`, of centred f' for kind `shared`; centred levels for `stochastic`.
    """
    activation, weight = moments.activation, moments.weight
    if kind == "stochastic":
        found = Segments.of(moments, refined_levels(moments, cuts))
        levels, codes = found.levels + moments.centre, found.codes.astype(np.uint8)
        table = Table(activation.name, kind, weight.spec, found.cuts, codes, levels, 0.0)
        return replace(table, error=_table_error(table, moments))
    if kind == "interval":
        boundaries, codes = cuts, np.arange(cuts.size + 1)
    else:
        boundaries, codes = cut_by_values(moments, cuts)
        if boundaries.size > SHARED_CELLS // 2:  # it oscillates too fast for the grid
            raise FewbitError(
                f"the derivative of {activation.name} passes between its levels {boundaries.size} times "
                f"under {weight.spec}, more than can be solved; give a narrower weight or fewer levels"
            )
        codes = np.unique(codes, return_inverse=True)[1]  # renumber to 0, 1, … without unused codes
        boundaries, codes = stationary_levels(moments, boundaries, codes)
    refined = refine(moments, boundaries, codes)
    table = Table(activation.name, kind, weight.spec, refined.boundaries, codes.astype(np.uint8), refined.levels, 0.0)
    return replace(table, error=_table_error(table, moments))


def _exact_table(activation: Activation, K: int, kind: Kind, weight: Weight) -> Table | None:
    """Return the table of a piecewise-constant derivative, or None if there is none with K levels."""
    if not activation.step:
        return None
    kinks = np.asarray(activation.kinks)
    # Inside each piece: the value of f' at a single point, such as 1/x at 0, belongs to no piece.
    ends = min(2 * np.abs(kinks).max(initial=0) + 1, np.finfo(float).max)
    edges = np.concatenate([[-ends], kinks, [ends]])
    values = evaluate_derivative(activation, 0.5 * edges[:-1] + 0.5 * edges[1:])
    jumps = values[1:] != values[:-1]
    kinks, values = kinks[jumps], values[np.append(True, jumps)]
    if kind == "interval":
        levels, codes = values, np.arange(values.size)
    else:
        levels, codes = np.unique(values, return_inverse=True)
    if levels.size > K:
        return None
    return Table(activation.name, kind, weight.spec, kinks, codes.astype(np.uint8), levels, 0.0, 0.0)
