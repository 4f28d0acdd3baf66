"""The activations that the compiler knows: f, its analytic derivative f', and where f' is not smooth.

Each family is a function with the keyword arguments of its `torch.nn.functional` namesake that returns an
`Activation`; `parse_activation` reads "softplus(beta=2)". Derivatives are never differenced: each is written
so that no tail cancels (σ(−x) for 1 − σ(x), and so on). What f'(kink) is follows torch: the left value.
"""

import ast
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_ndtr, ndtr

from ..tables.errors import FewbitError, shown
from ..tables.names import find_name, nearest_names, number_text

Function = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Activation:
    """A pointwise activation f: R → R.

    Attributes:
        name: canonical text that `parse_activation` reads back, such as ``softplus(beta=2)``.
        function: f, float64 to float64, elementwise.
        derivative: f', float64 to float64, elementwise; at a kink its value from the left.
        kinks: points where f' jumps or bends, increasing.
        step: whether f' is constant between kinks, so that a finite table holds it exactly.
        reach: beyond ±reach f' is constant to a double's last digit, but for a jump at a kink.
    """

    name: str
    function: Function
    derivative: Function
    kinks: tuple[float, ...] = ()
    step: bool = False
    reach: float = 40.0  # e⁻⁴⁰ is less than half a last digit of 1


# SELU's constants, to double precision (Klambauer et al. 2017).
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def relu() -> Activation:
    """max(x, 0)."""
    return Activation(
        "relu", lambda x: np.maximum(x, 0.0), lambda x: np.where(x > 0, 1.0, 0.0), kinks=(0.0,), step=True
    )


def gelu() -> Activation:
    """x Φ(x), Φ the normal distribution function."""

    def derivative(x: NDArray[np.float64]) -> NDArray[np.float64]:
        # Φ(x) + xφ(x). Far left they differ in sign, but |x|φ is x² times larger: nothing cancels.
        x = np.clip(x, -1e8, 1e8)  # keeps ∞·0 out; f' is 0 or 1 there
        return ndtr(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)

    return Activation("gelu", lambda x: x * np.exp(log_ndtr(x)), derivative)


def gelu_tanh() -> Activation:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), torch's ``GELU(approximate="tanh")``."""
    a, c = math.sqrt(2 / math.pi), 0.044715

    def gate(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return 2 * a * (x + c * x**3)  # ½(1 + tanh(u)) = σ(2u)

    def derivative(x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = np.clip(x, -1e8, 1e8)
        u = gate(x)
        return expit(u) * (1 + x * expit(-u) * 2 * a * (1 + 3 * c * x * x))

    return Activation("gelu_tanh", lambda x: x * expit(gate(x)), derivative)


def silu() -> Activation:
    """x σ(x), also called Swish."""

    def derivative(x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = np.clip(x, -1e8, 1e8)
        return expit(x) * (1 + x * expit(-x))

    return Activation("silu", lambda x: x * expit(x), derivative)


def sigmoid() -> Activation:
    """σ(x) = 1 / (1 + e^{−x})."""
    return Activation("sigmoid", lambda x: expit(x), lambda x: expit(x) * expit(-x))


def tanh() -> Activation:
    """tanh(x); 1 − tanh² is written 4 σ(2x) σ(−2x)."""
    return Activation("tanh", lambda x: np.tanh(x), lambda x: 4 * expit(2 * x) * expit(-2 * x))


def selu() -> Activation:
    """λ x for x > 0, λα (eˣ − 1) otherwise."""
    return Activation(
        "selu",
        lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0))),
        lambda x: np.where(x > 0, _SELU_SCALE, _SELU_SCALE * _SELU_ALPHA * np.exp(np.minimum(x, 0))),
        kinks=(0.0,),
    )


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    """log(1 + e^{βx}) / β, and x itself where βx > threshold, as torch has it."""
    beta, threshold = _finite("beta", beta), _finite("threshold", threshold)
    if beta == 0:
        raise FewbitError("softplus needs a beta other than 0")

    def function(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(beta * x > threshold, x, np.logaddexp(0, beta * x) / beta)

    def derivative(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(beta * x > threshold, 1.0, expit(beta * x))

    # The product rounds, so the last double of the left piece may be a neighbour of the quotient.
    near = [threshold / beta]
    for _ in range(3):
        near = [math.nextafter(near[0], -math.inf), *near, math.nextafter(near[-1], math.inf)]
    left = [x for x in near if (beta * x > threshold) == (beta < 0)]
    kink = left[-1] if left else near[3]  # none where the numbers are too small to tell
    return Activation(
        _call_text("softplus", softplus, beta=beta, threshold=threshold),
        function,
        derivative,
        kinks=(kink,),
        reach=40 / abs(beta),
    )


FAMILIES: dict[str, Callable[..., Activation]] = {
    family.__name__: family for family in (relu, gelu, gelu_tanh, silu, sigmoid, tanh, selu, softplus)
}


def parse_activation(text: str) -> Activation:
    """Return the activation that `text` names: a family, alone or called with keyword numbers.

    >>> parse_activation("Softplus(beta=2.0)").name
    'softplus(beta=2)'

    Raises:
        FewbitError: `text` names no family (the nearest are told) or gives it wrong arguments.
    """
    family, arguments = _parse_call(text)
    name = find_name(family, FAMILIES)
    if name is None:
        near = nearest_names(family, FAMILIES)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(FAMILIES)}"
        raise FewbitError(f"unknown activation {shown(family)}; {hint}")
    accepted = inspect.signature(FAMILIES[name]).parameters
    for argument in arguments:
        if argument not in accepted:
            takes = f"takes {', '.join(accepted)}" if accepted else "takes no arguments"
            raise FewbitError(f"activation {name} {takes}, not {shown(argument)}")
    return FAMILIES[name](**arguments)


def activation_name(family: str, **arguments: float) -> str:
    """Return the canonical name of `family` called with `arguments`, defaults left out."""
    return _call_text(family, FAMILIES[family], **arguments)


def _call_text(name: str, family: Callable[..., Activation], **arguments: float) -> str:
    defaults = {p.name: p.default for p in inspect.signature(family).parameters.values()}
    given = [f"{key}={number_text(value)}" for key, value in arguments.items() if value != defaults[key]]
    return f"{name}({','.join(given)})" if given else name


def _parse_call(text: str) -> tuple[str, dict[str, Any]]:
    if "(" not in text:
        return text.strip(), {}
    accepted = "write a name, or a name with keyword numbers such as softplus(beta=2)"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FewbitError(f"cannot read activation {shown(text)}; {accepted}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise FewbitError(f"cannot read activation {shown(text)}; {accepted}")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            value = None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or keyword.arg is None or keyword.arg in arguments:  # **more, or the same twice
            raise FewbitError(f"cannot read activation {shown(text)}; {accepted}")
        arguments[keyword.arg] = value
    return call.func.id, arguments


def _finite(name: str, value: float) -> float:
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise FewbitError(f"{name} must be a finite number, not {value}")
    return value
