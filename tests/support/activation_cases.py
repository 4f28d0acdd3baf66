"""Activations of torch, and those of timm in classes that pass for its own: timm itself is not installed."""

import torch
from fewbit.runtime.convert.recognize import HARD_MISH
from torch import nn
from torch.nn import functional as F


def define(package, name, forward, base=nn.Module, **members):
    """A class that says it was defined as `name` in the module `package`."""
    return type(name, (base,), {"__module__": package, "forward": forward, **members})


TORCH = [
    (nn.Threshold(0.5, -1.0), (("threshold", 0.5), ("value", -1.0)), "threshold(threshold=0.5,value=-1)"),
    (nn.ReLU(), (), "relu"),
    (nn.ReLU(inplace=True), (), "relu"),
    (nn.ReLU6(), (), "relu6"),
    (nn.Hardtanh(), (("min_val", -1.0), ("max_val", 1.0)), "hardtanh"),
    (nn.Hardtanh(0, 2.5, inplace=True), (("min_val", 0), ("max_val", 2.5)), "hardtanh(min_val=0,max_val=2.5)"),
    (nn.Sigmoid(), (), "sigmoid"),
    (nn.Hardsigmoid(), (), "hardsigmoid"),
    (nn.Tanh(), (), "tanh"),
    (nn.SiLU(inplace=True), (), "silu"),
    (nn.Mish(), (), "mish"),
    (nn.Hardswish(), (), "hardswish"),
    (nn.ELU(), (("alpha", 1.0),), "elu"),
    (nn.ELU(2, inplace=True), (("alpha", 2),), "elu(alpha=2)"),
    (nn.CELU(0.3), (("alpha", 0.3),), "celu(alpha=0.3)"),
    (nn.SELU(), (), "selu"),
    (nn.GELU(), (("approximate", "none"),), "gelu"),
    (nn.GELU("tanh"), (("approximate", "tanh"),), "gelu_tanh"),
    (nn.Hardshrink(), (("lambd", 0.5),), "hardshrink"),
    (nn.LeakyReLU(0.2), (("negative_slope", 0.2),), "leaky_relu(negative_slope=0.2)"),
    (nn.LogSigmoid(), (), "logsigmoid"),
    (nn.Softplus(), (("beta", 1.0), ("threshold", 20.0)), "softplus"),
    (nn.Softplus(beta=2), (("beta", 2), ("threshold", 20.0)), "softplus(beta=2)"),
    (nn.Softshrink(1), (("lambd", 1),), "softshrink(lambd=1)"),
    (nn.Softsign(), (), "softsign"),
    (nn.Tanhshrink(), (), "tanhshrink"),
]

TIMM = [
    ("Swish", lambda self, x: x.mul(x.sigmoid()), ("SiLU", "silu", "swish")),
    ("Mish", lambda self, x: x.mul(F.softplus(x).tanh()), ("Mish", "mish", "mish")),
    ("Sigmoid", lambda self, x: x.sigmoid(), ("Sigmoid", "sigmoid", None)),
    ("Tanh", lambda self, x: x.tanh(), ("Tanh", "tanh", None)),
    ("HardSwish", lambda self, x: x.mul(F.relu6(x + 3.0).div_(6.0)), ("Hardswish", "hardswish", "hard_swish")),
    ("HardSigmoid", lambda self, x: F.relu6(x + 3.0) / 6.0, ("Hardsigmoid", "hardsigmoid", "hard_sigmoid")),
    (
        "HardMish",
        lambda self, x: 0.5 * x * (x + 2).clamp(0, 2),
        ("HardMish", HARD_MISH, "hard_mish"),
    ),
    ("GELU", lambda self, x: F.gelu(x), ("GELU", "gelu", None)),
    ("GELUTanh", lambda self, x: F.gelu(x, approximate="tanh"), ("GELU", "gelu_tanh", None)),
    ("QuickGELU", lambda self, x: x * torch.sigmoid(1.702 * x), ("QuickGELU", "quick_gelu", None)),
]
