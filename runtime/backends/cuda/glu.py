"""The gated linear unit on the GPU: one kernel forward, which reads gate and up once, and one backward.

They cover the usual training configuration: the code and both copies saved, act with a CUDA formula, 16- or 32-bit
numbers. All others use the reference, with copies made by the per-group quantizer's kernels.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from ...tensors.glu_parts import GROUP_SIZE
from ...tensors.levels import table_of
from ...tensors.packing import packed_size
from ...tensors.philox import Seed
from ...tensors.spec import with_stride
from ...tensors.traits import KINDS, as_kind, name_of
from ..forwards import key_of
from ..reference import glu as reference
from ..reference.glu import Parts, joined
from . import per_group
from .codegen import FORMULAS
from .codegen.glu import ELEMENTS_PER_BLOCK, glu_source
from .launching import Loaded, aligned, available, loaded, seed_arguments


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return h and the parts: see `ops`."""
    plan = (function, tuple(parameters), table, up_bits, second_bits)
    if derived or not _serves(gate, *plan):
        return reference.forward(gate, up, seeds, *plan, derived, copy=copy)
    stride = _product_stride(gate.shape, gate.stride(), up.stride())
    gate, up = gate.contiguous(), up.contiguous()
    n, h = gate.numel(), torch.empty_like(gate, memory_format=torch.contiguous_format)
    sizes = (packed_size(n, bits) for bits in (table_of(table).bits, up_bits, second_bits))
    codes, up_packed, act_packed = (torch.empty(size, dtype=torch.uint8, device=gate.device) for size in sizes)
    groups = torch.empty(4, -(-n // GROUP_SIZE), dtype=torch.bfloat16, device=gate.device)
    tensors = (gate, up, h, codes, up_packed, act_packed, groups)
    drawn = (argument for seed in seeds for argument in seed_arguments(seed))
    _launch("glu_forward", gate, plan, *(t.data_ptr() for t in tensors), n, *drawn)
    return with_stride(h, stride), codes, up_packed, act_packed, groups


@lru_cache(1024)
def _product_stride(shape: tuple[int, ...], of_gate: tuple[int, ...], of_up: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives act(gate) · up."""
    gate, up = (torch.empty_strided(shape, stride, device="meta") for stride in (of_gate, of_up))
    return (torch.relu(gate) * up).stride()


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_gate, d_up and h, empty if not wanted: see `ops`."""
    plan = (function, tuple(parameters), table, up_bits, second_bits)
    if derived or not _serves(grad, *plan):
        return reference.backward(grad, parts, *plan, derived, wanted, values=values)
    kept = [aligned(part) for part in parts]
    results = [torch.empty_like(grad) if w else grad.new_empty(0) for w in wanted]
    addresses = [result.data_ptr() if w else 0 for result, w in zip(results, wanted, strict=True)]
    _launch("glu_backward", grad, plan, grad.data_ptr(), *(part.data_ptr() for part in kept), *addresses, grad.numel())
    return results[0], results[1], results[2]


def copy(x: Tensor, bits: int, seed: Seed, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Return the packed codes of the elements of `x` and their groups; both empty for 0 bits."""
    rows = as_kind(x.contiguous().view(1, -1), keep_positive=False)
    if bits == 0 or not per_group.serves(rows, group_size):
        return reference.copy(x, bits, seed, group_size)
    packed, minimum, range_ = per_group.quantize(rows, bits, group_size, seed)
    return packed.view(-1), joined(minimum, range_)


def values(packed: Tensor, groups: Tensor, bits: int, n: int, group_size: int = GROUP_SIZE) -> Tensor:
    """Return the `n` values of a copy, float32 (n,)."""
    out = torch.empty(1, n, dtype=torch.float32, device=packed.device)
    if not per_group.serves(out, group_size):
        return reference.values(packed, groups, bits, n, group_size)
    per_group.dequantize(packed.view(1, -1), groups[:1].contiguous(), groups[1:].contiguous(), bits, group_size, out)
    return out.view(-1)


Constants = tuple[str, tuple[float, ...], str, int, int]


def _serves(x: Tensor, function: str, parameters: Sequence[float], table: str, up_bits: int, act_bits: int) -> bool:
    served = bool(table and up_bits and act_bits) and function in FORMULAS and x.dtype in KINDS
    return served and available(x.get_device())


def _launch(name: str, x: Tensor, plan: Constants, *arguments: int) -> None:
    """Run a kernel over the elements of `x` on its device."""
    if x.numel():
        function, parameters, *rest = plan
        kernel = _kernel(name, name_of(x.dtype), x.get_device(), function, key_of(parameters), *rest)
        kernel.launch(-(-x.numel() // ELEMENTS_PER_BLOCK), *arguments)


@cache
def _kernel(
    name: str,
    dtype: str,
    device: int,
    function: str,
    parameters: tuple[str, ...],
    table: str,
    up_bits: int,
    act_bits: int,
) -> Loaded:
    source = glu_source(table_of(table), dtype, function, tuple(map(float, parameters)), up_bits, act_bits)
    return loaded(source, name, device)
