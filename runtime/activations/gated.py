"""act(gate) · up with a few bits saved: swiglu, geglu, reglu, glu (Shazeer, "GLU Variants Improve Transformer", 2020).

The forward pass is torch's own operations, bit for bit. For the whole block down(act(gate(x)) · up(x)) eager PyTorch
saves gate, act(gate), up and h for the backward pass, four tensors of tokens × intermediate. The gradients are

    d_gate = grad · up · act'(gate)        d_up = grad · act(gate)        d_down = grad_outputᵀ · h,  h = act(gate) · up

and their factors are saved in few bits: the code of act'(gate) in a table of this project, and copies of up and
act(gate) by the per-group quantizer, whose stochastic rounding is unbiased. The two copies are rounded independently,
so their product is an unbiased h too. For the sizes and errors see tensors/glu_parts.py.
"""

from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ..backends.reference.glu import product
from ..backends.reference.glu_derivatives import derivative_of
from ..backends.torch_functions import gelu_function
from ..ops.arguments import check_dtype, checked
from ..quantizers.kinds import QuantizerKind, check_kind
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GLUPlan, Keep, check_copy_bits, check_keep
from ..tensors.table_registry import table_of
from . import transforms
from .gated_autograd import fewbit_glu
from .table_lookup import Rounding, resolve_key
from .transforms import keeps

CopyBits = int | tuple[int, int]


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int | None = None,
    copy_bits: CopyBits = DEFAULT_COPY_BITS,
    keep: Keep = "parts",
    table: Table | None = None,
    rounding: Rounding | None = None,
    quantizer: QuantizerKind = "groups",
) -> Tensor:
    """Return silu(gate) · up, the gated unit of Llama, Mistral, Qwen and Phi.

    Args:
        gate, up: of one shape, dtype and device; float64, float32, float16 or bfloat16, any layout.
        bits: of the code of act'(gate), 1 to 8; 3 if neither this nor `table` is given.
        copy_bits: of the copies of up and act(gate), 1 to 8; or of each, (up, act(gate)). 32 bits for every 256
            elements are added.
        keep: what to save: ``parts`` as above; ``inputs``, copies of up and gate, from which the rest is recomputed;
            ``exact``, gate and up unchanged, for torch's own gradients.
        table: of act', used as it is.
        rounding: of the code: ``deterministic``, the default, with the least error, or ``stochastic``, without bias. A
            `table` has the rounding of its kind.
        quantizer: of the copies: ``groups``, between minimum and maximum; or ``rotated`` (`quantizers.Rotated`), with a
            sixth to two fifths of the squared error in as many bytes, for more time and memory in the backward pass.

    Raises:
        FewbitError: an argument is not one of the values above.
        TypeError: a gradient is required and the dtype is not a floating-point one listed above.

    Returns:
        silu(gate) · up, bit for bit torch's, in the shape and dtype of `gate`.

    Example:
        h = fewbit.functional.swiglu(gate, up, bits=3)
    """
    return apply(gate, up, plan_of("silu", (), bits, copy_bits, keep, table, rounding, quantizer))


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: str = "none",
    *,
    bits: int | None = None,
    copy_bits: CopyBits = DEFAULT_COPY_BITS,
    keep: Keep = "parts",
    table: Table | None = None,
    rounding: Rounding | None = None,
    quantizer: QuantizerKind = "groups",
) -> Tensor:
    """Return gelu(gate, approximate) · up, the gated unit of T5 and (``approximate="tanh"``) Gemma: see `swiglu`.

    Args:
        gate, up: of one shape, dtype and device; float64, float32, float16 or bfloat16, any layout.
        approximate: ``none`` or ``tanh``.
        bits, copy_bits, keep, table, rounding, quantizer: as for `swiglu`.

    Returns:
        The product, in the shape and dtype of `gate`.

    Raises:
        FewbitError: an argument is not one of these.

    Example:
        h = fewbit.functional.geglu(gate, up, approximate="tanh")
    """
    return apply(gate, up, plan_of(gelu_function(approximate), (), bits, copy_bits, keep, table, rounding, quantizer))


def reglu(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int | None = None,
    copy_bits: CopyBits = DEFAULT_COPY_BITS,
    keep: Keep = "parts",
    table: Table | None = None,
    rounding: Rounding | None = None,
    quantizer: QuantizerKind = "groups",
) -> Tensor:
    """Return relu(gate) · up: see `swiglu`. One bit represents relu' exactly.

    Args:
        gate, up: of one shape, dtype and device; float64, float32, float16 or bfloat16, any layout.
        bits, copy_bits, keep, table, rounding, quantizer: as for `swiglu`.

    Returns:
        The product, in the shape and dtype of `gate`.

    Raises:
        FewbitError: an argument is not one of these.

    Example:
        h = fewbit.functional.reglu(gate, up)
    """
    return apply(gate, up, plan_of("relu", (), bits, copy_bits, keep, table, rounding, quantizer))


def glu(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int | None = None,
    copy_bits: CopyBits = DEFAULT_COPY_BITS,
    keep: Keep = "parts",
    table: Table | None = None,
    rounding: Rounding | None = None,
    quantizer: QuantizerKind = "groups",
) -> Tensor:
    """Return sigmoid(gate) · up: see `swiglu`. (`torch.nn.functional.glu` takes both in one tensor.)

    Args:
        gate, up: of one shape, dtype and device; float64, float32, float16 or bfloat16, any layout.
        bits, copy_bits, keep, table, rounding, quantizer: as for `swiglu`.

    Returns:
        The product, in the shape and dtype of `gate`.

    Raises:
        FewbitError: an argument is not one of these.

    Example:
        h = fewbit.functional.glu(gate, up)
    """
    return apply(gate, up, plan_of("sigmoid", (), bits, copy_bits, keep, table, rounding, quantizer))


@torch.compiler.assume_constant_result
def plan_of(
    function: str,
    parameters: tuple[float, ...],
    bits: int | None = None,
    copy_bits: CopyBits = DEFAULT_COPY_BITS,
    keep: Keep = "parts",
    table: Table | None = None,
    rounding: Rounding | None = None,
    quantizer: QuantizerKind = "groups",
) -> GLUPlan:
    """Return the plan for act of `parameters`; the arguments are those of `swiglu`.

    Raises:
        FewbitError: an argument is wrong, or `keep` does not support the function.
    """
    up_bits, second_bits = check_copy_bits(copy_bits)
    check_kind(quantizer)
    if check_keep(keep) != "parts":
        derivative_of(function)
    key = resolve_key(function, parameters, bits, table, rounding)
    found = table_of(key)
    at_random = found.kind == "stochastic"
    return GLUPlan(
        *(function, parameters, key, found.bits, up_bits, second_bits, keep, at_random, quantizer == "rotated")
    )


def apply(gate: Tensor, up: Tensor, plan: GLUPlan) -> Tensor:
    """Return act(gate) · up, and save what `plan` specifies for the required gradients."""
    check_pair(gate, up)
    if not (keeps(gate) or keeps(up)) or transforms.are_active():  # torch's own, which supports all transforms
        return checked(plan.function, gate, product, gate, up, plan.function, plan.parameters)[1]
    check_dtype(gate, plan.function)
    return fewbit_glu.apply(gate, up, plan, False)[0]


def check_pair(gate: Any, up: Any) -> None:
    """Raise FewbitError unless `gate` and `up` are tensors of one shape, dtype and device."""
    for name, x in (("gate", gate), ("up", up)):
        if not isinstance(x, Tensor):
            raise FewbitError(f"{name} is a tensor, not {shown(x)}")
    if gate.is_nested and up.is_nested:
        return  # the shapes of their parts are compared by the product
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        described = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}" for x in (gate, up)]
        raise FewbitError(f"gate and up have one shape, dtype and device, not {described[0]} and {described[1]}")
