"""The activations of `torch.nn.functional`, with torch's names and arguments plus `bits` and `table`.

The forward pass is torch's own functions, bit for bit. For the backward pass they save ⌈n/8⌉·bits bytes instead of x,
and multiply the gradient by the table's level instead of f'(x) (Few-bit Backward, Listing 1). If no gradient is
required, nothing is saved. First derivatives by torch.func (grad, vjp, vmap, jacrev) work like backward; second ones,
and forward mode while a gradient is recorded, are refused.

Where f' takes two values (relu, relu6, leaky_relu, hardtanh, hardsigmoid, hardshrink, softshrink, threshold) one bit
represents it exactly, whatever `bits` allows: the gradient is torch's own, at the kinks too. (For hardsigmoid in
float64 it is grad/6, where torch multiplies by 1/6 rounded to float32.)

Each f'(x) becomes a level of the table, always the same one for the same x. With ``rounding="stochastic"`` it becomes
one of the two beside it, at random, and is f'(x) on average: the gradient has more error and no bias.

swiglu, geglu, reglu and glu are act(gate) · up of two tensors: see gated.py.

All accept float64, float32, float16 or bfloat16 of any shape and layout, and raise `FewbitError` for wrong arguments.

All but gelu are written from the rows of backends/activation_spec.py.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...tables import Table
from ..backends.torch_functions import gelu_function
from .arguments import Custom, Rounding, custom, solve_custom
from .dispatch import apply, keeps, key_for, number, resolve_key
from .gated import geglu, glu, reglu, swiglu


def gelu(
    input: Tensor,
    approximate: str = "none",
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.gelu` with `bits` bits saved; ``approximate="tanh"`` has its own table.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        approximate: ``none`` or ``tanh``.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.gelu(x, bits=3)
    """
    function = gelu_function(approximate)
    return apply(input, function, (), resolve_key(function, (), bits, table, rounding))


def activation(
    input: Tensor,
    function: str | Callable[[Tensor], Tensor],
    *,
    bits: int | None = None,
    table: Table | None = None,
    kinks: Sequence[float] = (),
    rounding: Rounding | None = None,
) -> Tensor:
    """Return f(input) of any pointwise activation, an expression in x or a callable, with `bits` bits saved.

    See `fewbit.FewBit` for the arguments. The first call with a callable solves its table, so pass the same object
    every time: a lambda written in a `forward` is a new one each time.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        function, bits, table, kinks, rounding: as for `fewbit.FewBit`.

    Raises:
        FewbitError: an argument is wrong; the callable is not elementwise.

    Example:
        y = fewbit.functional.activation(x, "x*sigmoid(1.702*x)", bits=3)
    """
    name, parameters, key = _custom_for(input.dtype, function, bits, table, tuple(kinks), rounding)
    if not isinstance(function, str) and not keeps(input):
        return function(input)
    return apply(input, name, parameters, key)


@torch.compiler.assume_constant_result
def _custom_for(
    dtype: torch.dtype,
    function: str | Callable[[Tensor], Tensor],
    bits: int | None,
    table: Table | None,
    kinks: tuple[float, ...],
    rounding: Rounding | None,
) -> tuple[str, tuple[float, ...], str]:
    own, key = _cached_custom(dtype, function, bits, table, kinks, rounding)
    return own.function, tuple(own.arguments.values()), key


@lru_cache(maxsize=256)
def _cached_custom(
    dtype: torch.dtype,
    function: str | Callable[[Tensor], Tensor],
    bits: int | None,
    table: Table | None,
    kinks: tuple[float, ...],
    rounding: Rounding | None,
) -> tuple[Custom, str]:
    own = custom(function)
    if table is None and (kinks or not isinstance(function, str)):
        table = solve_custom(function, bits, kinks, rounding)
    return own, key_for(dtype, own.function, tuple(own.arguments.values()), bits, table, rounding)


# ---- written from the rows by tests/support/activation_code.py; not by hand ------------------------------------------

__all__ = [
    "activation",
    "celu",
    "elu",
    "geglu",
    "gelu",
    "glu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "quick_gelu",
    "reglu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "squared_relu",
    "swiglu",
    "tanh",
    "tanhshrink",
    "threshold",
]


def relu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.relu`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.relu(x, bits=3)
    """
    key = resolve_key("relu", (), bits, table, rounding)
    return apply(input, "relu", (), key, inplace)


def relu6(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.relu6`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.relu6(x, bits=3)
    """
    key = resolve_key("relu6", (), bits, table, rounding)
    return apply(input, "relu6", (), key, inplace)


def leaky_relu(
    input: Tensor,
    negative_slope: float = 0.01,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.leaky_relu`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        negative_slope: f' where x ≤ 0.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.leaky_relu(x, bits=3)
    """
    parameters = (number("negative_slope", negative_slope),)
    key = resolve_key("leaky_relu", parameters, bits, table, rounding)
    return apply(input, "leaky_relu", parameters, key, inplace)


def elu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.elu` with `bits` bits kept; each alpha has its own table.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        alpha: −f far left.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.elu(x, bits=3)
    """
    parameters = (number("alpha", alpha),)
    key = resolve_key("elu", parameters, bits, table, rounding)
    return apply(input, "elu", parameters, key, inplace)


def celu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.celu` with `bits` bits kept; each alpha has its own table.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        alpha: −f far left.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.celu(x, bits=3)
    """
    parameters = (number("alpha", alpha),)
    key = resolve_key("celu", parameters, bits, table, rounding)
    return apply(input, "celu", parameters, key, inplace)


def selu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.selu` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.selu(x, bits=3)
    """
    key = resolve_key("selu", (), bits, table, rounding)
    return apply(input, "selu", (), key, inplace)


def silu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.silu` (Swish) with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.silu(x, bits=3)
    """
    key = resolve_key("silu", (), bits, table, rounding)
    return apply(input, "silu", (), key, inplace)


def mish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.mish` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.mish(x, bits=3)
    """
    key = resolve_key("mish", (), bits, table, rounding)
    return apply(input, "mish", (), key, inplace)


def softplus(
    input: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.softplus` with `bits` bits kept; each beta and threshold has its own table.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        beta: How sharply it bends.
        threshold: Where beta·x is above it, f(x) = x.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.softplus(x, bits=3)
    """
    parameters = (
        number("beta", beta),
        number("threshold", threshold),
    )
    key = resolve_key("softplus", parameters, bits, table, rounding)
    return apply(input, "softplus", parameters, key)


def softsign(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.softsign` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.softsign(x, bits=3)
    """
    key = resolve_key("softsign", (), bits, table, rounding)
    return apply(input, "softsign", (), key)


def sigmoid(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.sigmoid` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.sigmoid(x, bits=3)
    """
    key = resolve_key("sigmoid", (), bits, table, rounding)
    return apply(input, "sigmoid", (), key)


def logsigmoid(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.logsigmoid` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.logsigmoid(x, bits=3)
    """
    key = resolve_key("logsigmoid", (), bits, table, rounding)
    return apply(input, "logsigmoid", (), key)


def tanh(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.tanh` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.tanh(x, bits=3)
    """
    key = resolve_key("tanh", (), bits, table, rounding)
    return apply(input, "tanh", (), key)


def tanhshrink(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.tanhshrink` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.tanhshrink(x, bits=3)
    """
    key = resolve_key("tanhshrink", (), bits, table, rounding)
    return apply(input, "tanhshrink", (), key)


def hardtanh(
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardtanh`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        min_val: The least value of f.
        max_val: The greatest value of f.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.hardtanh(x, bits=3)
    """
    parameters = (
        number("min_val", min_val, infinite=True),
        number("max_val", max_val, infinite=True),
    )
    key = key_for(input.dtype, "hardtanh", parameters, bits, table, rounding)
    return apply(input, "hardtanh", parameters, key, inplace)


def hardsigmoid(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardsigmoid`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.hardsigmoid(x, bits=3)
    """
    key = resolve_key("hardsigmoid", (), bits, table, rounding)
    return apply(input, "hardsigmoid", (), key, inplace)


def hardswish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardswish` with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.hardswish(x, bits=3)
    """
    key = resolve_key("hardswish", (), bits, table, rounding)
    return apply(input, "hardswish", (), key, inplace)


def hardshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardshrink`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        lambd: f(x) = 0 where |x| ≤ lambd.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.hardshrink(x, bits=3)
    """
    parameters = (number("lambd", lambd, infinite=True),)
    key = key_for(input.dtype, "hardshrink", parameters, bits, table, rounding)
    return apply(input, "hardshrink", parameters, key)


def softshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.softshrink`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        lambd: f(x) = 0 where |x| ≤ lambd.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.softshrink(x, bits=3)
    """
    parameters = (number("lambd", lambd),)
    key = key_for(input.dtype, "softshrink", parameters, bits, table, rounding)
    return apply(input, "softshrink", parameters, key)


def threshold(
    input: Tensor,
    threshold: float,
    value: float,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.threshold`, exact in one bit.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        threshold: f(x) = x above it.
        value: f(x) elsewhere.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.threshold(x, 0.1, 20.0, bits=3)
    """
    parameters = (
        number("threshold", threshold, infinite=True),
        number("value", value, infinite=True),
    )
    key = key_for(input.dtype, "threshold", parameters, bits, table, rounding)
    return apply(input, "threshold", parameters, key, inplace)


def quick_gelu(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """x·σ(1.702x), the GELU of CLIP, as `transformers` computes it, with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.quick_gelu(x, bits=3)
    """
    key = resolve_key("quick_gelu", (), bits, table, rounding)
    return apply(input, "quick_gelu", (), key)


def squared_relu(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """relu(x)² (Primer), as `transformers` computes it, with `bits` bits kept.

    Args:
        input: float64, float32, float16 or bfloat16, of any shape and layout.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Returns:
        f(input), bit for bit torch's, in the shape and dtype of `input`.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.functional.squared_relu(x, bits=3)
    """
    key = resolve_key("squared_relu", (), bits, table, rounding)
    return apply(input, "squared_relu", (), key)
