"""Fixed bins for inputs of unknown range: 256 bins per octave, both signs, and zero.

        −2²⁹ … −1 … −2⁻²⁴   0   2⁻²⁴ … 1 … 2²⁹        edges; bins are closed on the right, like a table's intervals

A float's leading bits are the index of its bin. Counts in the same bins can be added over batches and modules. For a
weight they are reduced to the region that has mass: `coarsened` merges neighbours with little mass.
"""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

SMALLEST, LARGEST = 2.0**-24, 2.0**29  # the least float16; the last power of two within the ±1e9 of weights
# Number of low bits of a float32 to drop: sign, exponent and 8 bits of mantissa remain.
DROPPED_BITS = 15
PER_OCTAVE = 1 << (23 - DROPPED_BITS)
_OCTAVES = 24 + 29  # from SMALLEST to LARGEST
# For one sign: one bin up to SMALLEST, then those of the octaves.
BINS_OF_SIGN = 1 + _OCTAVES * PER_OCTAVE
BINS = 2 * BINS_OF_SIGN
# The leading bits of SMALLEST.
FIRST = int(np.float32(SMALLEST).view(np.int32)) >> DROPPED_BITS

# The share of all mass up to which neighbours are merged, and the maximum number of remaining bins.
_LITTLE = 1 / 1024
_MOST = 2048


def edges() -> Vector:
    """Return the (BINS + 1,) edges, increasing."""
    leading = np.arange(FIRST, FIRST + BINS_OF_SIGN, dtype=np.int32)
    sizes = (leading << DROPPED_BITS).view(np.float32).astype(np.float64)
    return np.concatenate([-sizes[::-1], [0.0], sizes])


def coarsened(counts: Vector) -> tuple[Vector, Vector]:
    """Return edges and counts of at most 2048 merged bins, for counts ≥ 0 in the fixed bins, (BINS,), not all 0.

    Bins are merged pairwise within an octave while they contain at most a 1024th of all mass together, so that no bin
    with more mass is wider than necessary and none is wider than an octave; then runs of empty bins are merged.
    """
    counts = counts / counts.max()  # a sum of huge counts would overflow
    little = _LITTLE * counts.sum()
    while True:
        negative = _inner_edges(counts[:BINS_OF_SIGN][::-1], little)
        positive = _inner_edges(counts[BINS_OF_SIGN:], little)
        at = np.flatnonzero(np.concatenate([[True], negative[::-1], [True], positive, [True]]))
        empty = np.add.reduceat(counts, at[:-1]) == 0
        kept = at[np.concatenate([[True], ~(empty[1:] & empty[:-1]), [True]])]
        if kept.size <= _MOST + 1:
            return edges()[kept], np.add.reduceat(counts, kept[:-1])
        little *= 2


def _inner_edges(counts: Vector, little: float) -> NDArray[np.bool_]:
    """Return which edges between the bins of one sign to keep, from zero outwards: (BINS_OF_SIGN − 1,)."""
    octaves = counts[1:]
    kept = np.ones(octaves.size, bool)  # edge i is the inner end of bin i of the octaves
    size = 2
    while size <= PER_OCTAVE:
        joined = np.repeat(octaves.reshape(-1, size).sum(axis=1) <= little, size)
        kept &= ~joined | (np.arange(octaves.size) % size == 0)
        size *= 2
    return kept
