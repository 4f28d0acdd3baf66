"""A lower bound on the error of *every* table of one kind with K levels, as close to the best as is asked for.

A table cuts a line with K − 1 boundaries: the line of x for kind `interval`, the line of values g of f' for `shared`.
At the best table's boundary s_i, g(s_i) is the middle of the levels y_i, y_{i+1} on its sides, or jumps across it. So
if s_i is moved to the nearest edge e_i of a mesh and the levels stay, the error grows by at most

    2 (y_{i+1} − y_i) ∫ |g − g(s_i)| w      between s_i and e_i,

which falls with the square of the cell. Hence for the best table, and the best levels for the moved boundaries,

    error  ≥  Σ over segments of  cost(e_{i−1}, e_i) − what its two ends may have cost,

and the least such sum over all paths along the edges is a lower bound. Two dynamic programmes find it:

penalised   Let a path have any number of segments, and pay λ for each. Then for any λ the least sum, less λK, is a
            bound; it is the best one if the least path has K segments. One layer serves for all k, and long segments
            are pruned (as PELT does, Killick et al. 2012), so that a pass takes time by the edge, not by the pair.
layered     The least sum of exactly K segments, along edges that may be the k-th boundary. It is needed only where no λ
            leads to K: even derivatives such as tanh's favour an odd number of intervals.

Both are run from either end, so that the least sum through each edge is known. An edge whose sum exceeds the error of
the known table has no boundary of the best one near it. The mesh is cut finer where a boundary may still lie, closed
elsewhere, and the gap falls with every pass.

The arithmetic is double precision with an allowance for its rounding, and g is taken to be monotone in a cell where its
ends and middle say so: a numerical certificate, not one in interval arithmetic.

    cells.py         moments and ranges of g along the line
    mesh.py          edges, and which cells may still hold a boundary
    certificate.py   the passes

The programmes themselves are in ../paths.py, the search for λ in ../penalty.py.
"""

from .certificate import TOLERANCE, Certificate, certificate

__all__ = ["TOLERANCE", "Certificate", "certificate"]
