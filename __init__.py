"""fewbit: the best few-bit table of any activation's derivative, and the PyTorch runtime that trains with it.

    table = fewbit.solve("gelu", bits=3)      the compiler; needs no torch
    fewbit.convert(model, bits=3)             the runtime; needs PyTorch

This module is a lazy face (PEP 562): a name is imported when it is first used, so that the compiler never
loads torch.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from .runtime.backends.activation_spec import ROW_OF_MODULE

__version__ = "0.1.0"

_PREACT = ("PreActConv1d", "PreActConv2d", "PreActConv3d", "PreActLinear")
# Public name -> the module that defines it.
_HOMES = {
    "solve": ".fewbit_gen",
    "MixedPrecision": ".runtime.allocation",
    "adaptation_state": ".runtime.activations.following",
    "load_adaptation_state": ".runtime.activations.following",
    "calibrate": ".runtime.calibrate",
    "convert": ".runtime.convert.api",
    "revert": ".runtime.convert.api",
    "few_bit": ".runtime.activations.catch",
    **dict.fromkeys(("plan", "fit"), ".runtime.plan.planner"),
    "fits": ".runtime.plan.fits",
    "guard": ".runtime.plan.guard",
    "checkpoint": ".runtime.saved.checkpoint",
    "Plan": ".runtime.plan.document",
    "compress_saved_tensors": ".runtime.saved.hooks",
    "compile_report": ".runtime.compile.report",
    "inductor_options": ".runtime.compile.backend",
    "FewbitError": ".tables",
    "Table": ".tables",
    "load_table": ".tables",
    "ActNN": ".runtime.convert.actnn",
    "Attention": ".runtime.convert.attention",
    "Normalizations": ".runtime.convert.normalizations",
    "BLPA": ".runtime.convert.blpa",
    "ChunkedLoss": ".runtime.convert.chunked_loss",
    "GatedMLPs": ".runtime.convert.gated_mlps",
    "VQuant": ".runtime.convert.vquant",
    "Activations": ".runtime.convert.method",
    **dict.fromkeys(("FewBit", *ROW_OF_MODULE), ".runtime.activations.modules"),
    **dict.fromkeys(_PREACT, ".runtime.layers.preact"),
    **dict.fromkeys(("GEGLU", "GLU", "ReGLU", "SwiGLU"), ".runtime.activations.gated_modules"),
}
# Public submodule -> the module that it is. They can be imported (`from fewbit.functional import gelu`)
# although they live in `runtime`.
_SUBMODULES = {
    "allocation": ".runtime.allocation",
    "functional": ".runtime.activations.functional",
    "layers": ".runtime.layers",
    "memory": ".runtime.plan.memory",
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
        message = f"{wanted} needs PyTorch, which is not installed: pip install torch (build: fewbit doctor)"
        raise ModuleNotFoundError(message, name="torch") from None


def _docstring_of(home: str) -> str | None:
    """Return the docstring of the module or package of that name, and import nothing of it."""
    import ast
    from pathlib import Path

    path = Path(__file__).parent.joinpath(*home.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))


class _Submodule(ModuleType):
    """A public submodule that loads its home when an attribute is first asked for."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(f"{__name__}.{name}")
        self._home = home

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The docstring of the home, which is read without loading it."""
        return _docstring_of(self._home)

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
