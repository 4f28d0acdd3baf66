"""Weights w(x) ≥ 0: the assumed distribution of an activation's inputs (equation 4 of the Few-bit Backward paper).

    uniform(A, B)          normal(MEAN, DEVIATION)         laplace(MEAN, SCALE)
        mixture((share, weight), …)                            a weighted sum of these
        samples(x)             histogram(edges, counts)        measured weights

`parse_weight` reads the same from text, and measured weights from a file.
"""

from .families import laplace, normal, uniform
from .measured import histogram, samples
from .mixture import mixture
from .parse import ACCEPTED, parse_weight
from .weight import Weight

__all__ = ["ACCEPTED", "Weight", "histogram", "laplace", "mixture", "normal", "parse_weight", "samples", "uniform"]
