from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from ...tables import Table
from .base import FewBitActivation as FewBitActivation
from .table_lookup import Rounding

MODULES: dict[str, type[FewBitActivation]]

class FewBit(FewBitActivation):
    function: str | Callable[[Tensor], Tensor]

    def __init__(
        self,
        activation: str | Callable[[Tensor], Tensor],
        *,
        bits: int | None = None,
        table: Table | None = None,
        kinks: Sequence[float] = (),
        rounding: Rounding | None = None,
    ) -> None: ...
    def forward(self, input: Tensor) -> Tensor: ...

class GELU(FewBitActivation):
    keep: Literal["codes", "output"]
    def __init__(
        self,
        approximate: str = "none",
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
        keep: Literal["codes", "output"] = "codes",
    ) -> None: ...
    @property
    def approximate(self) -> str: ...

class Hardtanh(FewBitActivation):
    def __init__(
        self,
        min_val: float = -1.0,
        max_val: float = 1.0,
        inplace: bool = False,
        min_value: float | None = None,
        max_value: float | None = None,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def min_val(self) -> float: ...
    @property
    def max_val(self) -> float: ...

# ---- written from the rows by tests/support/activation_stubs.py; not by hand -----------------------------------------

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "SELU",
    "FewBit",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "QuickGELU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Softshrink",
    "Softsign",
    "SquaredReLU",
    "Tanh",
    "Tanhshrink",
    "Threshold",
]

class ReLU(FewBitActivation):
    """`torch.nn.ReLU`; one bit an element is exact.

    Args:
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.ReLU(bits=3)(x)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...

class ReLU6(FewBitActivation):
    """`torch.nn.ReLU6`; one bit an element is exact.

    Args:
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.ReLU6(bits=3)(x)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...

class LeakyReLU(FewBitActivation):
    """`torch.nn.LeakyReLU`; one bit an element is exact.

    Args:
        negative_slope: f' where x ≤ 0.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.LeakyReLU(bits=3)(x)
    """

    def __init__(
        self,
        negative_slope: float = 0.01,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def negative_slope(self) -> float:
        """f' where x ≤ 0."""

class ELU(FewBitActivation):
    """`torch.nn.ELU` with `bits` bits kept for each element; each alpha has its own table.

    Args:
        alpha: −f far left.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.ELU(bits=3)(x)
    """

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def alpha(self) -> float:
        """−f far left."""

class CELU(FewBitActivation):
    """`torch.nn.CELU` with `bits` bits kept for each element; each alpha has its own table.

    Args:
        alpha: −f far left.
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.CELU(bits=3)(x)
    """

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def alpha(self) -> float:
        """−f far left."""

class SELU(FewBitActivation):
    """`torch.nn.SELU` with `bits` bits kept for each element.

    Args:
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.SELU(bits=3)(x)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...

class SiLU(FewBitActivation):
    """`torch.nn.SiLU` (Swish) with `bits` bits kept for each element.

    Args:
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.SiLU(bits=3)(x)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...

class Mish(FewBitActivation):
    """`torch.nn.Mish` with `bits` bits kept for each element.

    Args:
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Mish(bits=3)(x)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...

class Softplus(FewBitActivation):
    """`torch.nn.Softplus` with `bits` bits kept for each element; each beta and threshold has its own table.

    Args:
        beta: How sharply it bends.
        threshold: Where beta·x is above it, f(x) = x.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Softplus(bits=3)(x)
    """

    def __init__(
        self,
        beta: float = 1.0,
        threshold: float = 20.0,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def beta(self) -> float:
        """How sharply it bends."""

    @property
    def threshold(self) -> float:
        """Where beta·x is above it, f(x) = x."""

class Softsign(FewBitActivation):
    """`torch.nn.Softsign` with `bits` bits kept for each element.

    Args:
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Softsign(bits=3)(x)
    """

    def __init__(
        self, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
    ) -> None: ...

class Sigmoid(FewBitActivation):
    """`torch.nn.Sigmoid` with `bits` bits kept for each element.

    Args:
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Sigmoid(bits=3)(x)
    """

    def __init__(
        self, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
    ) -> None: ...

class LogSigmoid(FewBitActivation):
    """`torch.nn.LogSigmoid` with `bits` bits kept for each element.

    Args:
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.LogSigmoid(bits=3)(x)
    """

    def __init__(
        self, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
    ) -> None: ...

class Tanh(FewBitActivation):
    """`torch.nn.Tanh` with `bits` bits kept for each element.

    Args:
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Tanh(bits=3)(x)
    """

    def __init__(
        self, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
    ) -> None: ...

class Tanhshrink(FewBitActivation):
    """`torch.nn.Tanhshrink` with `bits` bits kept for each element.

    Args:
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Tanhshrink(bits=3)(x)
    """

    def __init__(
        self, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
    ) -> None: ...

class Hardsigmoid(FewBitActivation):
    """`torch.nn.Hardsigmoid`; one bit an element is exact.

    Args:
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Hardsigmoid(bits=3)(x)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...

class Hardswish(FewBitActivation):
    """`torch.nn.Hardswish` with `bits` bits kept for each element.

    Args:
        inplace: whether to overwrite the input.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Hardswish(bits=3)(x)
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...

class Hardshrink(FewBitActivation):
    """`torch.nn.Hardshrink`; one bit an element is exact.

    Args:
        lambd: f(x) = 0 where |x| ≤ lambd.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Hardshrink(bits=3)(x)
    """

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def lambd(self) -> float:
        """f(x) = 0 where |x| ≤ lambd."""

class Softshrink(FewBitActivation):
    """`torch.nn.Softshrink`; one bit an element is exact.

    Args:
        lambd: f(x) = 0 where |x| ≤ lambd.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Softshrink(bits=3)(x)
    """

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def lambd(self) -> float:
        """f(x) = 0 where |x| ≤ lambd."""

class Threshold(FewBitActivation):
    """`torch.nn.Threshold`; one bit an element is exact.

    Args:
        threshold: f(x) = x above it.
        value: f(x) elsewhere.
        inplace: whether to overwrite the input.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Threshold(0.1, 20.0, bits=3)(x)
    """

    def __init__(
        self,
        threshold: float,
        value: float,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None: ...
    @property
    def threshold(self) -> float:
        """f(x) = x above it."""

    @property
    def value(self) -> float:
        """f(x) elsewhere."""

class QuickGELU(FewBitActivation):
    """x·σ(1.702x), the GELU of CLIP, as `transformers` computes it, with `bits` bits kept for each element.

    Args:
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.QuickGELU(bits=3)(x)
    """

    def __init__(
        self, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
    ) -> None: ...

class SquaredReLU(FewBitActivation):
    """relu(x)² (Primer), as `transformers` computes it, with `bits` bits kept for each element.

    Args:
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one, shipped or solved when first used.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.

    Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.SquaredReLU(bits=3)(x)
    """

    def __init__(
        self, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
    ) -> None: ...
