"""The activation modules of `torch.nn`, with torch's names, arguments and `repr` plus `bits`, `table` and `rounding`.

    fewbit.GELU(bits=3)      in place of      torch.nn.GELU()

They have no parameters and no buffers, so a model's `state_dict` does not change. The function's arguments determine
the table, so they are read-only; `inplace` may be changed at any time.

Those with only numbers and `inplace` as arguments are written from the rows of backends/activation_spec.py.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ...tables import FewbitError, Table
from ...tables.names import callable_name
from ..backends.activation_spec import ROW_OF_MODULE
from ..backends.torch_functions import gelu_function
from ..ops.declare import check_dtype
from .arguments import Rounding, check_frozen, custom, solve_custom
from .dispatch import FewBitActivation, are_active, keeps
from .inverted import Keep, check_keep, inverse_of, inverted


class GELU(FewBitActivation):
    """`torch.nn.GELU` with `bits` bits saved for each element, or with its output and one bit.

    Its input is float64, float32, float16 or bfloat16, of any shape and layout; so is its output.

    Args:
        approximate: ``none`` or ``tanh``.
        bits: 1 to 8 for each element; 3 if neither this nor `table` is given.
        table: used as it is; by default the best one.
        rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.
        keep: ``output`` saves the output and one bit an element, for a derivative without rounding: little where the
            next layer saves its input exactly in any case (activations/inverted.py).

    Raises:
        FewbitError: an argument is wrong, or there are bits, a table or rounding for an output.

    Example:
        y = fewbit.GELU(bits=3)(x)
        y = fewbit.GELU(keep="output")(x)
    """

    keep: Keep

    def __init__(
        self,
        approximate: str = "none",
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
        keep: Keep = "codes",
    ) -> None:
        super().__init__(gelu_function(approximate), {}, False, bits, table, rounding)
        check_keep(keep)
        if keep == "output" and not bits is table is rounding is None:
            raise FewbitError("keep='output' has no codes: give no bits, table or rounding")
        self.keep = keep
        self._inverse = inverse_of(self._function) if keep == "output" else None

    @property
    def bits(self) -> int:
        """Bits saved for each element, beside an output that is kept."""
        return 1 if self.keep == "output" else super().bits

    def forward(self, input: Tensor) -> Tensor:
        """Return f(input); saves ⌈n/8⌉·bits bytes, and the output if it is kept, if a gradient is required."""
        if self._inverse is not None and keeps(input) and not are_active():
            check_dtype(input, "GELU")
            return inverted(input, self._function, self._inverse)
        return super().forward(input)

    def extra_repr(self) -> str:
        """Return torch's own arguments and what is kept."""
        return super().extra_repr() if self.keep == "codes" else ", ".join([*self._torch_repr(), "keep='output'"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"keep": "codes", "_inverse": None, **state})

    @property
    def approximate(self) -> str:
        """``none`` or ``tanh``."""
        return "tanh" if self._function == "gelu_tanh" else "none"

    def _torch_repr(self) -> list[str]:
        return [f"approximate={self.approximate!r}"]


class Hardtanh(FewBitActivation):
    """`torch.nn.Hardtanh`; one bit an element is exact. `min_value` and `max_value` are torch's deprecated names.

    Its input is float64, float32, float16 or bfloat16, of any shape and layout; so is its output.

    Args:
        min_val: the least value of f.
        max_val: the greatest value of f.
        inplace: whether to overwrite the input.
        min_value, max_value: torch's deprecated names.
        bits: 1 to 8, of which one is used: it holds the derivative exactly.
        table: used as it is; by default the exact one.
        rounding: ``deterministic``, the default, or ``stochastic``.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        y = fewbit.Hardtanh(-2.0, 2.0)(x)
    """

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
    ) -> None:
        if min_value is not None:
            warnings.warn("min_value is deprecated and renamed to min_val", FutureWarning, stacklevel=2)
            min_val = min_value
        if max_value is not None:
            warnings.warn("max_value is deprecated and renamed to max_val", FutureWarning, stacklevel=2)
            max_val = max_value
        super().__init__("hardtanh", {"min_val": min_val, "max_val": max_val}, inplace, bits, table, rounding)

    @property
    def min_val(self) -> float:
        """The least value of f."""
        return self._arguments["min_val"]

    @property
    def max_val(self) -> float:
        """The greatest value of f."""
        return self._arguments["max_val"]


class FewBit(FewBitActivation):
    """Any pointwise activation with `bits` bits saved for each element: an expression in x, or a callable.

        fewbit.FewBit("x*sigmoid(1.702*x)", bits=3)
        fewbit.FewBit(torch.sin, bits=4)

    An expression is computed by torch's operations, for float16 and bfloat16 in float32 and rounded once; a callable's
    output is returned as it is.

    Attributes:
        function: the expression or callable; a callable that is a module becomes a submodule.

    Args:
        activation: an expression, a name known to the compiler (``arctan``, ``softplus(beta=2)``), or an elementwise
            function of torch tensors, which torch differentiates once, in float64.
        bits: 1 to 8; 3 if neither this nor `table` is given.
        table: used as it is, without solving.
        kinks: points where f' jumps or bends, in addition to known and detected ones.
        rounding: ``stochastic`` for an expression whose f' is bounded; ``deterministic`` otherwise.

    Raises:
        FewbitError: an argument is wrong; the callable is not elementwise, writes into its input or holds trainable
            parameters.

    Example:
        y = fewbit.FewBit("x*sigmoid(1.702*x)", bits=3)(x)
    """

    function: str | Callable[[Tensor], Tensor]

    def __init__(
        self,
        activation: str | Callable[[Tensor], Tensor],
        *,
        bits: int | None = None,
        table: Table | None = None,
        kinks: Sequence[float] = (),
        rounding: Rounding | None = None,
    ) -> None:
        own = custom(activation)
        if table is None and (len(kinks) > 0 or not isinstance(activation, str)):
            table = solve_custom(activation, bits, kinks, rounding)
        super().__init__(own.function, own.arguments, False, bits, table, rounding)
        self.function = activation
        self._custom = own

    def forward(self, input: Tensor) -> Tensor:
        """Return f(input); saves ⌈n/8⌉·bits bytes if a gradient is required."""
        if not isinstance(self.function, str) and not keeps(input):
            return self.function(input)
        if isinstance(self.function, nn.Module):
            check_frozen(self.function)
        return super().forward(input)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_custom"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._custom = custom(self.function)
        self._function = self._custom.function  # every copy gives a callable another name

    def _torch_repr(self) -> list[str]:
        return [repr(self.function) if isinstance(self.function, str) else callable_name(self.function)]


# ---- written from the rows by tests/support/activation_code.py; not by hand ------------------------------------------

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
    ) -> None:
        super().__init__("relu", {}, inplace, bits, table, rounding)


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
    ) -> None:
        super().__init__("relu6", {}, inplace, bits, table, rounding)


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
    ) -> None:
        super().__init__("leaky_relu", {"negative_slope": negative_slope}, inplace, bits, table, rounding)

    @property
    def negative_slope(self) -> float:
        """f' where x ≤ 0."""
        return self._arguments["negative_slope"]


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
    ) -> None:
        super().__init__("elu", {"alpha": alpha}, inplace, bits, table, rounding)

    @property
    def alpha(self) -> float:
        """−f far left."""
        return self._arguments["alpha"]


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
    ) -> None:
        super().__init__("celu", {"alpha": alpha}, inplace, bits, table, rounding)

    @property
    def alpha(self) -> float:
        """−f far left."""
        return self._arguments["alpha"]


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
    ) -> None:
        super().__init__("selu", {}, inplace, bits, table, rounding)


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
    ) -> None:
        super().__init__("silu", {}, inplace, bits, table, rounding)


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
    ) -> None:
        super().__init__("mish", {}, inplace, bits, table, rounding)


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
    ) -> None:
        super().__init__("softplus", {"beta": beta, "threshold": threshold}, False, bits, table, rounding)

    @property
    def beta(self) -> float:
        """How sharply it bends."""
        return self._arguments["beta"]

    @property
    def threshold(self) -> float:
        """Where beta·x is above it, f(x) = x."""
        return self._arguments["threshold"]


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
    ) -> None:
        super().__init__("softsign", {}, False, bits, table, rounding)


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
    ) -> None:
        super().__init__("sigmoid", {}, False, bits, table, rounding)


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
    ) -> None:
        super().__init__("logsigmoid", {}, False, bits, table, rounding)


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
    ) -> None:
        super().__init__("tanh", {}, False, bits, table, rounding)


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
    ) -> None:
        super().__init__("tanhshrink", {}, False, bits, table, rounding)


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

    _shown = "nothing"

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__("hardsigmoid", {}, inplace, bits, table, rounding)


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

    _shown = "nothing"

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__("hardswish", {}, inplace, bits, table, rounding)


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

    _shown = "values"

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__("hardshrink", {"lambd": lambd}, False, bits, table, rounding)

    @property
    def lambd(self) -> float:
        """f(x) = 0 where |x| ≤ lambd."""
        return self._arguments["lambd"]


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

    _shown = "values"

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__("softshrink", {"lambd": lambd}, False, bits, table, rounding)

    @property
    def lambd(self) -> float:
        """f(x) = 0 where |x| ≤ lambd."""
        return self._arguments["lambd"]


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
    ) -> None:
        super().__init__("threshold", {"threshold": threshold, "value": value}, inplace, bits, table, rounding)

    @property
    def threshold(self) -> float:
        """f(x) = x above it."""
        return self._arguments["threshold"]

    @property
    def value(self) -> float:
        """f(x) elsewhere."""
        return self._arguments["value"]


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
    ) -> None:
        super().__init__("quick_gelu", {}, False, bits, table, rounding)


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
    ) -> None:
        super().__init__("squared_relu", {}, False, bits, table, rounding)


# By the class name in torch.nn; what torch lacks by fewbit's own names.
MODULES: dict[str, type[FewBitActivation]] = {name: globals()[name] for name in ROW_OF_MODULE}
