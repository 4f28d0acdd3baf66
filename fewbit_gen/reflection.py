"""Problems whose sums lose their tail: exp(0.5 x) under a Laplace weight has its largest f' where hardly any mass is.

The solvers take differences of sums from the first cell on. Beside a mass of 1 near 0 a tail of 1e-16 is lost, and with
it an error of 1e-16 · f'², which is not small where f' is 5e7. Summed from its end the tail is exact. So `interval`
solves the mirror image, in x. `shared`, which sums along the values of f', solves that of −f' if the tail has the
greatest values, and measures what is between two points from the end that is nearer.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..tables import Table
from .activations import Activation
from .moments import Moments
from .weights import Weight

Vector = NDArray[np.float64]

_EPSILON = float(np.finfo(np.float64).eps)
_LOSSY = 1e-9  # of the error: what rounding in sums of mass may take


def lost_to_rounding(moments: Moments, table: Table) -> float:
    """Return about what rounding in sums of mass takes from the error of a table, or adds to it.

    A level's square times a last digit of the mass up to its end; of all mass, where that is negligible anyway.
    """
    levels = table.levels - moments.centre
    all_of_it = 2 * _EPSILON * float((levels**2).sum() * moments.prefix[0, -1])
    if all_of_it <= _LOSSY * table.error:
        return all_of_it
    return min(all_of_it, _lost(moments, table, View(two_sided=moments.two_sided)))


@dataclass(frozen=True)
class View:
    """How a problem is summed: signs of x and of f', and whether along x from both ends."""

    x_sign: int = 1
    f_sign: int = 1
    two_sided: bool = False


PLAIN = View()


def best_view(moments: Moments, table: Table) -> View:
    """Return the view in which sums lose least; the plain one unless another is worth while."""
    if table.kind == "stochastic" or lost_to_rounding(moments, table) <= _LOSSY * table.error:
        return PLAIN
    others = (View(-1),) if table.kind == "interval" else (View(two_sided=True), View(f_sign=-1, two_sided=True))
    losses = {view: _lost(moments, table, view) for view in (PLAIN, *others)}
    best = min(losses, key=lambda view: losses[view])
    return best if losses[best] < 0.5 * losses[PLAIN] else PLAIN


def _lost(moments: Moments, table: Table, view: View) -> float:
    """Return the sum, over intervals and for `shared` over levels, of level² times a last digit of the mass so far."""
    fence = np.clip(table.boundaries, *moments.edges[[0, -1]])
    cells, squares = moments.cells[0], (table.levels - moments.centre) ** 2
    # Neither is exact from the other's sums: the mass from each end on, up to each end of an interval.
    ends = np.concatenate([moments.edges[:1], fence, moments.edges[-1:]])
    from_left = np.interp(ends, moments.edges, np.append(0.0, np.cumsum(cells)))
    from_right = np.interp(ends, moments.edges, np.append(np.cumsum(cells[::-1])[::-1], 0.0))
    left, right = from_left[1:], from_right[:-1]
    so_far = np.minimum(left, right) if view.two_sided else left if view.x_sign > 0 else right
    lost = float((squares[table.codes] * so_far).sum())
    if table.kind == "shared":
        per_interval = np.minimum(np.diff(from_left), -np.diff(from_right))
        mass = np.bincount(table.codes, weights=per_interval, minlength=table.levels.size)
        order = np.argsort(table.levels)[:: view.f_sign]
        lost += float((squares[order] * np.cumsum(mass[order])).sum())
    return 2 * _EPSILON * lost


def reflected(activation: Activation, view: View) -> Activation:
    """Return the activation whose derivative is ±f'(±x)."""

    def enclosure(low: Vector, high: Vector, digit: float) -> tuple[Vector, Vector]:
        least, most = inner(*((low, high) if view.x_sign > 0 else (-high, -low)), digit) if inner else (low, high)
        return (least, most) if view.f_sign > 0 else (-most, -least)

    inner, kinks, turns = activation.enclosure, activation.kinks, activation.turns
    if view.x_sign < 0:  # a kink is the last double of the piece on its left
        kinks = tuple(float(-np.nextafter(x, np.inf)) for x in reversed(kinks))
        turns = None if turns is None else tuple(-x for x in reversed(turns))
    return replace(
        activation,
        function=lambda x: view.x_sign * view.f_sign * activation.function(view.x_sign * x),
        derivative=lambda x: view.f_sign * activation.derivative(view.x_sign * x),
        kinks=kinks,
        turns=turns,
        base=None,
        enclosure=enclosure if inner else None,
    )


def reflected_weight(weight: Weight, view: View) -> Weight:
    """Return the weight of ±x, under its own name."""
    if view.x_sign > 0:
        return weight
    low, high = weight.domain
    breakpoints = tuple(-x for x in reversed(weight.breakpoints))
    return replace(weight, domain=(-high, -low), density=lambda x: weight.density(-x), breakpoints=breakpoints)


def reflected_table(table: Table, view: View) -> Table:
    """Return the table of ±f'(±x), given that of f'."""
    boundaries, codes, levels = table.boundaries, table.codes, view.f_sign * table.levels
    if view.x_sign < 0:
        boundaries, codes = -np.nextafter(boundaries, np.inf)[::-1], codes[::-1]
    backwards = view.x_sign < 0 if table.kind == "interval" else view.f_sign < 0
    if backwards:
        levels, codes = levels[::-1], (levels.size - 1 - codes.astype(np.intp)).astype(np.uint8)
    return replace(table, boundaries=boundaries, codes=codes, levels=levels)
