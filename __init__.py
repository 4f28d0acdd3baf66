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
    from .runtime import allocation as allocation
    from .runtime import functional as functional
    from .runtime import layers as layers
    from .runtime import memory as memory
    from .runtime import models as models
    from .runtime import nn as nn
    from .runtime import quantizers as quantizers
    from .runtime.allocation import MixedPrecision as MixedPrecision
    from .runtime.calibrate import calibrate as calibrate
    from .runtime.convert import convert as convert
    from .runtime.convert import revert as revert
    from .runtime.few_bit import few_bit as few_bit
    from .runtime.glu.modules import GEGLU as GEGLU
    from .runtime.glu.modules import GLU as GLU
    from .runtime.glu.modules import ReGLU as ReGLU
    from .runtime.glu.modules import SwiGLU as SwiGLU
    from .runtime.modules import CELU as CELU
    from .runtime.modules import ELU as ELU
    from .runtime.modules import GELU as GELU
    from .runtime.modules import SELU as SELU
    from .runtime.modules import FewBit as FewBit
    from .runtime.modules import Hardshrink as Hardshrink
    from .runtime.modules import Hardsigmoid as Hardsigmoid
    from .runtime.modules import Hardswish as Hardswish
    from .runtime.modules import Hardtanh as Hardtanh
    from .runtime.modules import LeakyReLU as LeakyReLU
    from .runtime.modules import LogSigmoid as LogSigmoid
    from .runtime.modules import Mish as Mish
    from .runtime.modules import QuickGELU as QuickGELU
    from .runtime.modules import ReLU as ReLU
    from .runtime.modules import ReLU6 as ReLU6
    from .runtime.modules import Sigmoid as Sigmoid
    from .runtime.modules import SiLU as SiLU
    from .runtime.modules import Softplus as Softplus
    from .runtime.modules import Softshrink as Softshrink
    from .runtime.modules import Softsign as Softsign
    from .runtime.modules import SquaredReLU as SquaredReLU
    from .runtime.modules import Tanh as Tanh
    from .runtime.modules import Tanhshrink as Tanhshrink
    from .runtime.modules import Threshold as Threshold
    from .runtime.preact import PreActConv1d as PreActConv1d
    from .runtime.preact import PreActConv2d as PreActConv2d
    from .runtime.preact import PreActConv3d as PreActConv3d
    from .runtime.preact import PreActLinear as PreActLinear
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
    "MixedPrecision": ".runtime.allocation",
    "calibrate": ".runtime.calibrate",
    "convert": ".runtime.convert",
    "revert": ".runtime.convert",
    "few_bit": ".runtime.few_bit",
    "compress_saved_tensors": ".runtime.saved_tensors",
    "FewbitError": ".tables",
    "Table": ".tables",
    "load_table": ".tables",
    **dict.fromkeys(_MODULES, ".runtime.modules"),
    **dict.fromkeys(_PREACT, ".runtime.preact"),
    **dict.fromkeys(("GEGLU", "GLU", "ReGLU", "SwiGLU"), ".runtime.glu.modules"),
}
# Public submodule -> the module that it is. They can be imported (`from fewbit.functional import gelu`)
# although they live in `runtime`.
_SUBMODULES = {
    "allocation": ".runtime.allocation",
    "functional": ".runtime.functional",
    "layers": ".runtime.layers",
    "memory": ".runtime.memory",
    "models": ".runtime.models",
    "nn": ".runtime.nn",
    "quantizers": ".runtime.quantizers",
    "vquant": ".runtime.vquant",
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
