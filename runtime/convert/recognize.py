"""Recognizes which activation a module is, of torch.nn or as `transformers` and `timm` define it, or which it holds.

Neither package is imported: a class is identified by the path of its module and its name. A subclass counts as its
parent unless it defines its own `forward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from ...tables.names import number_text
from ..activations.catch import CAUGHT
from ..backends.activation_spec import ROW_OF_MODULE, ActivationRow
from ..backends.forwards import forward_of
from ..backends.torch_functions import gelu_function

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


def _fixed(
    name: str,
    activation: str,
    arguments: Arguments = (),
    *,
    formula: str | None = None,
    in_place: str | None = None,
    may_hold: bool = False,
) -> Rule:
    """Return the rule of a class whose function depends on nothing in the module except `inplace`.

    Args:
        name, activation, arguments, formula: as of `Recognized`.
        in_place: the formula of timm's classes that use another one in place.
        may_hold: whether `act`, as of classes of transformers, is torch's function or a method with the formula.
    """

    def rule(module: Any) -> Recognized:
        inplace = bool(getattr(module, "inplace", False))
        holds = may_hold and getattr(getattr(module, "act", None), "__self__", None) is not module
        own = None if holds else in_place if inplace and in_place is not None else formula
        return Recognized(name, arguments, activation, inplace, own)

    return rule


_AS_ERF: Arguments = (("approximate", "none"),)
_AS_TANH: Arguments = (("approximate", "tanh"),)

_VARIANTS = ("", "Jit", "Me")  # scripted, and with their own derivatives, which save only the input
HARD_MISH = "0.5*x*clip(x+2,0,2)"
SQRT_SOFTPLUS = "sqrt(softplus(x))"
LAPLACE = "0.5*(1+erf((x-0.707107)/(0.282095*sqrt(2))))"

IN_TORCH: dict[str, _Verdict] = {
    **{module: _torch(module, row) for module, row in ROW_OF_MODULE.items() if row.in_torch},
    "GELU": lambda gelu: Recognized(
        "GELU", (("approximate", gelu.approximate),), "gelu_tanh" if gelu.approximate == "tanh" else "gelu"
    ),
    "PReLU": "its slope is learned, and the slope's gradient needs the input",
    "RReLU": "its slopes are drawn at random in training",
    "GLU": "one half of its input gates the other: it is not pointwise",
    **dict.fromkeys(("Softmax", "Softmin", "Softmax2d", "LogSoftmax"), "it is not pointwise"),
}

_TRANSFORMERS: dict[str, _Verdict] = {
    "GELUActivation": _fixed("GELU", "gelu", _AS_ERF, formula="python_gelu", may_hold=True),
    "NewGELUActivation": _fixed("GELU", "gelu_tanh", _AS_TANH, formula="new_gelu"),
    "FastGELUActivation": _fixed("GELU", "gelu_tanh", _AS_TANH, formula="fast_gelu"),
    "AccurateGELUActivation": _fixed("GELU", "gelu_tanh", _AS_TANH, formula="new_gelu"),
    "GELUTanh": _fixed("GELU", "gelu_tanh", _AS_TANH, formula="new_gelu", may_hold=True),
    "PytorchGELUTanh": _fixed("GELU", "gelu_tanh", _AS_TANH),
    "QuickGELUActivation": _fixed("QuickGELU", "quick_gelu"),
    "SiLUActivation": _fixed("SiLU", "silu"),
    "MishActivation": _fixed("Mish", "mish", formula="mish", may_hold=True),
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
        f"HardMish{variant}": _fixed("HardMish", HARD_MISH, formula="hard_mish", in_place="hard_mish_in_place")
        for variant in _VARIANTS
    },
    "Sigmoid": _fixed("Sigmoid", "sigmoid", in_place="sigmoid_in_place"),
    "Tanh": _fixed("Tanh", "tanh", in_place="tanh_in_place"),
    "GELU": _fixed("GELU", "gelu", _AS_ERF),
    "GELUTanh": _fixed("GELU", "gelu_tanh", _AS_TANH),
    "QuickGELU": _fixed("QuickGELU", "quick_gelu"),
    "PReLU": "its slope is learned, and the slope's gradient needs the input",
}

_TIMM_MODULES = tuple(
    f"timm.{package}.activations{variant}" for package in ("layers", "models.layers") for variant in ("", "_jit", "_me")
)

_CLASSES: dict[tuple[str, str], _Verdict] = {
    **{("torch.nn.modules.activation", name): verdict for name, verdict in IN_TORCH.items()},
    **{("transformers.activations", name): verdict for name, verdict in _TRANSFORMERS.items()},
    **{(module, name): verdict for module in _TIMM_MODULES for name, verdict in _TIMM.items()},
    # The tanh form in evaluation and in training; in training with its own derivative.
    ("transformers.models.bloom.modeling_bloom", "BloomGelu"): _fixed(
        "GELU", "gelu_tanh", _AS_TANH, formula="bloom_gelu"
    ),
}


# ---- functions that modules hold in an attribute, as `nn.TransformerEncoderLayer` F.relu -----------------------------


@dataclass(frozen=True)
class Held:
    """A function of torch with all its arguments except x.

    Attributes:
        function: its name in `FORWARDS`.
        arguments: (name, value) for each of its parameters.
        inplace: whether it overwrites x.
    """

    function: str
    arguments: tuple[tuple[str, float], ...] = ()
    inplace: bool = False

    @property
    def activation(self) -> str:
        """The compiler's name."""
        return forward_of(self.function).activation_name(self.function, [value for _, value in self.arguments])


def read_function(value: object) -> Held | None:
    """Return the function that `value` is, also in a `functools.partial`; None if it has no few-bit form."""
    function, given = value, dict[str, Any]()
    if isinstance(value, partial) and not value.args:
        function, given = value.func, dict(value.keywords)
    if not isinstance(function, FunctionType | BuiltinFunctionType) or function not in CAUGHT:
        return None
    name, inplace = CAUGHT[function]
    inplace = bool(given.pop("inplace", inplace))
    if name == "gelu":
        name = gelu_function(given.pop("approximate", "none"))
    arguments = {key: given.pop(key, default) for key, default in forward_of(name).parameters}
    if given or None in arguments.values():  # other arguments, or some that only the caller passes
        return None
    return Held(name, tuple((key, float(value)) for key, value in arguments.items()), inplace)
