"""Activations composed of exponentials and related functions.

Each family is a function with the keyword arguments of its `torch.nn.functional` namesake that returns an
`Activation`. Derivatives are analytic, written so that no tail suffers cancellation (σ(−x) for 1 − σ(x), and so
on). Of three `turns` that are numbers, f' turns at the outer ones, where f'' is 0, and f at the one between them, where
f' is 0: roots found to double precision.
"""

import math

import numpy as np
from scipy.special import erf as erf_function
from scipy.special import expit, log_ndtr, ndtr

from ...tables.errors import FewbitError
from .base import Activation, Vector, after, before, bounded, call_text, finite, over

# SELU's constants, to double precision (Klambauer et al. 2017).
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def gelu() -> Activation:
    """x Φ(x), Φ the normal distribution function."""

    def derivative(x: Vector) -> Vector:
        # Φ(x) + xφ(x). Far left their signs differ, but |x|φ is x² times larger: no cancellation.
        x = bounded(x)
        return ndtr(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)

    turns = (-math.sqrt(2), -0.75179152469356446, math.sqrt(2))
    return Activation("gelu", lambda x: x * np.exp(log_ndtr(x)), derivative, turns=turns)


def gelu_tanh() -> Activation:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), torch's ``GELU(approximate="tanh")``."""
    a, c = math.sqrt(2 / math.pi), 0.044715

    def gate(x: Vector) -> Vector:
        return 2 * a * (x + c * x**3)  # ½(1 + tanh(u)) = σ(2u)

    def derivative(x: Vector) -> Vector:
        x = bounded(x)
        u = gate(x)
        return expit(u) * (1 + x * expit(-u) * 2 * a * (1 + 3 * c * x * x))

    turns = (-1.4185040087908284, -0.75246142207101626, 1.4185040087908284)
    return Activation("gelu_tanh", lambda x: x * expit(gate(x)), derivative, turns=turns)


def silu(beta: float = 1.0) -> Activation:
    """x σ(βx), also called Swish; torch has only β = 1."""
    beta = finite("beta", beta)
    return _gated(call_text(silu, beta=beta), beta)


def quick_gelu() -> Activation:
    """x σ(1.702 x), the GELU of CLIP."""
    return _gated("quick_gelu", 1.702)


def _gated(name: str, beta: float) -> Activation:
    def derivative(x: Vector) -> Vector:
        z = bounded(beta * x)
        return expit(z) * (1 + z * expit(-z))

    base = ("silu", beta) if name != "silu" and beta > 0 else None
    turns = (
        tuple(sorted(x / beta for x in (-2.3993572805154677, -1.2784645427610738, 2.3993572805154677))) if beta else ()
    )
    if not all(math.isfinite(x) for x in turns):
        turns = None
    return Activation(name, lambda x: x * expit(beta * x), derivative, reach=over(40, beta), base=base, turns=turns)


def mish() -> Activation:
    """x tanh(log(1 + eˣ))."""

    def gate(x: Vector) -> Vector:
        return np.logaddexp(0, x)

    def derivative(x: Vector) -> Vector:
        x = bounded(x)
        u = gate(x)
        return np.tanh(u) + x * expit(x) * 4 * expit(2 * u) * expit(-2 * u)  # 1 − tanh² as in `tanh`

    turns = (-2.2563763963607931, -1.1924312145154952, 1.4905711794854284)
    return Activation("mish", lambda x: x * np.tanh(gate(x)), derivative, turns=turns)


def sigmoid() -> Activation:
    """σ(x) = 1 / (1 + e^{−x})."""
    return Activation("sigmoid", lambda x: expit(x), lambda x: expit(x) * expit(-x), turns=(0.0,))


def logsigmoid() -> Activation:
    """log σ(x)."""
    return Activation("logsigmoid", lambda x: -np.logaddexp(0, -x), lambda x: expit(-x), turns=())


def tanh() -> Activation:
    """tanh(x); 1 − tanh² is written 4 σ(2x) σ(−2x)."""
    return Activation("tanh", lambda x: np.tanh(x), lambda x: 4 * expit(2 * x) * expit(-2 * x), turns=(0.0,))


def tanhshrink() -> Activation:
    """x − tanh(x)."""
    nodes, weights = np.polynomial.legendre.leggauss(12)

    def function(x: Vector) -> Vector:
        # Near 0 the difference cancels. There it equals ∫₀ˣ tanh², which twelve nodes give to the last digit.
        near = np.clip(x, -0.5, 0.5)
        integral = 0.5 * near * (weights * np.tanh(0.5 * near[..., None] * (nodes + 1)) ** 2).sum(axis=-1)
        return np.where(np.abs(x) <= 0.5, integral, x - np.tanh(x))

    return Activation("tanhshrink", function, lambda x: np.tanh(x) ** 2, turns=(0.0,))


def softsign() -> Activation:
    """x / (1 + |x|)."""
    return Activation(
        "softsign",
        lambda x: x / (1 + np.abs(x)),
        lambda x: (1 / (1 + np.abs(x))) ** 2,
        kinks=(0.0,),
        turns=(),
        reach=100.0,
    )


def selu() -> Activation:
    """λ x for x > 0, λα (eˣ − 1) otherwise."""
    return Activation(
        "selu",
        lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0))),
        lambda x: np.where(x > 0, _SELU_SCALE, _SELU_SCALE * _SELU_ALPHA * np.exp(np.minimum(x, 0))),
        kinks=(0.0,),
        turns=(),
    )


def elu(alpha: float = 1.0) -> Activation:
    """x for x > 0, α (eˣ − 1) otherwise."""
    alpha = finite("alpha", alpha)
    return Activation(
        call_text(elu, alpha=alpha),
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
        lambda x: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0))),
        kinks=(0.0,),
        turns=(),
        step=alpha == 0,
    )


def celu(alpha: float = 1.0) -> Activation:
    """x for x > 0, α (e^{x/α} − 1) otherwise; torch accepts a negative α too."""
    alpha = finite("alpha", alpha)
    if alpha == 0:
        raise FewbitError("celu needs an alpha other than 0")

    return Activation(
        call_text(celu, alpha=alpha),
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) / alpha)),
        lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(x, 0) / alpha)),
        kinks=(0.0,),
        turns=(),
        reach=40 * alpha if alpha > 0 else math.inf,
        base=("elu", 1 / alpha) if alpha > 0 else None,
    )


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    """log(1 + e^{βx}) / β, and x itself where βx > threshold, as torch has it."""
    beta, threshold = finite("beta", beta), finite("threshold", threshold)
    if beta == 0:
        raise FewbitError("softplus needs a beta other than 0")

    def function(x: Vector) -> Vector:
        return np.where(beta * x > threshold, x, np.logaddexp(0, beta * x) / beta)

    def derivative(x: Vector) -> Vector:
        return np.where(beta * x > threshold, 1.0, expit(beta * x))

    # The product rounds, so the last double of the left piece may be a neighbour of the quotient.
    near = [threshold / beta]
    for _ in range(3):
        near = [before(near[0]), *near, after(near[-1])]
    left = [x for x in near if (beta * x > threshold) == (beta < 0)]
    kink = left[-1] if left else near[3]  # empty if the numbers are too small to resolve
    return Activation(
        call_text(softplus, beta=beta, threshold=threshold),
        function,
        derivative,
        kinks=(kink,),
        turns=(),
        reach=40 / abs(beta),
        base=(call_text(softplus, beta=1.0, threshold=threshold), beta) if beta > 0 and beta != 1 else None,
    )


def erf() -> Activation:
    """2/√π ∫₀ˣ e^{−t²} dt."""
    return Activation(
        "erf", lambda x: erf_function(x), lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), reach=8.0, turns=(0.0,)
    )


def arctan() -> Activation:
    """The arc whose tangent is x."""
    return Activation("arctan", lambda x: np.arctan(x), lambda x: 1 / (1 + x * x), reach=100.0, turns=(0.0,))


def sin() -> Activation:
    """sin(x), the activation of SIREN."""
    return Activation("sin", lambda x: np.sin(x), lambda x: np.cos(x), reach=math.inf)


def gaussian() -> Activation:
    """exp(−x²)."""

    def derivative(x: Vector) -> Vector:
        x = bounded(x)
        return -2 * x * np.exp(-x * x)

    turns = (-math.sqrt(0.5), 0.0, math.sqrt(0.5))
    return Activation("gaussian", lambda x: np.exp(-x * x), derivative, reach=8.0, turns=turns)


FAMILIES = (
    *(gelu, gelu_tanh, silu, quick_gelu, mish, sigmoid, logsigmoid, tanh, tanhshrink, softsign, selu, elu, celu),
    *(softplus, erf, arctan, sin, gaussian),
)
