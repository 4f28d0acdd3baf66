"""Recognizes which activation a module is: torch.nn's classes and those that `transformers` and `timm` define.

Neither package is imported: a class is identified by the path of its module and its name. A subclass counts as its
parent unless it defines its own `forward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...tables.names import number_text
from ..backends.activation_spec import ROW_OF_MODULE, ActivationRow

__all__ = ["Recognized", "recognize", "why_left"]


Arguments = tuple[tuple[str, float | str], ...]


@dataclass(frozen=True)
class Recognized:
    """The function that a module computes.

    Attributes:
        name: the corresponding class of torch.nn (and of fewbit), such as ``GELU``; if torch has none, a name of the
            same style: ``QuickGELU``.
        arguments: those of the class `name`, without `inplace`; all of them for torch's classes.
        activation: the compiler's name: ``gelu_tanh``, ``softplus(beta=2)``, or an expression in x.
        inplace: whether its input is overwritten.
        formula: None where fewbit's ``name(**arguments)`` gives the same bits; else the name in formulas.py of the
            module's own sequence of torch calls, which rounds differently.
    """

    name: str
    arguments: Arguments
    activation: str
    inplace: bool = False
    formula: str | None = None

    @property
    def has_fused(self) -> bool:
        """Whether torch has a single function for it, in place if the module works in place."""
        in_torch = self.name in _TORCH and self.formula is not None
        return in_torch and not (self.inplace and self.name in ("Sigmoid", "Tanh"))


Rule = Callable[[Any], Recognized]
_Verdict = Rule | str  # how to read a module of the class, or the reason to leave it


def recognize(module: nn.Module) -> Recognized | None:
    """Return which activation `module` is, or None if it has no few-bit form (see `why_left`)."""
    verdict = _verdict(module)
    return None if verdict is None or isinstance(verdict, str) else verdict(module)


def why_left(module: nn.Module) -> str | None:
    """Return the reason that `module`, an activation, has no few-bit form; None for any other module."""
    verdict = _verdict(module)
    return verdict if isinstance(verdict, str) else None


def _verdict(module: nn.Module) -> _Verdict | None:
    classes = type(module).__mro__
    for i, cls in enumerate(classes):
        verdict = _CLASSES.get((cls.__module__, cls.__qualname__))
        if verdict is None:
            continue
        if isinstance(verdict, str):
            return verdict
        if any("forward" in vars(c) or "__call__" in vars(c) for c in classes[:i]):
            return f"its class brings a forward of its own, not that of {cls.__name__}"
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        return verdict
    return None


# ---- how modules of each class are read ------------------------------------------------------------------------------


def _torch(name: str, row: ActivationRow) -> Rule:
    """Return the rule of the class `name` of torch.nn, whose arguments are its attributes."""

    def rule(module: Any) -> Recognized:
        arguments = {parameter: getattr(module, parameter) for parameter, _ in row.defaults}
        others = [f"{k}={number_text(arguments[k])}" for k, default in row.defaults if arguments[k] != default]
        text = f"{row.name}({','.join(others)})" if others else row.name  # softplus(beta=2)
        return Recognized(name, tuple(arguments.items()), text, bool(getattr(module, "inplace", False)))

    return rule


def _gelu(module: Any) -> Recognized:
    activation = "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return Recognized("GELU", (("approximate", module.approximate),), activation)


def _fixed(name: str, activation: str, arguments: Arguments = (), *, formula: str | None = None) -> Rule:
    """Return the rule of a class whose function depends on nothing in the module except `inplace`."""

    def rule(module: Any) -> Recognized:
        inplace = bool(getattr(module, "inplace", False))
        return Recognized(name, arguments, activation, inplace, formula)

    return rule


def _held(name: str, activation: str, formula: str, arguments: Arguments = ()) -> Rule:
    """Return the rule of a class of `transformers` whose `act` is either torch's function or its own formula."""

    def rule(module: Any) -> Recognized:
        own = getattr(getattr(module, "act", None), "__self__", None) is module  # a bound method: the formula
        return Recognized(name, arguments, activation, formula=formula if own else None)

    return rule


def _either(name: str, activation: str, formula: str | None, in_place: str) -> Rule:
    """Return the rule of a class of `timm` that uses a different formula in place."""

    def rule(module: Any) -> Recognized:
        inplace = bool(getattr(module, "inplace", False))
        return Recognized(name, (), activation, inplace, in_place if inplace else formula)

    return rule


_AS_ERF: Arguments = (("approximate", "none"),)
_AS_TANH: Arguments = (("approximate", "tanh"),)

_VARIANTS = ("", "Jit", "Me")  # scripted, and with their own derivatives, which save only the input
HARD_MISH = "0.5*x*clip(x+2,0,2)"
SQRT_SOFTPLUS = "sqrt(softplus(x))"
LAPLACE = "0.5*(1+erf((x-0.707107)/(0.282095*sqrt(2))))"

_TORCH: dict[str, _Verdict] = {
    **{module: _torch(module, row) for module, row in ROW_OF_MODULE.items() if row.in_torch},
    "GELU": _gelu,
    "PReLU": "its slope is learned, and the slope's gradient needs the input",
    "RReLU": "its slopes are drawn at random in training",
    "GLU": "one half of its input gates the other: it is not pointwise",
    **dict.fromkeys(("Softmax", "Softmin", "Softmax2d", "LogSoftmax"), "it is not pointwise"),
}

_TRANSFORMERS: dict[str, _Verdict] = {
    "GELUActivation": _held("GELU", "gelu", "python_gelu", _AS_ERF),
    "NewGELUActivation": _fixed("GELU", "gelu_tanh", _AS_TANH, formula="new_gelu"),
    "FastGELUActivation": _fixed("GELU", "gelu_tanh", _AS_TANH, formula="fast_gelu"),
    "AccurateGELUActivation": _fixed("GELU", "gelu_tanh", _AS_TANH, formula="new_gelu"),
    "GELUTanh": _held("GELU", "gelu_tanh", "new_gelu", _AS_TANH),
    "PytorchGELUTanh": _fixed("GELU", "gelu_tanh", _AS_TANH),
    "QuickGELUActivation": _fixed("QuickGELU", "quick_gelu"),
    "SiLUActivation": _fixed("SiLU", "silu"),
    "MishActivation": _held("Mish", "mish", "mish"),
    "ReLUSquaredActivation": _fixed("SquaredReLU", "squared_relu"),
    "SqrtSoftplusActivation": _fixed("SqrtSoftplus", SQRT_SOFTPLUS, formula="sqrt_softplus"),
    # With the default μ and σ of its forward; nothing in the package passes others.
    "LaplaceActivation": _fixed("Laplace", LAPLACE, formula="laplace"),
    "LinearActivation": "it is the identity, which keeps nothing",
    "ClippedGELUActivation": "it is GELU cut to a range, whose derivative is another",
    "XIELUActivation": "its two parameters are learned, and their gradients need the input",
}

_TIMM: dict[str, _Verdict] = {
    **{f"Swish{variant}": _fixed("SiLU", "silu", formula="swish") for variant in _VARIANTS},
    **{f"Mish{variant}": _fixed("Mish", "mish", formula="mish") for variant in _VARIANTS},
    **{f"HardSwish{variant}": _fixed("Hardswish", "hardswish", formula="hard_swish") for variant in _VARIANTS},
    **{f"HardSigmoid{variant}": _fixed("Hardsigmoid", "hardsigmoid", formula="hard_sigmoid") for variant in _VARIANTS},
    **{
        f"HardMish{variant}": _either("HardMish", HARD_MISH, "hard_mish", "hard_mish_in_place") for variant in _VARIANTS
    },
    "Sigmoid": _either("Sigmoid", "sigmoid", None, "sigmoid_in_place"),
    "Tanh": _either("Tanh", "tanh", None, "tanh_in_place"),
    "GELU": _fixed("GELU", "gelu", _AS_ERF),
    "GELUTanh": _fixed("GELU", "gelu_tanh", _AS_TANH),
    "QuickGELU": _fixed("QuickGELU", "quick_gelu"),
    "PReLU": "its slope is learned, and the slope's gradient needs the input",
}

_TIMM_MODULES = tuple(
    f"timm.{package}.activations{variant}" for package in ("layers", "models.layers") for variant in ("", "_jit", "_me")
)

_CLASSES: dict[tuple[str, str], _Verdict] = {
    **{("torch.nn.modules.activation", name): verdict for name, verdict in _TORCH.items()},
    **{("transformers.activations", name): verdict for name, verdict in _TRANSFORMERS.items()},
    **{(module, name): verdict for module in _TIMM_MODULES for name, verdict in _TIMM.items()},
    # The tanh form in evaluation and in training; in training with its own derivative.
    ("transformers.models.bloom.modeling_bloom", "BloomGelu"): _fixed(
        "GELU", "gelu_tanh", _AS_TANH, formula="bloom_gelu"
    ),
}
