"""The activation modules of `torch.nn`, with torch's names, arguments and `repr` plus `bits` and `table`.

    fewbit.GELU(bits=3)      in place of      torch.nn.GELU()

They have no parameters and no buffers, so a model's `state_dict` does not change. The arguments of the function belong
to the table, so they can be read but not changed afterwards; `inplace` may be changed at any time.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ..backends.forwards import forward_of
from ..tensors.dtypes import DTYPES
from ..tensors.table_registry import register_table, register_unpickled
from .functional import apply, gelu_function, keeps, key_for, number
from .table_lookup import resolve_table
from .user_functions import check_frozen, custom, name_of, solve_custom

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


# torch.fx, which cannot follow what depends on values, keeps this call whole.
fx.wrap("apply")


class FewBitActivation(nn.Module):
    """What the few-bit activations share: torch's function, its parameters, a table.

    Attributes:
        inplace: whether the input is overwritten.
    """

    inplace: bool

    def __init__(
        self,
        function: str,
        arguments: dict[str, float] | None = None,
        inplace: bool = False,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__()
        self.inplace = inplace
        self._arguments = arguments or {}
        self._function = function
        forward = forward_of(function)
        self._parameters_of_function = tuple(number(n, value, forward.bounds) for n, value in self._arguments.items())
        self._table = resolve_table(function, self._parameters_of_function, bits, table)
        self._key = register_table(self.table)
        rounded = {forward.as_compared(self._parameters_of_function, dtype) for dtype in DTYPES}
        self._one_table = table is not None or len(rounded) == 1

    @property
    def table(self) -> Table:
        """The table that replaces the derivative (of float64, where torch rounds a parameter for other dtypes)."""
        return self._table

    @property
    def bits(self) -> int:
        """Bits kept for each element; fewer than asked for where fewer hold the derivative exactly."""
        return self.table.bits

    @property
    def activation(self) -> str:
        """What the compiler calls the function, whatever table is used for it: ``softplus(beta=2)``.

        A callable, which the compiler knows by no name, is ``callable:NAME`` and a number.
        """
        return forward_of(self._function).activation_name(self._function, self._parameters_of_function)

    def forward(self, input: Tensor) -> Tensor:
        """Return f(input); keeps ⌈n/8⌉·bits bytes if a gradient will be asked for."""
        parameters = self._parameters_of_function
        key = self._key if self._one_table else key_for(input.dtype, self._function, parameters)
        return apply(input, self._function, parameters, key, self.inplace)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = register_unpickled(self)  # another process may read this module
        parameters = vars(self).get("_parameters_of_function")
        if not isinstance(parameters, tuple) or not all(isinstance(value, int | float) for value in parameters):
            raise FewbitError(f"a pickled {type(self).__name__} holds numbers as parameters, not {shown(parameters)}")

    def _torch_repr(self) -> list[str]:
        """Return the arguments as the `repr` of torch's module shows them."""
        shown = [f"{name}={value}" for name, value in self._arguments.items()]
        return [*shown, "inplace=True"] if self.inplace else shown

    def extra_repr(self) -> str:
        """Return torch's own arguments and the number of bits."""
        return ", ".join([*self._torch_repr(), f"bits={self.bits}"])


class ReLU(FewBitActivation):
    """`torch.nn.ReLU`; one bit an element is exact."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("relu", {}, inplace, bits, table)


class ReLU6(FewBitActivation):
    """`torch.nn.ReLU6`; one bit an element is exact."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("relu6", {}, inplace, bits, table)


class LeakyReLU(FewBitActivation):
    """`torch.nn.LeakyReLU`; one bit an element is exact."""

    def __init__(
        self,
        negative_slope: float = 0.01,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__("leaky_relu", {"negative_slope": negative_slope}, inplace, bits, table)

    @property
    def negative_slope(self) -> float:
        """f' where x ≤ 0."""
        return self._arguments["negative_slope"]


class ELU(FewBitActivation):
    """`torch.nn.ELU` with `bits` bits kept for each element; each alpha has its own table."""

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__("elu", {"alpha": alpha}, inplace, bits, table)

    @property
    def alpha(self) -> float:
        """−f far left."""
        return self._arguments["alpha"]


class CELU(FewBitActivation):
    """`torch.nn.CELU` with `bits` bits kept for each element; each alpha has its own table."""

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__("celu", {"alpha": alpha}, inplace, bits, table)

    @property
    def alpha(self) -> float:
        """−f far left."""
        return self._arguments["alpha"]


class SELU(FewBitActivation):
    """`torch.nn.SELU` with `bits` bits kept for each element."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("selu", {}, inplace, bits, table)


class GELU(FewBitActivation):
    """`torch.nn.GELU` with `bits` bits kept for each element."""

    def __init__(self, approximate: str = "none", *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__(gelu_function(approximate), {}, False, bits, table)

    @property
    def approximate(self) -> str:
        """``none`` or ``tanh``."""
        return "tanh" if self._function == "gelu_tanh" else "none"

    def _torch_repr(self) -> list[str]:
        return [f"approximate={self.approximate!r}"]


class SiLU(FewBitActivation):
    """`torch.nn.SiLU` (Swish) with `bits` bits kept for each element."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("silu", {}, inplace, bits, table)


class Mish(FewBitActivation):
    """`torch.nn.Mish` with `bits` bits kept for each element."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("mish", {}, inplace, bits, table)


class Softplus(FewBitActivation):
    """`torch.nn.Softplus` with `bits` bits kept for each element; each beta and threshold has its own table."""

    def __init__(
        self,
        beta: float = 1.0,
        threshold: float = 20.0,
        *,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__("softplus", {"beta": beta, "threshold": threshold}, False, bits, table)

    @property
    def beta(self) -> float:
        """How sharply it bends."""
        return self._arguments["beta"]

    @property
    def threshold(self) -> float:
        """Where beta·x is above it, f(x) = x."""
        return self._arguments["threshold"]


class Softsign(FewBitActivation):
    """`torch.nn.Softsign` with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("softsign", {}, False, bits, table)


class Sigmoid(FewBitActivation):
    """`torch.nn.Sigmoid` with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("sigmoid", {}, False, bits, table)


class LogSigmoid(FewBitActivation):
    """`torch.nn.LogSigmoid` with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("logsigmoid", {}, False, bits, table)


class Tanh(FewBitActivation):
    """`torch.nn.Tanh` with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("tanh", {}, False, bits, table)


class Tanhshrink(FewBitActivation):
    """`torch.nn.Tanhshrink` with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("tanhshrink", {}, False, bits, table)


class Hardtanh(FewBitActivation):
    """`torch.nn.Hardtanh`; one bit an element is exact. `min_value` and `max_value` are torch's deprecated names."""

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
    ) -> None:
        if min_value is not None:
            warnings.warn("min_value is deprecated and renamed to min_val", FutureWarning, stacklevel=2)
            min_val = min_value
        if max_value is not None:
            warnings.warn("max_value is deprecated and renamed to max_val", FutureWarning, stacklevel=2)
            max_val = max_value
        super().__init__("hardtanh", {"min_val": min_val, "max_val": max_val}, inplace, bits, table)

    @property
    def min_val(self) -> float:
        """The least value of f."""
        return self._arguments["min_val"]

    @property
    def max_val(self) -> float:
        """The greatest value of f."""
        return self._arguments["max_val"]


class Hardsigmoid(FewBitActivation):
    """`torch.nn.Hardsigmoid`; one bit an element is exact."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("hardsigmoid", {}, inplace, bits, table)

    def _torch_repr(self) -> list[str]:
        return []  # torch does not show its inplace


class Hardswish(FewBitActivation):
    """`torch.nn.Hardswish` with `bits` bits kept for each element."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("hardswish", {}, inplace, bits, table)

    def _torch_repr(self) -> list[str]:
        return []  # torch does not show its inplace


class Hardshrink(FewBitActivation):
    """`torch.nn.Hardshrink`; one bit an element is exact."""

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__("hardshrink", {"lambd": lambd}, False, bits, table)

    @property
    def lambd(self) -> float:
        """f(x) = 0 where |x| ≤ lambd."""
        return self._arguments["lambd"]

    def _torch_repr(self) -> list[str]:
        return [f"{self.lambd}"]


class Softshrink(FewBitActivation):
    """`torch.nn.Softshrink`; one bit an element is exact."""

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__("softshrink", {"lambd": lambd}, False, bits, table)

    @property
    def lambd(self) -> float:
        """f(x) = 0 where |x| ≤ lambd."""
        return self._arguments["lambd"]

    def _torch_repr(self) -> list[str]:
        return [f"{self.lambd}"]


class Threshold(FewBitActivation):
    """`torch.nn.Threshold`; one bit an element is exact."""

    def __init__(
        self,
        threshold: float,
        value: float,
        inplace: bool = False,
        *,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__("threshold", {"threshold": threshold, "value": value}, inplace, bits, table)

    @property
    def threshold(self) -> float:
        """f(x) = x above it."""
        return self._arguments["threshold"]

    @property
    def value(self) -> float:
        """f(x) elsewhere."""
        return self._arguments["value"]


class QuickGELU(FewBitActivation):
    """x·σ(1.702x), the GELU of CLIP, as `transformers` computes it, with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("quick_gelu", {}, False, bits, table)


class SquaredReLU(FewBitActivation):
    """relu(x)² (Primer), as `transformers` computes it, with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("squared_relu", {}, False, bits, table)


class FewBit(FewBitActivation):
    """Any pointwise activation with `bits` bits kept for each element: an expression in x, or a callable.

        fewbit.FewBit("x*sigmoid(1.702*x)", bits=3)
        fewbit.FewBit(torch.sin, bits=4)

    Forward an expression is computed by torch's operations, float16 and bfloat16 in float32 and rounded once; a
    callable returns what it returns.

    Attributes:
        function: the expression or callable; a callable that is a module is a submodule.

    Args:
        activation: an expression, a name that the compiler knows (``arctan``, ``softplus(beta=2)``), or an elementwise
            function of torch tensors, which torch differentiates once, in float64.
        bits: 1 to 8; 3 if neither this nor `table` is given.
        table: used as it is, and nothing is solved.
        kinks: points where f' jumps or bends, beside those that are known or found.

    Raises:
        FewbitError: an argument is wrong; the callable is not elementwise, writes into its input or holds parameters
            that learn.
    """

    function: str | Callable[[Tensor], Tensor]

    def __init__(
        self,
        activation: str | Callable[[Tensor], Tensor],
        *,
        bits: int | None = None,
        table: Table | None = None,
        kinks: Sequence[float] = (),
    ) -> None:
        own = custom(activation)
        if table is None and (len(kinks) > 0 or not isinstance(activation, str)):
            table = solve_custom(activation, bits, kinks)
        super().__init__(own.function, own.arguments, False, bits, table)
        self.function = activation
        self._custom = own

    def forward(self, input: Tensor) -> Tensor:
        """Return f(input); keeps ⌈n/8⌉·bits bytes if a gradient will be asked for."""
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
        self._function = self._custom.function  # a callable has another name in every copy

    def _torch_repr(self) -> list[str]:
        return [repr(self.function) if isinstance(self.function, str) else name_of(self.function)]


# By the class name in torch.nn; QuickGELU and SquaredReLU, which torch has not, by ours.
MODULES: dict[str, type[FewBitActivation]] = {
    module.__name__: module
    for module in (
        *(ReLU, ReLU6, LeakyReLU, ELU, CELU, SELU, GELU, SiLU, Mish, Softplus, Softsign, Sigmoid, LogSigmoid, Tanh),
        *(Tanhshrink, Hardtanh, Hardsigmoid, Hardswish, Hardshrink, Softshrink, Threshold, QuickGELU, SquaredReLU),
    )
}
