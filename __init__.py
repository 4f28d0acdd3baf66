"""fewbit: the best few-bit table of any activation's derivative, and the PyTorch runtime that trains with it.

    table = fewbit.solve("gelu", bits=3)      the compiler; needs no torch
    fewbit.convert(model, bits=3)             the runtime; needs fewbit[torch]

This module is a lazy face (PEP 562): a name is imported when it is first used, so that the compiler never
loads torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fewbit_gen import solve as solve
    from .runtime import plan as allocation
    from .runtime.activations import functional as functional
    from .runtime import layers as layers
    from .runtime.memory import api as memory
    from .runtime import models as models
    from .runtime.layers import nn as nn
    from .runtime import quantizers as quantizers
    from .runtime.plan import MixedPrecision as MixedPrecision
    from .runtime.calibrate import calibrate as calibrate
    from .runtime.convert.api import convert as convert
    from .runtime.convert.api import revert as revert
    from .runtime.activations.catch import few_bit as few_bit
    from .runtime.activations.gated_modules import GEGLU as GEGLU
    from .runtime.activations.gated_modules import GLU as GLU
    from .runtime.activations.gated_modules import ReGLU as ReGLU
    from .runtime.activations.gated_modules import SwiGLU as SwiGLU
    from .runtime.activations.modules import CELU as CELU
    from .runtime.activations.modules import ELU as ELU
    from .runtime.activations.modules import GELU as GELU
    from .runtime.activations.modules import SELU as SELU
    from .runtime.activations.modules import FewBit as FewBit
    from .runtime.activations.modules import Hardshrink as Hardshrink
    from .runtime.activations.modules import Hardsigmoid as Hardsigmoid
    from .runtime.activations.modules import Hardswish as Hardswish
    from .runtime.activations.modules import Hardtanh as Hardtanh
    from .runtime.activations.modules import LeakyReLU as LeakyReLU
    from .runtime.activations.modules import LogSigmoid as LogSigmoid
    from .runtime.activations.modules import Mish as Mish
    from .runtime.activations.modules import QuickGELU as QuickGELU
    from .runtime.activations.modules import ReLU as ReLU
    from .runtime.activations.modules import ReLU6 as ReLU6
    from .runtime.activations.modules import Sigmoid as Sigmoid
    from .runtime.activations.modules import SiLU as SiLU
    from .runtime.activations.modules import Softplus as Softplus
    from .runtime.activations.modules import Softshrink as Softshrink
    from .runtime.activations.modules import Softsign as Softsign
    from .runtime.activations.modules import SquaredReLU as SquaredReLU
    from .runtime.activations.modules import Tanh as Tanh
    from .runtime.activations.modules import Tanhshrink as Tanhshrink
    from .runtime.activations.modules import Threshold as Threshold
    from .runtime.layers.preact import PreActConv1d as PreActConv1d
    from .runtime.layers.preact import PreActConv2d as PreActConv2d
    from .runtime.layers.preact import PreActConv3d as PreActConv3d
    from .runtime.layers.preact import PreActLinear as PreActLinear
    from .runtime.saved_tensors import compress_saved_tensors as compress_saved_tensors
    from .tables import FewbitError as FewbitError
    from .tables import Table as Table
    from .tables import load_table as load_table

__version__ = "0.1.0"

_MODULES = (
    *("CELU", "ELU", "GELU", "SELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid"),
    *("Mish", "QuickGELU", "ReLU", "ReLU6", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "SquaredReLU"),
    *("Tanh", "Tanhshrink", "Threshold", "FewBit"),
)
_PREACT = ("PreActConv1d", "PreActConv2d", "PreActConv3d", "PreActLinear")
# Public name -> the module that defines it.
_HOMES = {
    "solve": ".fewbit_gen",
    "MixedPrecision": ".runtime.plan",
    "calibrate": ".runtime.calibrate",
    "convert": ".runtime.convert.api",
    "revert": ".runtime.convert.api",
    "few_bit": ".runtime.activations.catch",
    "compress_saved_tensors": ".runtime.saved_tensors",
    "FewbitError": ".tables",
    "Table": ".tables",
    "load_table": ".tables",
    **dict.fromkeys(_MODULES, ".runtime.activations.modules"),
    **dict.fromkeys(_PREACT, ".runtime.layers.preact"),
    **dict.fromkeys(("GEGLU", "GLU", "ReGLU", "SwiGLU"), ".runtime.activations.gated_modules"),
}
# Public submodule -> the module that it is. They can be imported (`from fewbit.functional import gelu`)
# although they live in `runtime`.
_SUBMODULES = {
    "allocation": ".runtime.plan",
    "functional": ".runtime.activations.functional",
    "layers": ".runtime.layers",
    "memory": ".runtime.memory.api",
    "models": ".runtime.models",
    "nn": ".runtime.layers.nn",
    "quantizers": ".runtime.quantizers",
    "vquant": ".runtime.inference.vquant",
}

__all__ = ["__version__", *sorted([*_HOMES, *_SUBMODULES])]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_load(_HOMES[name], f"{__name__}.{name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(module: str, wanted: str) -> ModuleType:
    try:
        return importlib.import_module(module, __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"{wanted} needs PyTorch, which is not installed: pip install 'fewbit[torch]'"
        raise ModuleNotFoundError(message, name="torch") from None


class _Submodule(ModuleType):
    """A public submodule that loads its home when an attribute is first asked for."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(f"{__name__}.{name}", f"See {__name__}{home}.")
        self._home = home

    def __getattr__(self, name: str) -> Any:
        # Probes by import and inspect machinery must not load torch; `import *` asks for __all__ and must.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        value = getattr(_load(self._home, self.__name__), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return dir(_load(self._home, self.__name__))


for _name, _home in _SUBMODULES.items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _Submodule(_name, _home)
