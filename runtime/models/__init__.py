"""Models of the papers: pre-activation residual networks, for BLPA.

    fewbit.models.preact_resnet(164, width=16, bits=4)      9n + 2 layers, for images of 32×32

Normalization, ReLU and convolution of each layer are one module, which saves one code of `bits` bits (BLPA, Section 3).
"""

from .preact_resnet import PreActResNet, preact_resnet

__all__ = ["PreActResNet", "preact_resnet"]
