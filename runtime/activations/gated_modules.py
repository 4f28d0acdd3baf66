"""Gated linear units as modules: act(gate) · up of two tensors, with a few bits saved."""

from typing import Any

from torch import Tensor, nn

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ..backends.torch_functions import gelu_function
from ..quantizers.kinds import QuantizerKind
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GLUPlan, Keep, check_copy_bits, check_keep
from ..tensors.levels import register_unpickled, table_of
from .arguments import Rounding
from .gated import CopyBits, apply, plan_of

__all__ = ["GEGLU", "GLU", "GatedHalves", "ReGLU", "SwiGLU"]


class GatedUnit(nn.Module):
    """Base class of the gated units. No parameters, no buffers; the arguments are those of `functional.swiglu`.

    Attributes:
        plan: what to save.
    """

    def __init__(self, plan: GLUPlan) -> None:
        super().__init__()
        self.plan = plan
        self._table = table_of(self.plan.table)

    @property
    def table(self) -> Table:
        """The table that replaces act'."""
        return self._table

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) · up."""
        return apply(gate, up, self.plan)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        check_plan(self, register_unpickled(self))  # the module may be unpickled in another process

    def extra_repr(self) -> str:
        """Return the plan as text."""
        return plan_text(self.plan)


class SwiGLU(GatedUnit):
    """silu(gate) · up.

    Args:
        bits, copy_bits, keep, table, rounding, quantizer: as for `fewbit.functional.swiglu`.

    Raises:
        FewbitError: an argument is not one of these.

    Example:
        h = fewbit.SwiGLU(bits=3)(gate, up)  # two tensors of one shape; h has it too
    """

    def __init__(
        self,
        *,
        bits: int | None = None,
        copy_bits: CopyBits = DEFAULT_COPY_BITS,
        keep: Keep = "parts",
        table: Table | None = None,
        rounding: Rounding | None = None,
        quantizer: QuantizerKind = "groups",
    ) -> None:
        super().__init__(plan_of("silu", (), bits, copy_bits, keep, table, rounding, quantizer))


class GEGLU(GatedUnit):
    """gelu(gate, approximate) · up.

    Args:
        approximate: ``none`` or ``tanh``.
        bits, copy_bits, keep, table, rounding, quantizer: as for `fewbit.functional.swiglu`.

    Raises:
        FewbitError: an argument is not one of these.

    Example:
        h = fewbit.GEGLU(bits=3)(gate, up)  # two tensors of one shape; h has it too
    """

    def __init__(
        self,
        approximate: str = "none",
        *,
        bits: int | None = None,
        copy_bits: CopyBits = DEFAULT_COPY_BITS,
        keep: Keep = "parts",
        table: Table | None = None,
        rounding: Rounding | None = None,
        quantizer: QuantizerKind = "groups",
    ) -> None:
        super().__init__(plan_of(gelu_function(approximate), (), bits, copy_bits, keep, table, rounding, quantizer))


class ReGLU(GatedUnit):
    """relu(gate) · up.

    Args:
        bits, copy_bits, keep, table, rounding, quantizer: as for `fewbit.functional.swiglu`.

    Raises:
        FewbitError: an argument is not one of these.

    Example:
        h = fewbit.ReGLU(bits=3)(gate, up)  # two tensors of one shape; h has it too
    """

    def __init__(
        self,
        *,
        bits: int | None = None,
        copy_bits: CopyBits = DEFAULT_COPY_BITS,
        keep: Keep = "parts",
        table: Table | None = None,
        rounding: Rounding | None = None,
        quantizer: QuantizerKind = "groups",
    ) -> None:
        super().__init__(plan_of("relu", (), bits, copy_bits, keep, table, rounding, quantizer))


class GLU(GatedUnit):
    """sigmoid(gate) · up, of two tensors.

    Args:
        bits, copy_bits, keep, table, rounding, quantizer: as for `fewbit.functional.swiglu`.

    Raises:
        FewbitError: an argument is not one of these.

    Example:
        h = fewbit.GLU(bits=3)(gate, up)  # two tensors of one shape; h has it too
    """

    def __init__(
        self,
        *,
        bits: int | None = None,
        copy_bits: CopyBits = DEFAULT_COPY_BITS,
        keep: Keep = "parts",
        table: Table | None = None,
        rounding: Rounding | None = None,
        quantizer: QuantizerKind = "groups",
    ) -> None:
        super().__init__(plan_of("sigmoid", (), bits, copy_bits, keep, table, rounding, quantizer))


class GatedHalves(GatedUnit):
    """act(gate) · up of the two halves of the last dimension of one tensor, as where one projection computes both.

    Attributes:
        gate_last: whether gate is the last half.
    """

    def __init__(self, plan: GLUPlan, gate_last: bool) -> None:
        super().__init__(plan)
        self.gate_last = gate_last

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the product.

        Args:
            x: (…, 2 × intermediate).
        """
        first, last = x.chunk(2, dim=-1)
        return apply(last, first, self.plan) if self.gate_last else apply(first, last, self.plan)


def check_plan(module: Any, key: str) -> None:
    """Raise FewbitError unless the plan of an unpickled module is a GLUPlan of the table `key`."""
    plan = vars(module).get("plan")
    if not isinstance(plan, GLUPlan) or plan.table != key:
        raise FewbitError(f"a pickled {type(module).__name__} holds the GLUPlan of its table, not {shown(plan)}")
    check_copy_bits((plan.up_bits, plan.second_bits))
    check_keep(plan.keep)
    if plan.at_random is not (table_of(key).kind == "stochastic"):
        raise FewbitError(f"at_random tells whether the table is rounded at random, not {shown(plan.at_random)}")
    if not isinstance(plan.is_rotated, bool):
        raise FewbitError(f"is_rotated tells whether copies are rotated, not {shown(plan.is_rotated)}")
    if plan.code_bits != table_of(key).bits:
        raise FewbitError(f"the table has codes of {table_of(key).bits} bits, not {shown(plan.code_bits)}")


def plan_text(plan: GLUPlan) -> str:
    """Return the text of a plan in a `repr`."""
    quantizer = ", quantizer='rotated'" if plan.is_rotated else ""
    if plan.keep == "exact":
        return f"keep='exact'{quantizer}"
    copies = plan.up_bits if plan.up_bits == plan.second_bits else (plan.up_bits, plan.second_bits)
    if plan.keep == "inputs":
        return f"copy_bits={copies}, keep='inputs'{quantizer}"
    rounding = ", rounding='stochastic'" if plan.at_random else ""
    return f"bits={plan.code_bits}, copy_bits={copies}{rounding}{quantizer}"
