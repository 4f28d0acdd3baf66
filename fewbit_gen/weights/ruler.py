"""The ruler on which inputs are counted before their range is known: 256 bins to each octave, both signs, and zero.

    −2²⁹ … −1 … −2⁻²⁴   0   2⁻²⁴ … 1 … 2²⁹        edges; bins are closed on the right, as a table's intervals are

A float's leading bits are its place on it. Counts on the same ruler can be added, over batches and over modules. For a
weight it is cut down to where mass lies: `coarsened` joins neighbours that hold little.
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

SMALLEST, LARGEST = 2.0**-24, 2.0**29
# What is left of a float32 when this many low bits are dropped: sign, exponent and 8 bits of mantissa.
DROPPED_BITS = 15
PER_OCTAVE = 1 << (23 - DROPPED_BITS)
_OCTAVES = 24 + 29
# Of one sign: one bin up to SMALLEST, then those of the octaves.
BINS_OF_SIGN = 1 + _OCTAVES * PER_OCTAVE
BINS = 2 * BINS_OF_SIGN
# The leading bits of SMALLEST.
FIRST = int(np.float32(SMALLEST).view(np.int32)) >> DROPPED_BITS

# The share of all mass up to which neighbours are joined, and how many bins are left at most.
_LITTLE = 1 / 1024
_MOST = 2048


def edges() -> Vector:
    """Return the (BINS + 1,) edges, increasing."""
    leading = np.arange(FIRST, FIRST + BINS_OF_SIGN, dtype=np.int32)
    sizes = (leading << DROPPED_BITS).view(np.float32).astype(np.float64)
    return np.concatenate([-sizes[::-1], [0.0], sizes])


def coarsened(counts: Vector) -> tuple[Vector, Vector]:
    """Return edges and counts of fewer bins, at most 2048, for counts ≥ 0 on the ruler, (BINS,), not all 0.

    Bins are joined two and two within an octave as long as they hold at most a 1024th of all mass together, so that
    none holding more is wider than need be and none is wider than an octave; then runs of empty ones.
    """
    counts = counts / counts.max()  # a sum of huge counts would overflow
    little = _LITTLE * counts.sum()
    while True:
        kept = _kept_edges(counts, little)
        if kept.size <= _MOST + 1:
            return edges()[kept], np.add.reduceat(counts, kept[:-1])
        little *= 2


def _kept_edges(counts: Vector, little: float) -> NDArray[np.int64]:
    """Return which edges stay, increasing, where neighbours with a mass of `little` together are joined."""
    negative = _inner_edges(counts[:BINS_OF_SIGN][::-1], little)
    positive = _inner_edges(counts[BINS_OF_SIGN:], little)
    kept = np.concatenate([[True], negative[::-1], [True], positive, [True]])
    at = np.flatnonzero(kept)
    empty = np.add.reduceat(counts, at[:-1]) == 0
    return at[np.concatenate([[True], ~(empty[1:] & empty[:-1]), [True]])]


def _inner_edges(counts: Vector, little: float) -> NDArray[np.bool_]:
    """Return which edges between the bins of one sign, from zero outwards, stay: (BINS_OF_SIGN − 1,)."""
    octaves = counts[1:]
    kept = np.ones(octaves.size, bool)  # edge i is the inner end of bin i of the octaves
    size = 2
    while size <= PER_OCTAVE:
        joined = np.repeat(octaves.reshape(-1, size).sum(axis=1) <= little, size)
        kept &= ~joined | (np.arange(octaves.size) % size == 0)
        size *= 2
    return kept
