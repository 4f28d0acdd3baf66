"""Elementary functions for expressions beyond the families: each an `Activation`, so one chain rule covers all."""

import math

import numpy as np
from scipy.special import erfc

from .base import Activation

_FUNCTIONS = (
    Activation("exp", lambda x: np.exp(x), lambda x: np.exp(x), turns=()),
    Activation("expm1", lambda x: np.expm1(x), lambda x: np.exp(x), turns=()),
    Activation("log", lambda x: np.log(x), lambda x: 1 / x, turns=()),
    Activation("log1p", lambda x: np.log1p(x), lambda x: 1 / (1 + x), turns=()),
    Activation("sqrt", lambda x: np.sqrt(x), lambda x: 0.5 / np.sqrt(x), turns=()),
    Activation("cos", lambda x: np.cos(x), lambda x: -np.sin(x)),
    Activation("tan", lambda x: np.tan(x), lambda x: np.cos(x) ** -2.0),
    Activation("sinh", lambda x: np.sinh(x), lambda x: np.cosh(x), turns=(0.0,)),
    Activation("cosh", lambda x: np.cosh(x), lambda x: np.sinh(x), turns=(0.0,)),
    Activation("arcsinh", lambda x: np.arcsinh(x), lambda x: 1 / np.hypot(1, x), turns=(0.0,)),
    Activation("erfc", lambda x: erfc(x), lambda x: -2 / math.sqrt(math.pi) * np.exp(-x * x), turns=(0.0,)),
    # At 0 both take the value of the piece on the left, like every kink: sign(0) is −1.
    Activation("abs", lambda x: np.abs(x), lambda x: np.where(x > 0, 1.0, -1.0), kinks=(0.0,), turns=()),
    Activation("sign", lambda x: np.where(x > 0, 1.0, -1.0), lambda x: np.zeros_like(x), kinks=(0.0,), turns=()),
)

ELEMENTARY: dict[str, Activation] = {function.name: function for function in _FUNCTIONS}
