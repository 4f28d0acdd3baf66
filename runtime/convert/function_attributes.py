"""Few-bit forms of torch's functions that a module holds in an attribute, as `nn.TransformerEncoderLayer` F.relu."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor

from ...tables import Table
from ..activations.catch import CAUGHT
from ..activations.modules import FewBitActivation
from ..activations.table_lookup import Rounding
from ..backends.forwards import forward_of
from ..backends.torch_functions import gelu_function

__all__ = ["Held", "HeldFunction", "read_function"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Held:
    """A function of torch with all its arguments except x.

    Attributes:
        function: its name in `FORWARDS`.
        arguments: (name, value) for each of its parameters.
        inplace: whether it overwrites x.
    """

    function: str
    arguments: tuple[tuple[str, float], ...] = ()
    inplace: bool = False

    @property
    def activation(self) -> str:
        """The compiler's name."""
        return forward_of(self.function).activation_name(self.function, [value for _, value in self.arguments])


def read_function(value: object) -> Held | None:
    """Return the function that `value` is, also in a `functools.partial`; None if it has no few-bit form."""
    if isinstance(value, partial) and not value.args:
        return _read(value.func, value.keywords)
    return _read(value, {})


def _read(function: object, keywords: dict[str, Any]) -> Held | None:
    if not isinstance(function, FunctionType | BuiltinFunctionType) or function not in CAUGHT:
        return None
    name, inplace = CAUGHT[function]
    given = dict(keywords)
    inplace = bool(given.pop("inplace", inplace))
    if name == "gelu":
        name = gelu_function(given.pop("approximate", "none"))
    arguments = {key: given.pop(key, default) for key, default in forward_of(name).parameters}
    if given or None in arguments.values():  # other arguments, or some that only the caller passes
        return None
    return Held(name, tuple((key, float(value)) for key, value in arguments.items()), inplace)


class HeldFunction(FewBitActivation):
    """The few-bit form of a function, which takes its place in the attribute and accepts the same arguments.

    Called with more than x it runs the function itself, which saves x: the table is for the held arguments only.
    """

    def __init__(
        self,
        function: Function,
        held: Held,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        super().__init__(held.function, dict(held.arguments), held.inplace, bits, table, rounding)
        self._whole = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the function returns."""
        if len(args) == 1 and not kwargs:
            return super().forward(args[0])
        return self._whole(*args, **kwargs)

    def _get_name(self) -> str:
        return self._function
