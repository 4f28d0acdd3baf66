"""What the tests of generated lookups share: tables of awkward names and shapes, and where to evaluate them."""

import numpy as np
from fewbit.tables import Table, load_table

HOSTILE_NAME = """x*/1 /*" ''' \"\"\" {0} %s \\ ??/ §φ #endif"""


def awkward(boundaries, seed=0, activation="gelu"):
    """A table with these boundaries whose levels include a subnormal and some beyond the floats."""
    random = np.random.default_rng(seed)
    K = 16
    levels = random.normal(0, 1, K)
    levels[:5] = 5e-324, -1e300, 1e300, 1e-42, -0.0
    codes = random.integers(0, K, len(boundaries) + 1)
    return Table(activation, "shared", "uniform:-10,10", boundaries, codes, levels, 0.25)


def _steps(value, toward, count):
    steps = [value]
    for _ in range(count):
        steps.append(np.nextafter(steps[-1], toward))
    return sorted(steps)


TABLES = {
    "gelu": load_table("gelu"),
    "relu": load_table("relu"),
    "interval": load_table("silu", bits=4, kind="interval"),
    "softplus": Table("softplus(beta=-2.5)", "interval", "normal:0,1", [0.1], [0, 1], [0.0, 1.0], 0.5, 0.25),
    "one interval": Table("f", "interval", "uniform:0,1", [], [0], [0.5], 0.0),
    "hostile name": awkward([0.0, 1.0], activation=HOSTILE_NAME),
    "ends with a backslash": awkward([0.0], activation="x \\"),
    "ends with a trigraph": awkward([0.0], activation="x ??/"),
    "long name": awkward([0.0], activation="tanh(" * 199 + "x)"),
    "no letter": awkward([0.0], activation="§"),
    "close in float": awkward(_steps(1.0, 2.0, 20), activation="close"),
    "subnormal": awkward(
        [-1e-45, -5e-324, 0.0, 5e-324, 1e-310, 1e-46, 1.4e-45, 1e-39, 1.2e-38], activation="subnormal"
    ),
    "beyond the floats": awkward(
        [-1e308, -3.5e38, -3.4028234663852886e38, 3.4028234663852886e38, 3.5e38, 1e308], activation="beyond"
    ),
    "many": awkward(np.sort(np.random.default_rng(1).normal(0, 3, 1000)).tolist(), seed=1, activation="many"),
}


def points(table):
    """Numbers at every boundary, one step beside it in double and in float, special ones and random ones."""
    b = table.boundaries
    with np.errstate(over="ignore", under="ignore"):
        f = b.astype(np.float32)
        beside = [np.nextafter(a, a.dtype.type(to)).astype(np.float64) for a in (b, f) for to in (-np.inf, np.inf)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e308, -1e308, 5e-324, -5e-324, 1e-45, 3.4e38, -3.4e38]
    random = np.random.default_rng(2).normal(0, 4, 500)
    return np.concatenate([b, f.astype(np.float64), *beside, special, random])
