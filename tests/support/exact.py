"""f' in 40 digits and integrals of it, to hold the compiler's own against."""

from itertools import pairwise

import mpmath

mp = mpmath.mp.clone()
mp.dps = 40

SELU_SCALE = mp.mpf("1.0507009873554804934193349852946")
SELU_ALPHA = mp.mpf("1.6732632423543772848170429916717")


def sigma(x):
    return 1 / (1 + mp.exp(-x))


DERIVATIVES = {
    "relu": lambda x: mp.mpf(x > 0),
    "gelu": lambda x: mp.ncdf(x) + x * mp.npdf(x),
    "silu": lambda x: sigma(x) * (1 + x * sigma(-x)),
    "sigmoid": lambda x: sigma(x) * sigma(-x),
    "tanh": lambda x: mp.sech(x) ** 2,
    "selu": lambda x: SELU_SCALE * (mp.one if x > 0 else SELU_ALPHA * mp.exp(x)),
    "softplus": lambda x: mp.one if x > 20 else sigma(x),
    "softplus(threshold=2)": lambda x: mp.one if x > 2 else sigma(x),
}
KINKS = {"relu": [0], "selu": [0], "softplus": [20], "softplus(threshold=2)": [2]}
WEIGHTS = {"uniform:-10,10": lambda x: mp.one, "normal:0.5,2": lambda x: mp.npdf(x, 0.5, 2)}


def integrate(function, points, activation, step=2):
    """The integral of `function` from the first of `points` to the last, cut at all of them, at kinks and every `step`.

    Cut as finely as that, every piece is smooth and Gauss–Legendre in 20 digits takes few nodes.
    """
    low, high = float(points[0]), float(points[-1])
    regular = [low + step * i for i in range(1, int((high - low) / step) + 1)]
    cuts = {float(p) for p in (*points, *KINKS.get(activation, []), *regular) if low <= p <= high}
    with mp.workdps(20):
        return sum((mp.quad(function, [a, b], method="gauss-legendre") for a, b in pairwise(sorted(cuts))), mp.zero)


def table_error(table):
    """∫ (f' − q)² w of a table of `DERIVATIVES` under one of `WEIGHTS`, in 20 digits."""
    derivative, weight = DERIVATIVES[table.activation], WEIGHTS[table.weight]
    low, high = {"uniform:-10,10": (-10, 10), "normal:0.5,2": (-23.5, 24.5)}[table.weight]
    fence = [low, *(b for b in table.boundaries.tolist() if low < b < high), high]
    total = mp.zero
    for a, b in pairwise(fence):
        level = mp.mpf(float(table((a + b) / 2)))
        total += integrate(lambda x, y=level: (derivative(x) - y) ** 2 * weight(x), [a, b], table.activation)
    return total
