"""Base class of the few-bit activation modules."""

from typing import Any, ClassVar, Literal

from torch import Tensor, fx, nn

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ..backends.forwards import forward_of
from ..tensors.table_registry import register_table, register_unpickled
from ..tensors.traits import DTYPES
from .dispatch import Swapper, apply, key_for, number
from .following import FollowingTable
from .table_lookup import Rounding, resolve_table

# torch.fx cannot trace control flow that depends on values, so it records this call as one node.
fx.wrap("apply")


class FewBitActivation(nn.Module):
    """Base class of the few-bit activations: torch's function, its parameters and a table.

    Attributes:
        inplace: whether the input is overwritten.
        swapper: where codes rounded at random wait for the backward pass; None: on their device.
        following: the table if it follows the training (`convert` with `adapt`).
    """

    inplace: bool
    swapper: Swapper | None = None
    following: FollowingTable | None = None
    # Which arguments the `repr` of torch's module shows: see ActivationRow.torch_repr.
    _shown: ClassVar[Literal["named", "values", "nothing"]] = "named"

    def __init__(
        self,
        function: str,
        arguments: dict[str, float] | None = None,
        inplace: bool = False,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__()
        self.inplace = inplace
        self._arguments = arguments or {}
        self._function = function
        forward = forward_of(function)
        self._parameters_of_function = tuple(number(n, value, forward.bounds) for n, value in self._arguments.items())
        self._table = resolve_table(function, self._parameters_of_function, bits, table, rounding)
        self._key = register_table(self.table)
        rounded = {forward.as_compared(self._parameters_of_function, dtype) for dtype in DTYPES}
        self._one_table = table is not None or len(rounded) == 1

    @property
    def table(self) -> Table:
        """The table that replaces the derivative (of float64, where torch rounds a parameter for other dtypes)."""
        return self._table if self.following is None else self.following.table

    @property
    def bits(self) -> int:
        """Bits saved for each element; fewer than requested if fewer represent the derivative exactly."""
        return self.table.bits

    @property
    def rounding(self) -> Rounding:
        """``stochastic`` if the gradient is f'(x) on average, ``deterministic`` if x alone determines it."""
        return "stochastic" if self.table.kind == "stochastic" else "deterministic"

    @property
    def activation(self) -> str:
        """The compiler's name of the function, whatever table is used for it: ``softplus(beta=2)``.

        For a callable, which the compiler does not name, ``callable:NAME`` and a number.
        """
        return forward_of(self._function).activation_name(self._function, self._parameters_of_function)

    def forward(self, input: Tensor) -> Tensor:
        """Return f(input); saves ⌈n/8⌉·bits bytes if a gradient is required."""
        parameters = self._parameters_of_function
        key = self._key if self._one_table else key_for(input.dtype, self._function, parameters)
        return apply(input, self._function, parameters, key, self.inplace, self.swapper, self.following)

    def stop_following(self) -> None:
        """Keep the table in use from now on."""
        if self.following is not None:
            self._table, self.following = self.following.table, None
            self._key = register_table(self._table)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = register_unpickled(self)  # the module may be unpickled in another process
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
        rounding = [] if self.rounding == "deterministic" else ["rounding='stochastic'"]
        return ", ".join([*self._torch_repr(), f"bits={self.bits}", *rounding])
