"""The derivatives of the named activations, of power series whose coefficients are balls; kinks lie between pieces."""

from collections.abc import Callable

from flint import arb, arb_series

Function = Callable[[arb_series], arb_series]


def constant(value: str) -> Function:
    """Return the function that is `value`, a decimal number, everywhere."""
    return lambda x: arb_series([arb(value)])


def sigmoid(x: arb_series) -> arb_series:
    """σ(x), by the exponential that is at most 1: that of a ball which reaches from 40 to 1e9 is no number."""
    if x[0] < 0:
        e = x.exp()
        return e / (1 + e)
    return 1 / (1 + (-x).exp())


def gated(u: arb_series, rise: arb_series | float, x: arb_series) -> arb_series:
    """Return the derivative of x σ(u), where `rise` is u'."""
    return sigmoid(u) * (1 + x * rise * sigmoid(-u))


def gelu_tanh(x: arb_series) -> arb_series:
    """Return the derivative of x σ(a (x + c x³))."""
    a, c = 2 * (2 / arb.pi()).sqrt(), arb("0.044715")
    return gated(a * x * (1 + c * x * x), a * (1 + 3 * c * x * x), x)


def mish(x: arb_series) -> arb_series:
    """Return the derivative of x T, where T = tanh(log(1 + eˣ)) = 1 − 2u; by the exponential that is at most 1."""
    e = x.exp() if x[0] < 0 else (-x).exp()
    square = (1 + e) * (1 + e)
    u = 1 / (1 + square) if x[0] < 0 else e * e / (e * e + square)
    return 1 - 2 * u + x * sigmoid(x) * 4 * u * (1 - u)


ZERO, ONE, BUMP = constant("0"), constant("1"), [constant("0"), constant("1"), constant("0")]
SCALE, SCALE_ALPHA = "1.0507009873554804934193349852946", "1.7580993408473768599402175208123"  # SELU's λ and λα
# fmt: off
DERIVATIVES: dict[str, tuple[list[float], list[Function]]] = {  # where pieces meet; pieces
    "arctan": ([], [lambda x: 1 / (1 + x * x)]), "sigmoid": ([], [lambda x: sigmoid(x) * sigmoid(-x)]),
    "celu": ([0], [lambda x: x.exp(), ONE]), "elu": ([0], [lambda x: x.exp(), ONE]),
    "selu": ([0], [lambda x: arb(SCALE_ALPHA) * x.exp(), constant(SCALE)]), "softplus": ([20], [sigmoid, ONE]),
    "erf": ([], [lambda x: 2 * (-x * x).exp() / arb.pi().sqrt()]), "mish": ([], [mish]),
    "gaussian": ([], [lambda x: -2 * x * (-x * x).exp()]), "gelu_tanh": ([], [gelu_tanh]),
    "gelu": ([], [lambda x: (1 + (x / arb(2).sqrt()).erf() + x * (-x * x / 2).exp() * (2 / arb.pi()).sqrt()) / 2]),
    "silu": ([], [lambda x: gated(x, 1.0, x)]), "quick_gelu": ([], [lambda x: gated(1.702 * x, 1.702, x)]),
    "softsign": ([0], [lambda x: 1 / ((1 - x) * (1 - x)), lambda x: 1 / ((1 + x) * (1 + x))]),
    "tanh": ([], [lambda x: 4 * sigmoid(2 * x) * sigmoid(-2 * x)]), "logsigmoid": ([], [lambda x: sigmoid(-x)]),
    "tanhshrink": ([], [lambda x: (1 - 2 * sigmoid(2 * x)) * (1 - 2 * sigmoid(2 * x))]), "sin": ([], [arb_series.cos]),
    "hardswish": ([-3, 3], [ZERO, lambda x: x / 3 + 0.5, ONE]), "squared_relu": ([0], [ZERO, lambda x: 2 * x]),
    "hardsigmoid": ([-3, 3], [ZERO, lambda x: arb_series([arb(1) / 6]), ZERO]), "hardtanh": ([-1, 1], BUMP),
    "hardshrink": ([-0.5, 0.5], [ONE, ZERO, ONE]), "softshrink": ([-0.5, 0.5], [ONE, ZERO, ONE]),
    "leaky_relu": ([0], [constant("0.01"), ONE]), "relu": ([0], [ZERO, ONE]), "relu6": ([0, 6], BUMP),
}
# fmt: on
OSCILLATING = frozenset({"sin"})  # those whose f' does not settle far out
