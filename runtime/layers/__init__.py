"""The layers of torch.nn that save their inputs in few bits (ActNN, Section 5.1 and Appendix B).

    fewbit.layers.Conv2d(3, 64, 3, bits=2)          in place of      torch.nn.Conv2d(3, 64, 3)

A file for each kind of layer; base.py is what they share, saver.py what they save through.
"""

from .base import CompressedLayer
from .batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    SyncBatchNorm,
)
from .convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .linear import Linear
from .saver import ExactSaver, QuantizerSaver, Saver

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CompressedLayer",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "ExactSaver",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "Linear",
    "QuantizerSaver",
    "Saver",
    "SyncBatchNorm",
]
