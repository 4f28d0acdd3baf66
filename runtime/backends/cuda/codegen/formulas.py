"""f(x) in CUDA C++, for every function in `FORWARDS`: the formulas of torch's own CUDA kernels.

Each is read from aten/src/ATen/native/cuda (Activation*Kernel.cu, UnaryOps, TensorCompare.cu): the same operations in
the same order on the same type, so that the compiler contracts them alike. `A` is the type of arithmetic, float for the
types of 16 bits; `rounded` stands where torch stores a result, or a parameter, in the tensor's own type.

To a float16 or bfloat16 result the compiler's choices cannot matter but at a tie; in float32 and float64 a formula that
is contracted differently, or a newer math library than the one that torch was built with, may differ in the last place.
"""

import re
from collections.abc import Sequence

import numpy as np

from .....tables.errors import FewbitError
from .lookup import literal

# Torch's names of the parameters, then statements that end in `return`. {0} is the first parameter.
FORMULAS: dict[str, str] = {
    "relu": "return x < 0 ? A(0) : x;",
    "relu6": "return x < 0 ? A(0) : x > 6 ? A(6) : x;",
    "leaky_relu": "return x > 0 ? x : x * A({0});",
    "elu": "return x > 0 ? x : expm1(x) * A({0});",
    "celu": "return x > 0 ? x : expm1(x * A(1.0 / {0})) * A({0});",
    "selu": """\
const A alpha = A(1.6732632423543772848170429916717), scale = A(1.0507009873554804934193349852946);
return x > 0 ? x * scale : expm1(x) * (alpha * scale);""",
    "gelu": "return x * A(0.5) * (A(1) + erf(x * A(0.70710678118654752440)));",
    "gelu_tanh": """\
const A inner = A(0.79788456080286535588) * (x + A(0.044715) * (x * x * x));
return A(0.5) * x * (A(1) + tanh(inner));""",
    "silu": "return x / (A(1) + exp(-x));",
    "mish": "return x * tanh(log1p(exp(x)));",
    "softplus": "return x * A({0}) > A({1}) ? x : log1p(exp(x * A({0}))) / A({0});",
    "softsign": "return x / rounded<T>(fabs(x) + A(1));",
    "sigmoid": "return A(1) / (A(1) + exp(-x));",
    "logsigmoid": "return (x < 0 ? x : A(0)) - log1p(exp(-fabs(x)));",
    "tanh": "return tanh(x);",
    "tanhshrink": "return x - rounded<T>(tanh(x));",
    "hardtanh": """\
const A low = x < A({0}) ? A({0}) : x;
return A({1}) < low ? A({1}) : low;""",
    "hardsigmoid": """\
const A low = x + A(3) < 0 ? A(0) : x + A(3);
return (low > 6 ? A(6) : low) * A(1.0f / 6.0f);""",
    "hardswish": """\
const A low = x + A(3) < 0 ? A(0) : x + A(3);
return x * (low > 6 ? A(6) : low) * A(1.0f / 6.0f);""",
    "hardshrink": """\
const A lambd = rounded<T>(A({0}));
return x >= -lambd && x <= lambd ? A(0) : x;""",
    "softshrink": """\
const A lambd = rounded<T>(A({0}));
return x > lambd ? x - lambd : x < -lambd ? x + lambd : x != x ? x : A(0);""",
    "threshold": "return x <= rounded<T>(A({0})) ? A({1}) : x;",
    "quick_gelu": """\
const A sigmoid = A(1) / (A(1) + exp(-rounded<T>(x * A(1.702))));
return x * rounded<T>(sigmoid);""",
    "squared_relu": """\
const A relu = x < 0 ? A(0) : x;
return relu * relu;""",
}


# Torch's names of the parameters and their defaults, in torch's order; None where there is no default.
PARAMETERS: dict[str, tuple[tuple[str, float | None], ...]] = {
    "leaky_relu": (("negative_slope", 0.01),),
    "elu": (("alpha", 1.0),),
    "celu": (("alpha", 1.0),),
    "softplus": (("beta", 1.0), ("threshold", 20.0)),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    "hardshrink": (("lambd", 0.5),),
    "softshrink": (("lambd", 0.5),),
    "threshold": (("threshold", None), ("value", None)),
}


def function_of(activation: str) -> tuple[str | None, tuple[float, ...]]:
    """Return the function in `FORMULAS` that a table's `activation` names, and its parameters.

    >>> function_of("softplus(beta=2)")
    ('softplus', (2.0, 20.0))

    Returns:
        (None, ()) where the activation has no formula: an expression, a callable, another family.
    """
    call = re.fullmatch(r"(\w+)(?:\((.*)\))?", activation)
    if not call or call[1] not in FORMULAS:
        return None, ()
    values = dict(PARAMETERS.get(call[1], ()))
    try:
        given = dict(pair.split("=") for pair in (call[2] or "").split(",") if pair)
        values |= {name: float(value) for name, value in given.items()}
    except ValueError:  # the name of an expression such as relu(x)
        return None, ()
    parameters = tuple(value for value in values.values() if value is not None)
    return (call[1], parameters) if len(parameters) == len(PARAMETERS.get(call[1], ())) else (None, ())


def formula(function: str, parameters: Sequence[float] = ()) -> str:
    """Return the statements that compute f(x) and return it.

    Args:
        function: a name in `FORMULAS`.
        parameters: values of its parameters, in torch's order.

    Raises:
        FewbitError: there is no formula of this name.
    """
    if function not in FORMULAS:
        raise FewbitError(f"no CUDA formula of {function!r}; there are {', '.join(FORMULAS)}")
    literals = [
        f"({text})" if text.startswith("-") else text for text in map(literal, np.asarray(parameters, np.float64))
    ]
    return FORMULAS[function].format(*literals)
