"""What the few-bit activation modules share."""

from typing import Any, ClassVar, Literal

from torch import Tensor, fx, nn

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ..backends.forwards import forward_of
from ..tensors.dtypes import DTYPES
from ..tensors.table_registry import register_table, register_unpickled
from .dispatch import apply, key_for, number
from .table_lookup import resolve_table

# torch.fx, which cannot follow what depends on values, keeps this call whole.
fx.wrap("apply")


class FewBitActivation(nn.Module):
    """What the few-bit activations share: torch's function, its parameters, a table.

    Attributes:
        inplace: whether the input is overwritten.
    """

    inplace: bool
    # Which arguments the `repr` of torch's module shows: see ActivationRow.torch_repr.
    _shown: ClassVar[Literal["named", "values", "nothing"]] = "named"

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
        if self._shown == "nothing":
            return []
        if self._shown == "values":
            return [f"{value}" for value in self._arguments.values()]
        shown = [f"{name}={value}" for name, value in self._arguments.items()]
        return [*shown, "inplace=True"] if self.inplace else shown

    def extra_repr(self) -> str:
        """Return torch's own arguments and the number of bits."""
        return ", ".join([*self._torch_repr(), f"bits={self.bits}"])
