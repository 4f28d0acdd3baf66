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

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..backends.torch_functions import forward_of
from ..ops import NAMESPACE, check_dtype, check_packed, check_parameters
from ..tensors.packing import packed_size
from ..tensors.table_registry import DTYPES, table_of
from ..quantizers.base import check_integer
from ..tensors.philox import draw_seed
from ..backends.cpu import glu as cpu
from ..backends.cuda import glu as cuda
from ..backends.reference import glu as reference
from ..backends.reference.glu_derivatives import derivative_of
from ..tensors.glu_parts import GROUP_SIZE

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
        _check_pair(gate, up, seeds, function, *plan)
        return backend.forward(gate, up, seeds.tolist(), function, *plan)

    def run_backward(
        grad: Tensor, codes: Tensor, up: Tensor, second: Tensor, groups: Tensor, *plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        _check_parts(grad, codes, up, second, groups, *plan)
        return backend.backward(grad.contiguous(), (codes, up, second, groups), *plan)

    def run_copy(x: Tensor, seed: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
        _check_copied(x, seed, bits, group_size)
        return backend.copy(x.contiguous(), bits, seed.tolist()[0], group_size)

    def run_read(
        packed: Tensor,
        groups: Tensor,
        bits: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        group_size: int = GROUP_SIZE,
    ) -> Tensor:
        _check_copy(packed, groups, bits, shape, dtype, group_size)
        n = math.prod(shape)
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
    _check_pair(gate, up, seeds, function, parameters, table, up_bits, second_bits, derived)
    n = gate.numel()
    h = forward_of(function).call(gate, *parameters) * up
    sizes = (table_of(table).bits if table else 0, up_bits, second_bits)
    kept = (gate.new_empty(packed_size(n, bits), dtype=torch.uint8) for bits in sizes)
    return h, *kept, _fake_groups(gate, bool(up_bits) + bool(second_bits))


@torch.library.register_fake(glu_backward, lib=_library)
def _(grad: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _check_parts(grad, *others)
    return tuple(grad.new_empty(grad.shape if wanted else 0) for wanted in others[-1])


@torch.library.register_fake(copy_in_groups, lib=_library)
def _(x: Tensor, seed: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    _check_copied(x, seed, bits, group_size)
    packed = x.new_empty(packed_size(x.numel(), bits), dtype=torch.uint8)
    return packed, _fake_groups(x, int(bits > 0), group_size)


@torch.library.register_fake(read_copy, lib=_library)
def _(
    packed: Tensor,
    groups: Tensor,
    bits: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    group_size: int = GROUP_SIZE,
) -> Tensor:
    _check_copy(packed, groups, bits, shape, dtype, group_size)
    return packed.new_empty(shape, dtype=dtype)


def _fake_groups(x: Tensor, copies: int, group_size: int = GROUP_SIZE) -> Tensor:
    return x.new_empty(2 * copies, (x.numel() + group_size - 1) // group_size, dtype=torch.bfloat16)


# ---- arguments: what would make a kernel read or write out of bounds is refused, on every device and for fakes -------


def _check_pair(
    gate: Tensor,
    up: Tensor,
    seeds: Tensor,
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
) -> None:
    check_dtype(gate, function)
    check_parameters(function, parameters)
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise FewbitError(f"gate and up have one shape, dtype and device, not {_told(gate)} and {_told(up)}")
    _check_seeds(gate, seeds, 2)
    _check_bits(up_bits, second_bits)


def _check_parts(
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
) -> None:
    check_dtype(grad, "glu_backward")
    check_parameters(function, parameters)
    _check_bits(up_bits, second_bits)
    n = grad.numel()
    code_bits = table_of(table).bits if table else 0
    check_packed(grad, "codes", codes, code_bits, n)
    check_packed(grad, "up", up, up_bits, n)
    check_packed(grad, "second", second, second_bits, n)
    _check_groups(grad, groups, bool(up_bits) + bool(second_bits), n)
    if len(wanted) != 3:
        raise FewbitError(f"wanted tells of d_gate, d_up and h, not {shown(list(wanted))}")
    d_gate, d_up, h = wanted
    if derived and d_gate:
        derivative_of(function)
    has_derivative = second_bits if derived else code_bits
    if (d_gate and not (up_bits and has_derivative)) or (d_up and not second_bits) or (h and not up_bits * second_bits):
        kept = f"codes of {code_bits} bits, up of {up_bits} and second of {second_bits}"
        raise FewbitError(f"d_gate, d_up, h, wanted {list(wanted)}, take more than {kept}")


def _check_copied(x: Tensor, seed: Tensor, bits: int, group_size: int) -> None:
    check_dtype(x, "copy_in_groups")
    _check_seeds(x, seed, 1)
    _check_bits(bits)
    check_integer("group_size", group_size, 1, 2**31)


def _check_copy(
    packed: Tensor, groups: Tensor, bits: int, shape: Sequence[int], dtype: torch.dtype, group_size: int
) -> None:
    _check_bits(bits, least=1)
    check_integer("group_size", group_size, 1, 2**31)
    if any(type(size) is int and size < 0 for size in shape):
        raise FewbitError(f"a shape has no negative sizes: {shown(list(shape))}")
    if dtype not in DTYPES:
        check_dtype(packed.new_empty(0, dtype=dtype), "read_copy")
    n = math.prod(shape)
    check_packed(packed, "packed", packed, bits, n)
    _check_groups(packed, groups, 1, n, group_size)


def _check_bits(*given: int, least: int = 0) -> None:
    for bits in given:
        if not least <= bits <= 8:
            raise FewbitError(f"bits of a copy are from {least} to 8, not {bits}")


def _check_seeds(like: Tensor, seeds: Tensor, count: int) -> None:
    wrong = seeds.dtype != torch.int64 or seeds.dim() != 1 or seeds.device.type not in ("cpu", like.device.type)
    if wrong or (type(seeds.shape[0]) is int and seeds.shape[0] < count):
        raise FewbitError(f"seeds are int64 ({count},) on cpu, not {_told(seeds)}")


def _check_groups(like: Tensor, groups: Tensor, copies: int, n: Any, group_size: int = GROUP_SIZE) -> None:
    expected = (2 * copies, (n + group_size - 1) // group_size)
    concrete = all(type(size) is int for size in (*groups.shape, *expected))
    wrong_size = groups.shape != expected if concrete else groups.dim() != 2
    if groups.dtype != torch.bfloat16 or wrong_size or groups.device != like.device or groups.layout != torch.strided:
        raise FewbitError(f"groups are bfloat16 {expected} on {like.device}, not {_told(groups)}")


def _told(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
