"""The ops of the gated linear units: schemas, fakes, and what runs where.

    draw_seeds(x, count) -> seeds
    glu(gate, up, seeds, function, parameters, table, up_bits, second_bits, derived) -> h, codes, up, second, groups
    glu_backward(grad, codes, up, second, groups, function, …, wanted) -> d_gate, d_up, h
    copy_in_groups(x, seed, bits, group_size) -> packed, groups
    read_copy(packed, groups, bits, shape, dtype, group_size) -> x

The parts, of n elements in row-major order: `codes` of act'(gate), uint8 (⌈n/8⌉·bits,); `up` and `second`, a copy of
act(gate) or, if `derived`, of gate, alike; `groups`, bfloat16 (2 a copy, ⌈n/256⌉), minima and ranges. What is not kept
(an empty `table`, 0 bits) has no elements. `copy_in_groups` takes groups of other sizes too. No op is differentiable:
graph.py is. The seeds are a tensor, int64 (2,) on the CPU, so that the ops are functions of their inputs and
torch.compile knows what is random. `draw_seeds` takes the tensor that they are for: compilers merge equal calls, and
two tensors are not to be rounded alike.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..forwards import forward_of
from ..ops import NAMESPACE, check_dtype
from ..packing import packed_size
from ..prepared import table_of
from ..quantizers.philox import draw_seed
from . import cpu, cuda, reference
from .plan import GROUP_SIZE

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_PLAN = "str function, float[] parameters, str table, int up_bits, int second_bits, bool derived"
_library.define("draw_seeds(Tensor x, int count) -> Tensor", tags=(*_TAGS, torch.Tag.nondeterministic_seeded))
_library.define(
    f"glu(Tensor gate, Tensor up, Tensor seeds, {_PLAN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=_TAGS
)
_library.define(
    f"glu_backward(Tensor grad, Tensor codes, Tensor up, Tensor second, Tensor groups, {_PLAN}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_library.define("copy_in_groups(Tensor x, Tensor seed, int bits, int group_size=256) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(
    "read_copy(Tensor packed, Tensor groups, int bits, SymInt[] shape, ScalarType dtype, int group_size=256) -> Tensor",
    tags=_TAGS,
)

draw_seeds = torch.ops.fewbit.draw_seeds.default
glu = torch.ops.fewbit.glu.default
glu_backward = torch.ops.fewbit.glu_backward.default
copy_in_groups = torch.ops.fewbit.copy_in_groups.default
read_copy = torch.ops.fewbit.read_copy.default


def _draw_seeds(x: Tensor, count: int) -> Tensor:
    return torch.tensor([draw_seed() for _ in range(count)], dtype=torch.int64, device="cpu")


_library.impl("draw_seeds", _draw_seeds, "CompositeExplicitAutograd")


def _register(backend: Any, key: str) -> None:
    def run_glu(gate: Tensor, up: Tensor, seeds: Tensor, function: str, *plan: Any) -> tuple[Tensor, ...]:
        check_dtype(gate, function)
        return backend.forward(gate, up, seeds.tolist(), function, *plan)

    def run_backward(
        grad: Tensor, codes: Tensor, up: Tensor, second: Tensor, groups: Tensor, *plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backend.backward(grad.contiguous(), (codes, up, second, groups), *plan)

    def run_copy(x: Tensor, seed: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
        return backend.copy(x.contiguous(), bits, seed.tolist()[0], group_size)

    def run_read(
        packed: Tensor,
        groups: Tensor,
        bits: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        group_size: int = GROUP_SIZE,
    ) -> Tensor:
        n = torch.Size(shape).numel()
        return backend.values(packed, groups, bits, n, group_size).to(dtype).view(shape)

    _library.impl("glu", run_glu, key)
    _library.impl("glu_backward", run_backward, key)
    _library.impl("copy_in_groups", run_copy, key)
    _library.impl("read_copy", run_read, key)


for _backend, _key in ((reference, "CompositeExplicitAutograd"), (cpu, "CPU"), (cuda, "CUDA")):
    _register(_backend, _key)


# ---- shapes alone ----------------------------------------------------------------------------------------------------


@torch.library.register_fake(draw_seeds, lib=_library)
def _(x: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="cpu")


@torch.library.register_fake(glu, lib=_library)
def _(
    gate: Tensor,
    up: Tensor,
    seeds: Tensor,
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
) -> tuple[Tensor, ...]:
    check_dtype(gate, function)
    n = gate.numel()
    h = forward_of(function).call(gate, *parameters) * up
    sizes = (table_of(table).bits if table else 0, up_bits, second_bits)
    kept = (gate.new_empty(packed_size(n, bits), dtype=torch.uint8) for bits in sizes)
    return h, *kept, _fake_groups(gate, bool(up_bits) + bool(second_bits))


@torch.library.register_fake(glu_backward, lib=_library)
def _(grad: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(grad.shape if wanted else 0) for wanted in others[-1])


@torch.library.register_fake(copy_in_groups, lib=_library)
def _(x: Tensor, seed: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    return x.new_empty(packed_size(x.numel(), bits), dtype=torch.uint8), _fake_groups(x, 1, group_size)


@torch.library.register_fake(read_copy, lib=_library)
def _(
    packed: Tensor,
    groups: Tensor,
    bits: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    group_size: int = GROUP_SIZE,
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


def _fake_groups(x: Tensor, copies: int, group_size: int = GROUP_SIZE) -> Tensor:
    return x.new_empty(2 * copies, (x.numel() + group_size - 1) // group_size, dtype=torch.bfloat16)
