"""Tensors in few bits: the quantizers of ActNN (`PerGroup`), BLPA (`FixedPoint`) and V-Quant (`Outlier`).

    c = PerGroup(bits=2, group_size=256).compress(x)
    c.decompress(), c.nbytes

A quantizer holds its parameters, the compressed tensor its codes and what they mean; both are frozen. Each is a file
with its mathematics in plain torch, which serves every device and is the oracle of the CPU kernels in `cpu`.
"""

from .base import Compressed, Quantizer
from .fixed_point import FixedPoint, FixedPointCompressed
from .outlier import Outlier, OutlierCompressed
from .per_group import PerGroup, PerGroupCompressed

__all__ = [
    "Compressed",
    "FixedPoint",
    "FixedPointCompressed",
    "Outlier",
    "OutlierCompressed",
    "PerGroup",
    "PerGroupCompressed",
    "Quantizer",
]
