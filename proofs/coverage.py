"""Kind `stochastic`: whether each value of f' lies between the two levels that its piece of x is rounded to.

Only then is E[q(x)] = f'(x). It is shown for |x| ≤ `FURTHEST`, wherever the mass of w lies; for an f' that oscillates,
whose pieces no table can follow so far, for |x| ≤ `NEAR` and the domain of w.
"""

from itertools import pairwise

from flint import arb, arb_series, ctx

from .derivatives import OSCILLATING
from .document import Refused
from .integrals import Integrand

SLACK = 2e-9  # by which f' may exceed its levels: softplus' jumps by 2.1e-9 at its threshold, from 1 − σ(20) to 1
NEAR, FURTHEST = 40.0, 1e9
# A ball over [-b, -a] with b > 2 a has a square that may be negative, whose exponential says nothing.
_CUTS = [sign * 2.0**k for sign in (-1, 1) for k in range(3, 30)]


def span(f: Integrand) -> tuple[float, float]:
    """Return the interval on which a table has to be without bias."""
    reach = NEAR if f.activation in OSCILLATING else FURTHEST
    return min(-reach, f.domain[0]), max(reach, f.domain[1])


def check_coverage(f: Integrand, boundaries: list[float], codes: list[int], levels: list[float]) -> None:
    """Raise `Refused` unless each value of f' on `span` lies between its levels, but for `SLACK`."""
    begin, end = span(f)
    inner = sorted({x for x in (*boundaries, *f.kinks, *_CUTS, 0.0) if begin < x < end})
    piece, todo = 0, list(pairwise([begin, *inner, end]))[::-1]
    cap, ctx.cap = ctx.cap, 2  # a value and a slope
    try:
        while todo:
            a, b = todo.pop()
            while piece < len(boundaries) and boundaries[piece] < b:
                piece += 1
            low, high = _range(f, a, b)
            least, most = levels[codes[piece]] - SLACK, levels[min(codes[piece] + 1, len(levels) - 1)] + SLACK
            if low >= least and high <= most:
                continue
            # Between two neighbouring doubles f' may jump: the kink of a table is the double before f's.
            middle, narrowest = (a + b) / 2, 4e-15 * max(abs(a), abs(b), 1e-300)
            if b - a <= narrowest:
                continue
            at = f.g(arb_series([arb(middle)]), middle)[0]
            if not (at >= least or at <= most) or at < least or at > most:
                raise Refused(f"f' does not lie between its two levels at x = {middle!r}")
            todo += [(middle, b), (a, middle)]
    finally:
        ctx.cap = cap


def _range(f: Integrand, a: float, b: float) -> tuple[arb, arb]:
    """Return bounds of f' on (a, b]: over the whole, by its slope from the middle, or at the ends if it is monotone."""
    f.work(1)
    middle = (a + b) / 2
    try:
        whole = f.g(arb_series([arb(a).union(arb(b)), 1]), middle)
    except ValueError:  # a denominator that may be 0: 1 + x² of a ball about 0
        return arb("-inf"), arb("inf")
    value, slope = whole[0], whole[1]
    if slope >= 0 or slope <= 0:
        ends = [f.g(arb_series([arb(x)]), middle)[0] for x in (a, b)]
        return min(x.lower() for x in ends), max(x.upper() for x in ends)
    centred = f.g(arb_series([arb(middle)]), middle)[0] + slope * arb(0, arb(b) - a) / 2
    return value.lower().max(centred.lower()), value.upper().min(centred.upper())
