"""Parts of cells that are divided: which cell each is of, and its number among that cell's."""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def repeated(counts: Indices) -> tuple[Indices, Indices]:
    """Return, for cells of so many parts each, the cell of every part, and its number within that cell.

    >>> [part.tolist() for part in repeated(np.array([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    cell = np.repeat(np.arange(counts.size), counts)
    return cell, np.arange(cell.size) - np.repeat(np.cumsum(counts) - counts, counts)
