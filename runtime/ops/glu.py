"""Gated linear units, whose backward pass needs act(gate), act'(gate) and up.

    glu(gate, up, seeds, function, parameters, table, up_bits, second_bits, derived) -> h, codes, up, second, groups
    glu_backward(grad, codes, up, second, groups, function, …, wanted) -> d_gate, d_up, h
    copy_in_groups(x, seed, bits, group_size) -> packed, groups
    read_copy(packed, groups, bits, shape, dtype, group_size) -> x

The parts, of n elements in row-major order: `codes` of act'(gate), uint8 (⌈n/8⌉·bits,); `up` and `second`, a copy of
act(gate) or, if `derived`, of gate, likewise; `groups`, bfloat16 (2 a copy, ⌈n/256⌉), minima and ranges. Parts that are
not saved (an empty `table`, 0 bits) have no elements. `copy_in_groups` accepts other group sizes too. These
ops are not differentiable: activations/gated.py is. The seeds are those of `draw_seeds`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from ..backends.forwards import forward_of
from ..backends.reference.glu_derivatives import derivative_of
from ..tensors.glu_parts import GROUP_SIZE
from ..tensors.levels import table_of
from ..tensors.traits import DTYPES
from .declare import (
    Call,
    check_deterministic,
    check_dtype,
    check_packed,
    check_parameters,
    check_seeds,
    declare,
    empty_codes,
    keys_of,
    shown_tensor,
)

_PLAN = "str function, float[] parameters, str table, int up_bits, int second_bits, bool derived"


@declare(
    f"glu(Tensor gate, Tensor up, Tensor seeds, {_PLAN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "glu.forward",
)
def glu(
    gate: Tensor,
    up: Tensor,
    seeds: Tensor,
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
) -> Call:
    """Return h = act(gate) · up and the parts that its backward pass needs."""
    check_dtype(gate, function)
    check_parameters(function, parameters)
    if table:
        check_deterministic("glu", table)
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise FewbitError(
            f"gate and up have one shape, dtype and device, not {shown_tensor(gate)} and {shown_tensor(up)}"
        )
    check_seeds(gate, seeds, 2)
    _check_bits(up_bits, second_bits)

    def fake() -> tuple[Tensor, ...]:
        sizes = (table_of(table).bits if table else 0, up_bits, second_bits)
        kept = (empty_codes(gate, gate.numel(), bits) for bits in sizes)
        h = forward_of(function).call(gate, *parameters) * up
        return h, *kept, _empty_groups(gate, bool(up_bits) + bool(second_bits), GROUP_SIZE)

    return Call(
        fake=fake,
        run=lambda kernel: kernel(
            *(gate, up, keys_of(seeds), function, parameters, table, up_bits, second_bits, derived)
        ),
    )


@declare(
    f"glu_backward(Tensor grad, Tensor codes, Tensor up, Tensor second, Tensor groups, {_PLAN}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)",
    "glu.backward",
)
def glu_backward(
    grad: Tensor,
    codes: Tensor,
    up: Tensor,
    second: Tensor,
    groups: Tensor,
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
    wanted: Sequence[bool],
) -> Call:
    """Return d_gate, d_up and h of the parts; what is not wanted has no elements."""
    check_dtype(grad, "glu_backward")
    check_parameters(function, parameters)
    _check_bits(up_bits, second_bits)
    n = grad.numel()
    code_bits = table_of(table).bits if table else 0
    check_packed(grad, "codes", codes, code_bits, n)
    check_packed(grad, "up", up, up_bits, n)
    check_packed(grad, "second", second, second_bits, n)
    _check_groups(grad, groups, bool(up_bits) + bool(second_bits), n, GROUP_SIZE)
    if len(wanted) != 3:
        raise FewbitError(f"wanted tells of d_gate, d_up and h, not {shown(list(wanted))}")
    d_gate, d_up, h = wanted
    if derived and d_gate:
        derivative_of(function)
    has_derivative = second_bits if derived else code_bits
    if (d_gate and not (up_bits and has_derivative)) or (d_up and not second_bits) or (h and not up_bits * second_bits):
        kept = f"codes of {code_bits} bits, up of {up_bits} and second of {second_bits}"
        raise FewbitError(f"d_gate, d_up, h, wanted {list(wanted)}, take more than {kept}")
    return Call(
        fake=lambda: tuple(grad.new_empty(grad.shape if each else 0) for each in wanted),
        run=lambda kernel: kernel(
            *(grad.contiguous(), (codes, up, second, groups)),
            *(function, parameters, table, up_bits, second_bits, derived, wanted),
        ),
    )


@declare("copy_in_groups(Tensor x, Tensor seed, int bits, int group_size=256) -> (Tensor, Tensor)", "glu.copy")
def copy_in_groups(x: Tensor, seed: Tensor, bits: int, group_size: int = GROUP_SIZE) -> Call:
    """Return a copy of `x` in few bits, rounded at random, and its groups."""
    check_dtype(x, "copy_in_groups")
    check_seeds(x, seed, 1)
    _check_bits(bits)
    check_integer("group_size", group_size, 1, 2**31)
    return Call(
        fake=lambda: (empty_codes(x, x.numel(), bits), _empty_groups(x, int(bits > 0), group_size)),
        run=lambda kernel: kernel(x.contiguous(), bits, keys_of(seed)[0], group_size),
    )


@declare(
    "read_copy(Tensor packed, Tensor groups, int bits, SymInt[] shape, ScalarType dtype, int group_size=256) -> Tensor",
    "glu.values",
)
def read_copy(
    packed: Tensor,
    groups: Tensor,
    bits: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    group_size: int = GROUP_SIZE,
) -> Call:
    """Return what `copy_in_groups` made a copy of."""
    _check_bits(bits, least=1)
    check_integer("group_size", group_size, 1, 2**31)
    if any(type(size) is int and size < 0 for size in shape):
        raise FewbitError(f"a shape has no negative sizes: {shown(list(shape))}")
    if dtype not in DTYPES:
        check_dtype(packed.new_empty(0, dtype=dtype), "read_copy")
    n = math.prod(shape)
    check_packed(packed, "packed", packed, bits, n)
    _check_groups(packed, groups, 1, n, group_size)
    return Call(
        fake=lambda: packed.new_empty(shape, dtype=dtype),
        run=lambda kernel: kernel(packed, groups, bits, n, group_size).to(dtype).view(shape),
    )


def _check_bits(*given: int, least: int = 0) -> None:
    for bits in given:
        if not least <= bits <= 8:
            raise FewbitError(f"bits of a copy are from {least} to 8, not {bits}")


def _check_groups(like: Tensor, groups: Tensor, copies: int, n: Any, group_size: int) -> None:
    expected = (2 * copies, (n + group_size - 1) // group_size)
    concrete = all(type(size) is int for size in (*groups.shape, *expected))
    wrong_size = groups.shape != expected if concrete else groups.dim() != 2
    if groups.dtype != torch.bfloat16 or wrong_size or groups.device != like.device or groups.layout != torch.strided:
        raise FewbitError(f"groups are bfloat16 {expected} on {like.device}, not {shown_tensor(groups)}")


def _empty_groups(x: Tensor, copies: int, group_size: int) -> Tensor:
    return x.new_empty(2 * copies, (x.numel() + group_size - 1) // group_size, dtype=torch.bfloat16)
