"""Levels of the least variance for the values of a group between its minimum and its maximum.

    python -m fewbit.fewbit_gen.group_levels         prints the curves of runtime/tensors/levels.py

A group of G numbers from a to b is rounded at random to K levels of t = (h − a) / (b − a), the first 0 and the last 1.
The variance of a number between neighbouring levels is (b − a)² (y⁺ − t)(t − y⁻), as for kind `stochastic`: it is that
problem with f'(t) = t, and the density of t, each group weighted by (b − a)², for w. G normal numbers have the density

    w(t) ∝ ∫∫ φ(a) φ(b) (Φ(b) − Φ(a))^{G−3} (b − a)³ φ(a + t (b − a)) da db,

and the values after an activation are about the absolute values of normal numbers: a = 0, and b the greatest of them.

Levels all of their own would cost the kernels a look-up for every element. These lie on *curves* instead: equally far
apart between few knots, which cost a multiplication and a maximum each. The best curve of a number of pieces is found
exactly over knots on multiples of `1 / GRID`, by dynamic programming over (knot, levels so far).
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Vector = NDArray[np.float64]

GROUP = 256  # G
GRID = 64  # knots lie on its multiples
PIECES = {"normal": {2: 3, 3: 3, 4: 5, 5: 5, 6: 5, 7: 5, 8: 5}, "skewed": dict.fromkeys(range(2, 9), 3)}
_CELLS, _NODES = 2048, 160


@dataclass(frozen=True)
class Density:
    """A distribution of t: sums over `_CELLS` equal cells of [0, 1].

    Attributes:
        sums: (3, cells + 1) of w, t·w and t²·w up to each cell's end.
    """

    sums: Vector

    @classmethod
    def of(cls, weights: Vector) -> "Density":
        """Return the density with these weights of the cells."""
        middle = (np.arange(_CELLS) + 0.5) / _CELLS
        w = weights / weights.sum()
        sums = np.cumsum(np.stack([w, w * middle, w * middle**2]), axis=1)
        return cls(np.concatenate([np.zeros((3, 1)), sums], axis=1))

    def cost(self, low: Vector, high: Vector) -> Vector:
        """Return the variance of numbers between the levels `low` and `high`, elementwise."""
        ends = np.arange(_CELLS + 1) / _CELLS
        w, tw, ttw = (np.interp(high, ends, part) - np.interp(low, ends, part) for part in self.sums)
        return (low + high) * tw - low * high * w - ttw

    def variance(self, levels: Vector) -> float:
        """Return the variance by increasing levels, of which the first is 0 and the last 1."""
        return float(self.cost(levels[:-1], levels[1:]).sum())


def normal_density(G: int = GROUP) -> Density:
    """Return the density of t in groups of `G` normal numbers."""
    a, b = np.meshgrid(*[np.linspace(-6.5, 6.5, _NODES)] * 2, indexing="ij")
    a, b = a[b > a], b[b > a]
    share = np.exp(-0.5 * (a * a + b * b)) * (ndtr(b) - ndtr(a)) ** (G - 3) * (b - a) ** 3
    return _mixture(a, b, share)


def skewed_density(G: int = GROUP) -> Density:
    """Return the density of t in groups of 0 and `G` absolute values of normal numbers."""
    b = np.linspace(0.02, 7.0, _NODES)
    share = np.exp(-0.5 * b * b) * (2 * ndtr(b) - 1) ** (G - 2) * b**3
    return _mixture(np.zeros_like(b), b, share)


def _mixture(a: Vector, b: Vector, share: Vector) -> Density:
    """Return the mixture of normal densities between `a` and `b`."""
    t = (np.arange(_CELLS) + 0.5) / _CELLS
    kept = share > share.max() * 1e-9
    a, width, share = a[kept, None], (b - a)[kept, None], share[kept]
    parts = [np.exp(-0.5 * (a + part * width) ** 2).T @ share for part in np.split(t, 16)]
    return Density.of(np.concatenate(parts))


def best_curve(density: Density, bits: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """Return the inner knots of the curve of least variance through 2^bits levels.

    Args:
        density: of t.
        bits: b, 2 to 8.
        pieces: straight pieces at most; at least 1.

    Returns:
        (code, position) of each knot between the first level and the last, positions in units of 1 / `GRID`.
    """
    steps, places = 2**bits - 1, np.arange(GRID + 1) / GRID
    low, high = places[:, None], places[None, :]
    costs = np.full((steps + 1, GRID + 1, GRID + 1), inf)
    for count in range(1, steps + 1):
        cut = np.arange(count + 1) / count
        levels = low[..., None] + (high - low)[..., None] * cut
        of_piece = density.cost(levels[..., :-1], levels[..., 1:]).sum(-1)
        costs[count] = np.where(high > low, of_piece, inf)
    best = np.full((steps + 1, GRID + 1), inf)
    best[0, 0] = 0.0
    found = [best]
    for _ in range(pieces):
        following = np.full_like(best, inf)
        for count in range(1, steps + 1):
            whole = (best[: steps + 1 - count, :, None] + costs[count]).min(axis=1)
            np.minimum(following[count:], whole, out=following[count:])
        found.append(best := following)
    used = min(range(1, pieces + 1), key=lambda z: found[z][steps, GRID])
    code, at, knots = steps, GRID, []
    for z in range(used - 1, 0, -1):
        counts, starts = np.meshgrid(np.arange(1, code + 1), np.arange(at), indexing="ij")
        whole = found[z][code - counts, starts] + costs[counts, starts, at]
        count, start = np.unravel_index(np.argmin(whole), whole.shape)
        code, at = code - int(counts[count, start]), int(start)
        knots.append((code, at))
    return tuple(reversed(knots))


def main() -> None:
    """Print the curves of all shapes and bits, and their variance relative to that of levels equally far apart."""
    for shape, density in (("normal", normal_density()), ("skewed", skewed_density())):
        print(f"{shape.upper()}: Mapping[int, Knots] = {{")
        for bits, pieces in PIECES[shape].items():
            knots = best_curve(density, bits, pieces)
            codes, at = zip((0, 0), *knots, (2**bits - 1, GRID), strict=True)
            levels = np.interp(np.arange(2**bits), codes, np.divide(at, GRID))
            ratio = density.variance(levels) / density.variance(np.linspace(0, 1, 2**bits))
            print(f"    {bits}: {knots},  # {ratio:.3f}")
        print("}")


if __name__ == "__main__":
    main()
