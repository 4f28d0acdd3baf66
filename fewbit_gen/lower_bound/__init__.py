"""A lower bound on the error of *every* table of one kind with K levels, as close to the optimum as requested.

A table cuts a line with K − 1 boundaries: the x axis for kind `interval`, the axis of values g of f' for `shared`.
At the best table's boundary s_i, g(s_i) is the midpoint of the levels y_i, y_{i+1} on its sides, or jumps across it. So
if s_i is moved to the nearest edge e_i of a mesh with the levels unchanged, the error grows by at most

    2 (y_{i+1} − y_i) ∫ |g − g(s_i)| w      between s_i and e_i,

which decreases with the square of the cell size. Hence, for the best table and the best levels of moved boundaries,

        error  ≥  Σ over segments of  cost(e_{i−1}, e_i) − the increase due to its two ends,

and the least such sum over all paths along the edges is a lower bound. Two dynamic programmes find it:

penalised   Allow any number of segments, at a penalty of λ for each. Then for any λ the least sum minus λK is a bound;
            it is the best one if the least path has K segments. One layer serves all k, and long segments are
            pruned (as in PELT, Killick et al. 2012), so that the time of a pass is per edge, not per pair of edges.
layered     The least sum of exactly K segments, along edges that may be the k-th boundary. Needed only if no λ yields
            K segments: even derivatives such as tanh's favour an odd number of intervals.

Both run from either end, which gives the least sum through each edge. If that sum exceeds the error of the known
table, the best table has no boundary near the edge. The mesh is refined where a boundary may still lie and closed
elsewhere, and the gap shrinks with every pass.

The arithmetic is double precision with an allowance for rounding, and g is assumed monotone in a cell if its ends and
middle are: a numerical certificate, not one in interval arithmetic.

    mesh.py          edges, and which cells may still hold a boundary
    certificate.py   the passes
    stochastic.py    the same for levels that f' is rounded to at random, which has a shorter proof

The programmes themselves are in ../paths.py, the search for λ in ../penalty.py.
"""

from .certificate import TOLERANCE, Certificate, certificate

__all__ = ["TOLERANCE", "Certificate", "certificate"]
