"""act(gate) · up with a few bits saved: swiglu, geglu, reglu, glu (Shazeer, "GLU Variants Improve Transformer", 2020).

The forward pass is torch's own operations, bit for bit. For the whole block down(act(gate(x)) · up(x)) eager PyTorch
saves gate, act(gate), up and h for the backward pass, four tensors of tokens × intermediate. The gradients are

    d_gate = grad · up · act'(gate)        d_up = grad · act(gate)        d_down = grad_outputᵀ · h,  h = act(gate) · up

and their factors are saved in few bits: the code of act'(gate) in a table of this project, and copies of up and
act(gate) by the per-group quantizer, whose stochastic rounding is unbiased. The two copies are rounded independently,
so their product is an unbiased h too. For the sizes and errors see tensors/glu_parts.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import shown
from .. import ops
from ..backends.forwards import as_autocast, forward_of
from ..backends.reference.glu import product, product_over
from ..backends.reference.glu_derivatives import derivative_of
from ..backends.torch_functions import gelu_function
from ..ops.declare import check_dtype, checked, refuse
from ..quantizers import Rotated
from ..quantizers.kinds import QuantizerKind, check_kind
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GLUPlan, Keep, Wanted, check_copy_bits, check_keep
from ..tensors.levels import table_of
from ..tensors.traits import as_kind
from .arguments import Rounding, resolve_key
from .dispatch import are_active, keeps

# ---- saving and gradients: plain functions of tensors and constants, which torch.compile traces ----------------------

# Copies in the codes of `Rotated` are tensors that autograd saves. Two copies are turned by signs of their own, so that
# the mean of their product is right too. Groups of 128 lie in the rows of the last dimension.
_GROUP_SIZE = Rotated.group_size


def compress_rotated(xs: Sequence[Tensor], bits: Sequence[int]) -> tuple[Tensor, ...]:
    """Return for each of `xs` a buffer of its codes in so many bits, and at the end the key of their signs."""
    key = ops.draw_seeds(xs[0], 1)
    rows = [as_kind(x.reshape(-1, _features(x.shape)), keep_positive=False) for x in xs]
    buffers = ops.rotated_quantize_buffers(rows, key, [*range(len(xs))], bits, [True] * len(xs), _GROUP_SIZE)
    return (*buffers, key)


def decompress_rotated(
    copies: Sequence[Tensor], bits: Sequence[int], shape: torch.Size, dtype: torch.dtype
) -> list[Tensor]:
    """Return the tensors, all of one shape, that `compress_rotated` gave `copies` of."""
    *buffers, key = copies
    features = [_features(shape)] * len(buffers)
    rows = ops.rotated_dequantize_buffers(buffers, key, [*range(len(bits))], bits, features, _GROUP_SIZE, dtype)
    return [x.view(shape) for x in rows]


def _features(shape: torch.Size) -> int:
    return max(1, shape[-1]) if shape else 1


def keep(gate: Tensor, up: Tensor, plan: GLUPlan, wanted: Wanted) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return h = act(gate) · up and the parts that its backward pass needs for the wanted results."""
    has_code, has_up, has_second = wanted.kept(plan.keep)
    if plan.keep == "exact":
        h = product(gate, up, plan.function, plan.parameters)[1]
        if wanted.h_alone:
            return h, (h,)
        return h, (*([up] if has_up else []), *([gate] if has_second else []))
    if plan.is_rotated:
        activated = forward_of(plan.function).call(gate, *plan.parameters)
        second = activated if plan.keep == "parts" else gate
        copied = [(up, plan.up_bits)] * has_up + [(second, plan.second_bits)] * has_second
        copies = compress_rotated([x for x, _ in copied], [bits for _, bits in copied]) if copied else ()
        h = product_over(activated, up, plan.function)
        return h, (*([_codes(gate, plan)] if has_code else []), *copies)
    at_random = has_code and plan.at_random
    constants = _constants(plan, has_code and not at_random, has_up, has_second)
    seeds = ops.draw_seeds(gate, 2)
    gate, up = as_autocast(gate, plan.function), as_autocast(up, plan.function)
    h, codes, *copies = ops.glu(gate, up, seeds, *constants)
    if at_random:  # in a pass of its own: the codes in one with act(gate) are those of tables without randomness
        codes = _codes(gate, plan)
    return h, (codes, *copies)


def _codes(gate: Tensor, plan: GLUPlan) -> Tensor:
    """Return the codes of act'(gate)."""
    gate = gate.contiguous()
    if plan.at_random:
        return ops.encode_at_random(gate, plan.table, ops.draw_seeds(gate, 1))
    return ops.encode(gate, plan.table)


def gradients(
    grad: Tensor, parts: tuple[Tensor, ...], plan: GLUPlan, kept_for: Wanted, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_gate, d_up and h; results that are not wanted have no elements.

    Args:
        grad: of h. If only h is wanted, any tensor of its shape and dtype.
        parts: from `keep`.
        plan, kept_for: arguments of `keep`.
        wanted: a subset of `kept_for`.
    """
    has_code, has_up, has_second = kept_for.kept(plan.keep)
    if plan.keep != "exact" and not plan.is_rotated:
        arguments: tuple[Any, ...] = (*parts, *_constants(plan, has_code, has_up, has_second), list(wanted))
        return ops.glu_backward(grad, *arguments)
    # The operations of torch's own backward pass, on what was saved or what comes back from its copies.
    if plan.keep == "exact" and kept_for.h_alone:
        return grad.new_empty(0), grad.new_empty(0), parts[0]
    left = list(parts)
    codes = left.pop(0) if has_code else None
    if left and plan.keep != "exact":
        bits = [plan.up_bits] * has_up + [plan.second_bits] * has_second
        left = decompress_rotated(left, bits, grad.shape, grad.dtype)
    up = left.pop(0) if has_up else grad
    second = left.pop(0) if has_second else grad
    d_gate, d_up, h = (grad.new_empty(0) for _ in range(3))
    if wanted.d_gate:
        d_gate = grad * up
        if codes is None:
            d_gate = derivative_of(plan.function)(d_gate, second)
        else:
            d_gate = ops.multiply(d_gate, codes, plan.table, up.stride())
    if wanted.d_up or wanted.h:
        activated = second if plan.keep == "parts" else forward_of(plan.function).call(second, *plan.parameters)
        d_up = grad * activated if wanted.d_up else d_up
        h = activated * up if wanted.h else h
    return d_gate, d_up, h


def _constants(plan: GLUPlan, has_code: bool, has_up: bool, has_second: bool) -> tuple[Any, ...]:
    bits = (plan.up_bits if has_up else 0, plan.second_bits if has_second else 0)
    return plan.function, plan.parameters, plan.table if has_code else "", *bits, plan.keep == "inputs"


class fewbit_glu(torch.autograd.Function):
    """gate, up -> h; a graph shows the name. Also returns the parts, for callers that rebuild h."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, plan: GLUPlan, rebuilds: bool) -> tuple[Tensor, ...]:
        """Return h, and the saved parts."""
        wanted = Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], rebuilds)
        h, parts = keep(gate, up, plan, wanted)
        ctx.save_for_backward(*parts)
        ctx.plan, ctx.kept_for = plan, wanted
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # no zeros for the parts, which have no gradient
        if plan.keep != "exact":
            ctx.mark_non_differentiable(*parts)
            return h, *parts
        return (h,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return d_gate and d_up."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # while compiling, the compiler refuses
            refuse()
        if grads[0] is None:
            return None, None, None, None
        wanted = Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], False)
        d_gate, d_up, _ = gradients(grads[0], ctx.saved_tensors, ctx.plan, ctx.kept_for, wanted)
        return d_gate if wanted.d_gate else None, d_up if wanted.d_up else None, None, None


# ---- functions -------------------------------------------------------------------------------------------------------

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
    for name, x in (("gate", gate), ("up", up)):
        if not isinstance(x, Tensor):
            raise FewbitError(f"{name} is a tensor, not {shown(x)}")
    nested = gate.is_nested and up.is_nested  # the shapes of whose parts the product compares
    if not nested and (gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device):
        described = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}" for x in (gate, up)]
        raise FewbitError(f"gate and up have one shape, dtype and device, not {described[0]} and {described[1]}")
    if not (keeps(gate) or keeps(up)) or are_active():  # torch's own, which supports all transforms
        return checked(plan.function, gate, product, gate, up, plan.function, plan.parameters)[1]
    check_dtype(gate, plan.function)
    return fewbit_glu.apply(gate, up, plan, False)[0]
