"""Models of the papers: pre-activation residual networks, for BLPA."""

from .preact_resnet import PreActResNet, preact_resnet

__all__ = ["PreActResNet", "preact_resnet"]
