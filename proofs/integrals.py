"""Integrals of w, gw and g²w over parts of the x axis, in balls: g = f' of a named activation, w a named weight."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from flint import arb, arb_mat, arb_series

from .derivatives import DERIVATIVES, ONE
from .document import Refused

ORDER = 10  # even: of a Taylor polynomial
MOST_WORK = 300_000  # evaluations of a part: 0.3 ms each; of the shipped tables of 4 bits none needs more than 50,000
FURTHEST = 1e9  # of the domain of w


class Part(NamedTuple):
    """Part of the x axis, up to `end`: integrals of w, gw and g²w, the range of g, and whether g is monotone."""

    end: float
    moments: arb_mat
    low: arb
    high: arb
    monotone: bool


class Integrand:
    """g and w of a problem, and integrals over the domain of w."""

    def __init__(self, activation: str, weight: tuple[str, float, float]) -> None:
        family, a, b = weight
        self.activation = activation
        self.domain = (a, b) if family == "uniform" else (a - 12 * b, a + 12 * b)
        if not -FURTHEST <= self.domain[0] < self.domain[1] <= FURTHEST:
            raise Refused(f"not a proof: a weight lies within ±{FURTHEST:g} and has some width")
        top = 1 / (b * (2 * arb.pi()).sqrt())
        self.density = ONE if family == "uniform" else lambda x: top * (-((x - a) / b) * ((x - a) / b) / 2).exp()
        self.kinks, self.pieces = DERIVATIVES[activation]
        self._tail = None if family == "uniform" else (abs(a), b)
        self._work = MOST_WORK

    def work(self, amount: int) -> None:
        """Count `amount` evaluations; raises `Refused` once they are more than any proof should need."""
        self._work -= amount
        if self._work < 0:
            raise Refused(f"the proof takes more than {MOST_WORK} evaluations of f'")

    def beyond(self, most: float) -> arb:
        """Return what a table whose levels are at most `most` loses at most beyond the domain: 3.6e-33 of a normal w.

        There |g(x)| ≤ 2 + 2 |x| for each activation, so the loss is at most (c + 2 b |z|)² ≤ 2 c² + 8 b² z² with
        x = a + b z and c = 2 + 2 |a| + most; over |z| > 12 the integrals of 1 and z² by the density φ are known.
        """
        if self._tail is None:
            return arb(0)
        a, b = self._tail
        c, mass = 2 + 2 * arb(a) + most, (12 / arb(2).sqrt()).erfc()
        return 2 * c * c * mass + 8 * arb(b) ** 2 * (mass + 24 * arb(-72).exp() / (2 * arb.pi()).sqrt())

    def g(self, x: arb_series, at: float) -> arb_series:
        """Return g(x), by the piece that holds `at`."""
        return self.pieces[bisect_left(self.kinks, at)](x)

    def parts(self, points: list[float], split: Callable[[Part], bool] = lambda part: False) -> Iterator[Part]:
        """Yield parts of the domain that end at `points` and kinks, none of them to `split` if it can be halved."""
        low, high = self.domain
        even = (low + (high - low) * i / 64 for i in range(65))
        cuts = sorted({low, high, *(x for x in (*points, *self.kinks, *even) if low < x < high)})
        todo = list(pairwise(cuts))[::-1]
        while todo:
            a, b = todo.pop()
            part, middle = self.part(a, b), (a + b) / 2
            sharp = all(m.rad() < 1e-20 * (1 + m.abs_upper()) for m in (*part.moments.entries(), part.high - part.low))
            if (sharp and not split(part)) or not a + 1e-13 * (1 + abs(a)) < middle < b:
                yield part
            else:
                todo += [(middle, b), (a, middle)]

    def part(self, a: float, b: float) -> Part:
        """Return the part (a, b]: Taylor polynomials about its middle, with the last coefficient over all of it."""
        self.work(1)
        r, near, far = (arb(b) - a) / 2, arb_series([(arb(a) + b) / 2, 1]), arb_series([arb(a).union(arb(b)), 1])
        powers = list(accumulate([r] * (ORDER + 1), mul))
        (g, w), (g_far, w_far) = ((self.g(x, (a + b) / 2), self.density(x)) for x in (near, far))

        def integral(h: arb_series, rest: arb_series) -> arb:
            terms = [h[k] * powers[k] / (k + 1) for k in range(0, ORDER, 2)]
            return 2 * (sum(terms, start=arb(0)) + rest[ORDER] * powers[ORDER] / (ORDER + 1))

        def value(t: arb) -> arb:
            total = g_far[ORDER]
            for k in reversed(range(ORDER)):
                total = total * t + g[k]
            return total

        moments = [integral(w, w_far), integral(g * w, g_far * w_far), integral(g * g * w, g_far * g_far * w_far)]
        monotone = bool(g_far[1] >= 0 or g_far[1] <= 0)
        ends = (value(r), value(-r)) if monotone else (value(arb(0, r)),)
        return Part(b, arb_mat(3, 1, moments), min(x.lower() for x in ends), max(x.upper() for x in ends), monotone)
