"""The activation modules of `torch.nn`, with torch's names, arguments and `repr` plus `bits` and `table`.

    fewbit.GELU(bits=3)      in place of      torch.nn.GELU()

They have no parameters and no buffers, so a model's `state_dict` does not change.
"""

from typing import Any

from torch import Tensor, nn

from ..tables import Table
from .functional import apply, gelu_function
from .prepared import register_table
from .resolve import resolve_table

__all__ = ["GELU", "SELU", "ReLU", "SiLU", "Sigmoid", "Softplus", "Tanh"]


class FewBitActivation(nn.Module):
    """What the few-bit activations share: torch's function, its parameters, a table.

    Attributes:
        inplace: whether the input is overwritten.
    """

    inplace: bool

    def __init__(
        self,
        function: str,
        parameters: tuple[float, ...] = (),
        inplace: bool = False,
        bits: int | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__()
        self.inplace = inplace
        self._table = resolve_table(function, parameters, bits, table)
        self._function = function
        self._parameters_of_function = parameters
        self._key = register_table(self.table)

    @property
    def table(self) -> Table:
        """The table that replaces the derivative."""
        return self._table

    @property
    def bits(self) -> int:
        """Bits kept for each element; fewer than asked for where fewer hold the derivative exactly."""
        return self.table.bits

    def forward(self, input: Tensor) -> Tensor:
        """Return f(input); keeps ⌈n/8⌉·bits bytes if a gradient will be asked for."""
        return apply(input, self._function, self._parameters_of_function, self._key, self.inplace)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register_table(self.table)  # another process may read this module

    def _torch_repr(self) -> list[str]:
        """Return the arguments as the `repr` of torch's module shows them."""
        return ["inplace=True"] if self.inplace else []

    def extra_repr(self) -> str:
        """Return torch's own arguments and the number of bits."""
        return ", ".join([*self._torch_repr(), f"bits={self.bits}"])


class ReLU(FewBitActivation):
    """`torch.nn.ReLU`; one bit an element is exact."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("relu", (), inplace, bits, table)


class GELU(FewBitActivation):
    """`torch.nn.GELU` with `bits` bits kept for each element."""

    def __init__(self, approximate: str = "none", *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__(gelu_function(approximate), (), False, bits, table)
        self.approximate = approximate

    def _torch_repr(self) -> list[str]:
        return [f"approximate={self.approximate!r}"]


class SiLU(FewBitActivation):
    """`torch.nn.SiLU` (Swish) with `bits` bits kept for each element."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("silu", (), inplace, bits, table)


class Sigmoid(FewBitActivation):
    """`torch.nn.Sigmoid` with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("sigmoid", (), False, bits, table)


class Tanh(FewBitActivation):
    """`torch.nn.Tanh` with `bits` bits kept for each element."""

    def __init__(self, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("tanh", (), False, bits, table)


class SELU(FewBitActivation):
    """`torch.nn.SELU` with `bits` bits kept for each element."""

    def __init__(self, inplace: bool = False, *, bits: int | None = None, table: Table | None = None) -> None:
        super().__init__("selu", (), inplace, bits, table)


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
        super().__init__("softplus", (float(beta), float(threshold)), False, bits, table)
        self.beta = beta
        self.threshold = threshold

    def _torch_repr(self) -> list[str]:
        return [f"beta={self.beta}", f"threshold={self.threshold}"]
