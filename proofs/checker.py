"""Checks, in ball arithmetic, a proof that no few-bit table has an error below a bound. It needs python-flint alone.

    python -m fewbit.proofs gelu.proof.json

A table of K levels cuts a line into n segments, and its error is the sum of what they cost. With g = f' the line is

    interval      the x axis, n = K               C(s, t) = min_y ∫ (g − y)² w    over s < x ≤ t
    shared        the values of g, n = K          the same                        over s < g(x) ≤ t
    stochastic    the values of g, n = K − 1      C(s, t) = ∫ (t − g)(g − s) w    over s < g(x) ≤ t

A proof is a function V_k of the line for each k with

    V_0 = 0 at its begin,    V_{k+1}(t) ≤ V_k(s) + C(s, t) for all s ≤ t,    V_n = bound at its end,

so that n segments cost no less than the bound. On a cell of layer k, V_k is value + slope · μ, where μ is the mass
(stochastic: the length) from the cell's begin. Of a segment from cell A to cell B, x and y are the μ that it takes of
them, and W, FW, F² are the integrals of w, gw, g²w between them. With ȳ = FW/W, and d ≤ |g − ȳ| ≤ r on each cell,

    C(s, t)  ≥  F² − FW²/W + x d_A² + y d_B² − (x r_A + y r_B)² / (W + x + y),
    C(s, t)  ≥  C(end of A, begin of B) + x ∫ (t − g) w + y ∫ (g − s) w    stochastic: C is convex in s and in t.

Both right sides are concave in (x, y), so that the corners suffice. Mass beyond the line's ends would only add to C.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, chain, pairwise, product
from typing import Any, NamedTuple

from flint import arb, arb_mat, arb_series, ctx

from . import document
from .coverage import check_coverage, span
from .document import Proof, Proven, Refused
from .integrals import ORDER, Integrand, Part

BITS = 96  # of a ball's middle
ROOM, LEAST = 1e-9, 1e-14  # by which a table's error may be off: relative to it, and at least


class Cell(NamedTuple):
    """A cell of a layer: its ends, (W, FW, F²) up to each, the range of g; μ; V = value + slope · μ, at most top."""

    begin: float
    end: float
    before: list[arb]
    after: list[arb]
    low: arb
    high: arb
    measure: arb
    value: arb
    slope: arb
    top: arb


def cells(f: Integrand, points: list[float], crossings: list[float] | None, stochastic: bool) -> Callable[..., Cell]:
    """Return what makes a cell from one of `points` to another: of x, or of g, given roughly where it crosses them."""
    along_x = crossings is None
    sure, unsure = ([arb_mat(3, 1)] * (len(points) + 1) for _ in range(2))
    ranges = [[arb(v) for v in ([] if along_x else points[max(i - 1, 0) : i + 1])] for i in range(len(points) + 1)]

    def places(part: Part) -> tuple[int, int]:
        low, high = (part.end, part.end) if along_x else (part.low, part.high)
        return bisect_left(points, low), bisect_left(points, high)

    def split(part: Part) -> bool:
        first, last = places(part)
        return first < last or (along_x and not part.monotone and part.high - part.low > 1e-12)

    around = [x + side * 2.0**-44 * (1 + abs(x)) for x in crossings or () for side in (-1, 1)]
    for part in f.parts(points if along_x else around, split):
        first, last = places(part)
        sure[last] += part.moments
        ranges[last] += [part.low, part.high] if along_x else []
        mass, g = part.moments[0, 0].union(arb(0)), part.low.union(part.high)
        f.work((last - first) // 100)
        for i in range(first, last):  # it may lie on either side of point i
            unsure[i] += arb_mat(3, 1, [mass, mass * g, mass * g * g])
    sums = [a + b for a, b in zip(accumulate(sure), unsure, strict=True)]

    def cell(i: int, j: int, value: float, slope: float) -> Cell:
        measure = arb(points[j]) - points[i] if stochastic else sums[j][0, 0] - sums[i][0, 0]
        g = list(chain.from_iterable(ranges[i + 1 : j + 1])) or [arb(0)]
        sides = points[i], points[j], sums[i].entries(), sums[j].entries()
        return Cell(*sides, min(g), max(g), measure, arb(value), arb(slope), value + slope * measure)

    return cell


def holds(a: Cell, b: Cell, stochastic: bool) -> bool:
    """Return whether V(t) ≤ V(s) + C(s, t) is proven for all s in `a` and t ≥ s in `b`, a cell of the next layer."""
    most = b.top - a.value
    if a.end >= b.begin:
        return most <= 0
    (u, fu, u2), (v, fv, v2) = a.after, b.before
    w, fw, f2 = v - u, fv - fu, v2 - u2
    if not (stochastic or w > 0):
        return most <= 0
    s, t, mean = a.end, b.begin, arb(0) if stochastic else fw / w
    cost = fw * s + fw * t - w * s * t - f2 if stochastic else f2 - fw * mean
    if cost >= most:
        return True
    left, right, r_a, r_b = w * t - fw, fw - w * s, arb(0), arb(0)
    if not stochastic:
        (d_a, r_a), (d_b, r_b) = (
            ((c.low - mean).max(mean - c.high).max(arb(0)), (c.high - mean).max(mean - c.low)) for c in (a, b)
        )
        left, right = d_a * d_a, d_b * d_b
    for x, y in product((arb(0), a.measure), (arb(0), b.measure)):
        bend = x * r_a + y * r_b
        least = cost + x * left + y * right - (0 if stochastic else bend * bend / (w + x + y))
        if not least >= b.value - a.value + y * b.slope - (a.measure - x) * a.slope:
            return False
    return True


def error_of(f: Integrand, proof: Proof) -> arb:
    """Return the error of the proof's table."""
    stochastic, levels, error = proof.kind == "stochastic", proof.levels, arb(0)
    for part in f.parts(proof.boundaries):
        code = proof.codes[bisect_left(proof.boundaries, part.end)]
        a, b = arb(levels[code]), arb(levels[min(code + stochastic, len(levels) - 1)])
        w, fw, f2 = part.moments.entries()
        error += (fw * (a + b) - w * a * b - f2) * (1 if stochastic else -1)
    return error


def check(content: Any) -> Proven:
    """Return what a proof shows, given the JSON value that its file holds; raises `Refused` unless all of it holds."""
    before = ctx.prec, ctx.cap
    ctx.prec, ctx.cap = BITS, ORDER + 1
    try:
        return _check(document.read(content), content["table"]["weight"])
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise error if isinstance(error, Refused) else Refused(f"not a proof: {error!r:.200}") from None
    finally:
        ctx.prec, ctx.cap = before


def _check(proof: Proof, weight: str) -> Proven:
    f, stochastic, bound = Integrand(proof.activation, proof.weight), proof.kind == "stochastic", proof.bound
    if stochastic:
        check_coverage(f, proof.boundaries, proof.codes, proof.levels)
    exact = error_of(f, proof)
    if not abs(exact - proof.error) <= ROOM * proof.error + LEAST:
        raise Refused(f"the table's error is {exact.str(17)}, not {proof.error!r}")
    top = max(float((exact + f.beyond(max(map(abs, proof.levels)))).upper()), 0.0) * (1 + 1e-15)
    proven = Proven(
        proof.activation, weight, proof.kind, proof.most_levels, top, max(bound, 0.0), span(f) if stochastic else None
    )
    if bound > top:
        raise Refused(f"the bound {bound!r} is above the error of the proof's own table, {top!r}")
    if bound > 0:
        check_bound(f, proof)
    return proven


def check_bound(f: Integrand, proof: Proof) -> None:
    """Raise `Refused` unless the layers show the bound."""
    stochastic, edges = proof.kind == "stochastic", (layer.edges for layer in proof.layers)
    points = sorted({*proof.line, *chain.from_iterable(edges)})
    if len(points) < 2:
        raise Refused("a line of fewer than two points shows nothing")
    cell = cells(f, points, None if proof.kind == "interval" else proof.crossings, stochastic)
    if stochastic:
        (begin, end), levels, at = span(f), proof.levels, proof.extremes
        least, most = (f.g(arb_series([x]), x)[0] for x in at if begin <= x <= end)
        if not (least <= points[0] >= levels[0] and most >= points[-1] <= levels[-1]):
            raise Refused("the line is longer than the values of f' that are shown")
    meshes, last = [[cell(0, 0, 0.0, 0.0)]], len(points) - 1
    for edges, values, slopes in proof.layers:
        at = [bisect_left(points, x) for x in edges]
        if not (at[0] == 0 and at[-1] == last and sorted(set(at)) == at and min(slopes) >= 0):
            raise Refused("the cells of a layer do not lead from the line's begin to its end")
        meshes.append([cell(*row) for row in zip(at[:-1], at[1:], values, slopes, strict=True)])
    meshes.append([cell(last, last, proof.bound, 0.0)])
    for a, b in chain.from_iterable(product(*pair) for pair in pairwise(meshes)):
        if a.begin < b.end and not holds(a, b, stochastic):
            raise Refused(f"V is not proven from {a.begin!r}, {a.end!r} to {b.begin!r}, {b.end!r}")


def main(paths: list[str]) -> int:
    """Check the proofs in these files, and print what each shows."""
    for path in paths:
        try:
            proven = check(document.load(path))
        except (OSError, ValueError, RecursionError) as problem:
            print(f"{path}: refused: {getattr(problem, 'strerror', None) or problem}")
            return 1
        print(f"{path}: {proven}")
    return 0
