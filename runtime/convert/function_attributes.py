"""Few-bit forms of torch's functions that a module holds in an attribute, as `nn.TransformerEncoderLayer` F.relu."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...tables import Table
from ..activations.arguments import Rounding
from ..activations.modules import FewBitActivation
from .recognize import Held

Function = Callable[..., Any]


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
