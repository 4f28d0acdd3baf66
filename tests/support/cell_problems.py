"""Problems of the solvers that are given by their cells alone, and the dynamic programme as the paper writes it."""

import numpy as np
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.moments import Moments

# The solvers see costs through differences of prefix sums: good to this part of ∫ g² w.
ROUNDING = 1e-13


def problem(values, weights, within=None):
    """A grid of unit cells with these means, masses and variances; f' itself is never asked."""
    values, weights = np.asarray(values, float), np.asarray(weights, float)
    within = np.zeros_like(values) if within is None else np.asarray(within, float)
    cells = np.stack([weights, values * weights, (values**2 + within) * weights])
    prefix = np.concatenate([np.zeros((3, 1)), np.cumsum(cells, axis=1)], axis=1)
    gelu, uniform = parse_activation("gelu"), parse_weight("uniform:0,1")
    return Moments(gelu, uniform, np.arange(values.size + 1.0), 0.0, cells, prefix)


def plain_programme(prefix, K):
    """DP(n, K) without a block, a bound or a shortcut: the least cost of K runs of cells."""
    w, fw, f2 = prefix

    def T(j, i):
        dw, dfw = w[i] - w[j], fw[i] - fw[j]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.maximum(0, np.where(dw > 0, f2[i] - f2[j] - dfw * dfw / dw, 0))

    n = w.size - 1
    best = np.array([T(0, i) for i in range(n + 1)])
    for _ in range(1, K):
        best = np.array([np.min(best[: i + 1] + T(np.arange(i + 1), i)) for i in range(n + 1)])
    return best[-1]
