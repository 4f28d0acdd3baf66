"""The layers of torch.nn that save their inputs in few bits (ActNN, Section 5.1 and Appendix B).

    fewbit.layers.Conv2d(3, 64, 3, bits=2)          in place of      torch.nn.Conv2d(3, 64, 3)

A file for each kind of layer; base.py is their base, saver.py compresses the tensors that they save.
"""

from .activation import Activation
from .attention import MultiheadAttention, scaled_dot_product_attention
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
from .chunked_loss import chunked_cross_entropy
from .convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .deferred_logits import ChunkedHead
from .dropout import Dropout, dropout
from .layer_norm import GroupNorm, LayerNorm, RMSNorm
from .linear import Linear, linear
from .normalization import KeepOutput
from .pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    Upsample,
)
from .saver import ExactSaver, QuantizerSaver, Saver
from .softmax import LogSoftmax, Softmax, softmax

__all__ = [
    "Activation",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "ChunkedHead",
    "CompressedLayer",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "ExactSaver",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KeepOutput",
    "LayerNorm",
    "Linear",
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MultiheadAttention",
    "QuantizerSaver",
    "RMSNorm",
    "Saver",
    "Softmax",
    "SyncBatchNorm",
    "Upsample",
    "chunked_cross_entropy",
    "dropout",
    "linear",
    "scaled_dot_product_attention",
    "softmax",
]
