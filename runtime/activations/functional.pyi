from collections.abc import Callable, Sequence

from torch import Tensor

from ...tables import Table
from .gated import geglu as geglu
from .gated import glu as glu
from .gated import reglu as reglu
from .gated import swiglu as swiglu
from .table_lookup import Rounding

def activation(
    input: Tensor,
    function: str | Callable[[Tensor], Tensor],
    *,
    bits: int | None = None,
    table: Table | None = None,
    kinks: Sequence[float] = (),
    rounding: Rounding | None = None,
) -> Tensor: ...
def gelu(
    input: Tensor,
    approximate: str = "none",
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor: ...

# ---- written from the rows by tests/support/activation_stubs.py; not by hand -----------------------------------------

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
