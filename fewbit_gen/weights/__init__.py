"""Weights w(x) ≥ 0: what is believed of an activation's inputs (equation 4 of the Few-bit Backward paper).

    uniform(A, B)          normal(MEAN, DEVIATION)         laplace(MEAN, SCALE)
    mixture((share, weight), …)                            several of them at once
    samples(x)             histogram(edges, counts)        what was measured

`parse_weight` reads the same from a text, and measured ones from a file.
"""

from .families import laplace, normal, uniform
from .measured import histogram, samples
from .mixture import mixture
from .parse import ACCEPTED, parse_weight
from .weight import Weight

__all__ = ["ACCEPTED", "Weight", "histogram", "laplace", "mixture", "normal", "parse_weight", "samples", "uniform"]
