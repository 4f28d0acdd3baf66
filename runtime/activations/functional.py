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

All but gelu are generated from the rows of backends/activation_spec.py; functional.pyi shows their signatures.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...tables import Table
from ..backends.activation_spec import ROW_OF_MODULE
from ..backends.torch_functions import gelu_function
from .dispatch import apply, keeps, key_for, number, resolve_key  # noqa: F401 (generated functions call `number`)
from .gated import geglu, glu, reglu, swiglu
from .generate import define, function_source
from .table_lookup import Rounding
from .user_functions import Custom, custom, solve_custom

__all__ = ["activation", "geglu", "glu", "reglu", "swiglu"]
__all__ += [row.name for row in ROW_OF_MODULE.values()]  # pyright: ignore[reportUnsupportedDunderAll]


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


for _row in ROW_OF_MODULE.values():
    if _row.name != "gelu":  # its `approximate` argument is not a number
        define(_row.name, function_source(_row), globals())


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
