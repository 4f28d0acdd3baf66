"""The mathematics of a gated linear unit in few bits, in plain torch: any device, and the oracle of the kernels.

Elements are in row-major order, whatever the layout. Arithmetic is in A, float32 for the 16-bit types and otherwise the
tensor's own type T; û and â are what `PerGroup` decompresses to float32, and each result is rounded once:

    d_gate = T((grad · û) · level),  0 where the level is    d_up = T(grad · â)    h = T(â · û), within ± the largest T
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...tensors.glu_parts import GROUP_SIZE
from ...tensors.levels import prepare
from ...tensors.packing import unpack
from ...tensors.philox import Seed
from ...tensors.traits import arithmetic_dtype, as_kind, largest
from ..forwards import CALLABLE, forward_of
from . import activation as tables
from . import per_group
from .glu_derivatives import derivative_of

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
Copy = Callable[[Tensor, int, Seed], tuple[Tensor, Tensor]]  # of groups of 256
Values = Callable[[Tensor, Tensor, int, int], Tensor]


def product(gate: Tensor, up: Tensor, function: str, parameters: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return act(gate) and act(gate) · up as eager torch computes them."""
    activated = forward_of(function).call(gate, *parameters)
    return activated, activated * up


def product_over(activated: Tensor, up: Tensor, function: str) -> Tensor:
    """Return act(gate) · up as eager torch computes it, over act(gate) where that has the product's layout."""
    new = not function.startswith(CALLABLE)  # a user's function may return its argument, or what it keeps
    return activated.mul_(up) if new and activated.is_contiguous() else activated * up


def copy(x: Tensor, bits: int, seed: Seed, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Return packed codes of the elements of `x` and their groups, bfloat16 (2, ⌈n/G⌉); both empty for 0 bits."""
    if bits == 0:
        return nothing(x), x.new_empty(0, -(-x.numel() // group_size), dtype=torch.bfloat16)
    rows = as_kind(x.reshape(1, -1), keep_positive=False)
    packed, minimum, range_ = per_group.quantize(rows, bits, group_size, seed)
    return packed.view(-1), joined(minimum, range_)


def values(packed: Tensor, groups: Tensor, bits: int, n: int, group_size: int = GROUP_SIZE) -> Tensor:
    """Return the `n` values of a copy, float32 (n,)."""
    out = torch.empty(1, n, dtype=torch.float32, device=packed.device)
    per_group.dequantize(packed.view(1, -1), groups[:1], groups[1:], bits, group_size, out)
    return out.view(-1)


def forward(
    gate: Tensor,
    up: Tensor,
    seeds: Sequence[Seed],
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
    copy: Copy = copy,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return h and the parts: see `ops`; `copy` makes the copies."""
    activated = forward_of(function).call(gate, *parameters)
    codes = tables.encode(gate.contiguous(), table) if table else nothing(gate)
    up_copy = copy(up, up_bits, seeds[0])
    second_copy = copy(gate if derived else activated, second_bits, seeds[1])
    h = product_over(activated, up, function)
    return h, codes, up_copy[0], second_copy[0], joined(up_copy[1], second_copy[1])


def backward(
    grad: Tensor,
    parts: Parts,
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
    wanted: Sequence[bool],
    values: Values = values,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_gate, d_up and h, empty if not wanted: see `ops`; `values` reads the copies."""
    codes, up_packed, second_packed, groups = parts
    n, A = grad.numel(), arithmetic_dtype(grad.dtype)
    dy = grad.reshape(-1).to(A)
    û = values(up_packed, groups[:2], up_bits, n).to(A) if up_bits else dy
    second = values(second_packed, groups[-2:], second_bits, n).to(A) if second_bits else dy
    â = forward_of(function).call(second, *parameters) if derived else second
    d_gate, d_up, h = (nothing(grad) for _ in range(3))
    if wanted[0] and derived:
        d_gate = derivative_of(function)(dy * û, second)
    elif wanted[0]:
        t = prepare(table, grad.dtype, grad.device)
        level = tables.factors_of(t, unpack(codes, t.bits, n))
        d_gate = torch.where(level == 0, 0, dy * û * level)
    if wanted[1]:
        d_up = dy * â
    if wanted[2]:
        h = (â * û).clamp(-largest(grad.dtype), largest(grad.dtype))
    return shaped(d_gate, grad, wanted[0]), shaped(d_up, grad, wanted[1]), shaped(h, grad, wanted[2])


def joined(*groups: Tensor) -> Tensor:
    """Return groups, bfloat16, one behind the other: by their bits, for autocast to float16 refuses to join them."""
    return torch.cat([part.view(torch.int16) for part in groups]).view(torch.bfloat16)


def nothing(like: Tensor) -> Tensor:
    """Return an empty part, for one that no gradient needs."""
    return like.new_empty(0, dtype=torch.uint8)


def shaped(x: Tensor, like: Tensor, wanted: bool) -> Tensor:
    """Return the values of `x` in shape and dtype of `like`, or an empty tensor if it is not wanted."""
    return x.to(like.dtype).view(like.shape) if wanted else like.new_empty(0)
