"""Quantizers of ActNN (`PerGroup`), BLPA (`FixedPoint`), V-Quant (`Outlier`) and EDEN (`Rotated`).

    c = PerGroup(bits=2, group_size=256).compress(x)
    c.decompress(), c.nbytes

A quantizer holds its parameters, a compressed tensor its codes and what decodes them; both are frozen. The mathematics
is in each file's docstring, the arithmetic in `backends/reference`, plain torch, the oracle of the kernels in
`backends/cpu` and `backends/cuda`.
"""

from .base import Compressed, Quantizer
from .fixed_point import FixedPoint, FixedPointCompressed
from .outlier import Outlier, OutlierCompressed
from .per_group import PerGroup, PerGroupCompressed
from .rotated import Rotated, RotatedCompressed

__all__ = [
    "Compressed",
    "FixedPoint",
    "FixedPointCompressed",
    "Outlier",
    "OutlierCompressed",
    "PerGroup",
    "PerGroupCompressed",
    "Quantizer",
    "Rotated",
    "RotatedCompressed",
]
