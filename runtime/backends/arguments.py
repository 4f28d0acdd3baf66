"""Checks of the arguments of ops: on every device, refuse what would make a kernel read or write out of bounds."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...tables import DETERMINISTIC, FewbitError
from ...tables.errors import shown
from ..tensors.checks import check_integer
from ..tensors.dtypes import DTYPES, KINDS
from ..tensors.glu_parts import GROUP_SIZE
from ..tensors.layout import is_dense
from ..tensors.levels import check_levels
from ..tensors.packing import GROUP, packed_size
from ..tensors.rows import Rows
from ..tensors.table_registry import table_of
from ..tensors.validation import check_groups, check_part, has_values, shown_part
from .forwards import forward_of
from .reference.glu_derivatives import derivative_of
from .reference.outlier import POSITION_BLOCK
from .reference.per_group import buffer_size, elements_of


def refuse(*_: Any) -> NoReturn:
    """Raise RuntimeError: this derivative needs more information than the codes hold."""
    raise RuntimeError(
        "fewbit activations have no second derivative (create_graph=True) and no forward mode: "
        "the codes keep f' alone; use torch's own activation here"
    )


def check_codes(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> None:
    """Raise FewbitError unless `packed` holds a code of the table for each element of `grad`, and `stride` is dense.

    Raises:
        TypeError: the ops do not support the dtype of `grad`.
    """
    check_dtype(grad, "multiply")
    check_packed(grad, "packed", packed, table_of(table).bits, grad.numel())
    if len(stride) != grad.dim():
        raise FewbitError(f"the stride has {grad.dim()} numbers, one a dimension of the gradient, not {len(stride)}")
    concrete = all(type(number) is int for number in (*grad.shape, *stride))
    if concrete and not is_dense(grad.shape, stride):
        raise FewbitError(f"the stride {tuple(stride)} is not that of a dense tensor of shape {tuple(grad.shape)}")


def check_packed(like: Tensor, name: str, packed: Tensor, bits: int, n: Any) -> None:
    """Raise FewbitError unless `packed` is `n` codes of `bits` bits on the device of `like`, or empty for 0 bits."""
    size, given = packed_size(n, bits), packed.shape
    concrete = all(type(number) is int for number in (size, *given))  # a compiler may not know the sizes
    wrong_size = given != (size,) if concrete else len(given) != 1
    if packed.dtype != torch.uint8 or wrong_size or packed.device != like.device or packed.layout != torch.strided:
        raise FewbitError(
            f"{n} codes of {bits} bits take {size} bytes: {name} is uint8 ({size},) on {like.device}, not "
            f"{str(packed.dtype).removeprefix('torch.')} {tuple(given)} on {packed.device}"
        )


def check_parameters(function: str, parameters: Sequence[float]) -> None:
    """Raise FewbitError unless there are as many `parameters` as the function has."""
    names = [name for name, _ in forward_of(function).parameters]
    if len(parameters) != len(names):
        accepted = ", ".join(names) or "no parameters"
        raise FewbitError(f"{function} takes {accepted}, not {len(parameters)} numbers")


def check_deterministic(op: str, table: str) -> None:
    """Raise FewbitError if the table's codes are drawn at random, which `op` does not."""
    kind = table_of(table).kind
    if kind not in DETERMINISTIC:
        raise FewbitError(f"{op} takes tables of kind {' or '.join(DETERMINISTIC)}, not {kind}")


def check_random_encoding(x: Tensor, table: str, seed: Tensor) -> None:
    """Raise FewbitError unless `encode_at_random` can take these arguments."""
    check_dtype(x, "encode_at_random")
    _check_seeds(x, seed, 1)
    if table_of(table).kind != "stochastic":
        raise FewbitError(f"encode_at_random takes tables of kind stochastic, not {table_of(table).kind}")


def checked(function: str, x: Any, forward: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``forward(*arguments)``, torch's own; raise the TypeError of `check_dtype` for integers that it refuses.

    Args:
        function: name in the message.
        x: the argument that may be an integer or boolean tensor.
    """
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or torch.compiler.is_compiling():
        return forward(*arguments)
    try:
        return forward(*arguments)
    except RuntimeError as error:  # includes NotImplementedError
        try:
            check_dtype(x, function)
        except TypeError as refused:
            raise refused from error
        raise


def check_dtype(x: Tensor, function: str) -> None:
    """Raise TypeError if the ops do not support the dtype of `x`."""
    if x.dtype not in DTYPES:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"fewbit.{function} takes {accepted}, not {str(x.dtype).removeprefix('torch.')}")


# ---- gated linear units ----------------------------------------------------------------------------------------------


def check_pair(
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
    """Raise FewbitError unless `glu` accepts these arguments."""
    check_dtype(gate, function)
    check_parameters(function, parameters)
    if table:
        check_deterministic("glu", table)
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise FewbitError(f"gate and up have one shape, dtype and device, not {_shown(gate)} and {_shown(up)}")
    _check_seeds(gate, seeds, 2)
    _check_bits(up_bits, second_bits)


def check_parts(
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
    """Raise FewbitError unless `glu_backward` accepts these arguments."""
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


def check_copied(x: Tensor, seed: Tensor, bits: int, group_size: int) -> None:
    """Raise FewbitError unless `copy_in_groups` accepts these arguments."""
    check_dtype(x, "copy_in_groups")
    _check_seeds(x, seed, 1)
    _check_bits(bits)
    check_integer("group_size", group_size, 1, 2**31)


def check_copy(
    packed: Tensor, groups: Tensor, bits: int, shape: Sequence[int], dtype: torch.dtype, group_size: int
) -> None:
    """Raise FewbitError unless `read_copy` accepts these arguments."""
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
        raise FewbitError(f"seeds are int64 ({count},) on cpu, not {_shown(seeds)}")


def _check_groups(like: Tensor, groups: Tensor, copies: int, n: Any, group_size: int = GROUP_SIZE) -> None:
    expected = (2 * copies, (n + group_size - 1) // group_size)
    concrete = all(type(size) is int for size in (*groups.shape, *expected))
    wrong_size = groups.shape != expected if concrete else groups.dim() != 2
    if groups.dtype != torch.bfloat16 or wrong_size or groups.device != like.device or groups.layout != torch.strided:
        raise FewbitError(f"groups are bfloat16 {expected} on {like.device}, not {_shown(groups)}")


def _shown(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"


# ---- quantizers ------------------------------------------------------------------------------------------------------


def check_rows(
    op: str,
    x: Tensor,
    bits: int | Tensor,
    group_size: int,
    seed: Tensor | None,
    levels: str,
    room: Tensor | None = None,
) -> None:
    """Raise FewbitError unless `per_group_quantize` (or its form with bits of each sample) can take these arguments."""
    _check_kind(op, x)
    if x.dim() != 2:
        raise FewbitError(f"{op}: x has two dimensions, samples and elements, not {x.dim()}")
    check_integer("group_size", group_size, 1, 2**31)
    if seed is not None:
        _check_seeds(x, seed, 1)
    if isinstance(bits, Tensor):
        _check_sample_bits(op, x, bits, room)
    else:
        check_integer("bits", bits, 1, 8)
    check_levels(levels, bits)


def check_row_codes(
    op: str,
    packed: Tensor,
    minimum: Tensor,
    range_: Tensor,
    bits: int | Tensor,
    group_size: int,
    features: int,
    dtype: torch.dtype,
    levels: str,
) -> None:
    """Raise FewbitError unless `per_group_dequantize` (or its form for samples) can take these arguments."""
    _check_result(op, dtype, features)
    check_levels(levels, bits)
    if _are_concrete(packed, minimum, range_, features):
        N = minimum.shape[0] if minimum.dim() else 0
        check_groups(op, (N, features), bits, (packed, minimum, range_), group_size, minimum.device)


def check_whole_groups(
    op: str,
    xs: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    seeds: Tensor | None,
    stochastic: Sequence[bool],
    levels: str,
) -> None:
    """Raise FewbitError unless `per_group_quantize_buffers` can take these arguments."""
    _check_equally_many(op, xs, bits, group_sizes, stochastic)
    for b in bits:
        check_levels(levels, b)
    for x, group_size in zip(xs, group_sizes, strict=True):
        _check_kind(op, x)
        if not x.dim() or x.shape[-1] % group_size or x.shape[-1] % GROUP:
            raise FewbitError(
                f"{op}: the last dimension of x is a multiple of {GROUP} and of group_size, {group_size}, not "
                f"{_shown(x)}"
            )
    if any(stochastic) and seeds is None:
        raise FewbitError(f"{op}: stochastic rounding takes seeds, int64 ({len(xs)},)")
    if seeds is not None:
        _check_seeds(seeds, seeds, len(xs))
        if seeds.shape[0] != len(xs):
            raise FewbitError(f"{op}: seeds are int64 ({len(xs)},), not {_shown(seeds)}")


def check_buffers(
    op: str,
    buffers: Sequence[Tensor],
    bits: Sequence[int],
    group_sizes: Sequence[int],
    dtype: torch.dtype,
    levels: str,
) -> list[int]:
    """Return for each buffer the elements D whose codes are its last dimension.

    Raises:
        FewbitError: `per_group_dequantize_buffers` cannot take these arguments.
    """
    _check_result(op, dtype, 0)
    _check_equally_many(op, buffers, bits, group_sizes)
    for b in bits:
        check_levels(levels, b)
    found = []
    for buffer, b, group_size in zip(buffers, bits, group_sizes, strict=True):
        size: Any = buffer.shape[-1] if buffer.dim() else -1
        elements = elements_of(size, b, group_size)
        whole = elements % group_size == 0 and elements % GROUP == 0 and buffer_size(elements, b, group_size) == size
        if buffer.dtype != torch.uint8 or not whole:
            raise FewbitError(f"{op}: no {b}-bit codes in groups of {group_size} take {_shown(buffer)}")
        found.append(elements)
    return found


def _check_equally_many(
    op: str, tensors: Sequence[Tensor], bits: Sequence[int], group_sizes: Sequence[int], *more: Sequence[int]
) -> None:
    """Raise FewbitError unless there are bits, a group size and all else for each tensor."""
    if any(len(of_each) != len(tensors) for of_each in (bits, group_sizes, *more)):
        raise FewbitError(f"{op}: each of {len(tensors)} tensors has bits, a group size and a rounding")
    for b in bits:
        check_integer("bits", b, 1, 8)
    for group_size in group_sizes:
        check_integer("group_size", group_size, 1, 2**31)


def check_channel_codes(
    op: str, packed: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int, count: int, dtype: torch.dtype
) -> None:
    """Raise FewbitError unless `fixed_point_dequantize` can take these arguments."""
    _check_result(op, dtype, count)
    check_vectors(op, packed, scale, shift, inner, bits)
    if _are_concrete(packed, count):
        check_part(op, "packed", packed, torch.uint8, (packed_size(count, bits),), packed.device)


def check_vectors(op: str, x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> None:
    """Raise FewbitError unless `scale` and `shift` are one number a channel, on the device of `x`."""
    check_integer("bits", bits, 1, 8)
    right = all(v.is_floating_point() and v.dim() == 1 and v.layout == torch.strided for v in (scale, shift))
    if not right or scale.shape != shift.shape or not (scale.device == shift.device == x.device):
        raise FewbitError(f"{op}: scale and shift are floating-point (C,) on {x.device}")
    if type(inner) is int and inner < 1:
        raise FewbitError(f"{op}: inner, the elements from one channel to the next, is not below 1")
    if _are_concrete(x, scale) and x.numel() and not scale.numel():
        raise FewbitError(f"{op}: there are elements and no channels")


def check_channels_of(op: str, x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> None:
    """Raise FewbitError unless `fixed_point_quantize` can take these arguments."""
    _check_kind(op, x)
    check_vectors(op, x, scale, shift, inner, bits)


def check_outlier_arguments(
    op: str, x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> None:
    """Raise FewbitError unless `outlier_quantize` can take these arguments."""
    _check_kind(op, x)
    if x.dim() != 1:
        raise FewbitError(f"{op}: x has one dimension, not {x.dim()}")
    check_integer("bits", bits, 2 if relu else 1, 8)
    check_integer("sample_every", sample_every, 1)
    if not 0 <= ratio <= 1:
        raise FewbitError(f"{op}: ratio is a number from 0 to 1, not {ratio}")
    if value_dtype not in (None, *KINDS):
        raise FewbitError(f"{op}: value_dtype is float16, bfloat16 or float32, not {value_dtype}")


def check_outlier_codes(
    op: str,
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    bits: int,
    relu: bool,
    count: int,
    dtype: torch.dtype,
) -> None:
    """Raise FewbitError unless `outlier_dequantize` can take these arguments."""
    packed, counts, offsets, values, levels = parts
    check_integer("bits", bits, 2 if relu else 1, 8)
    _check_result(op, dtype, count)
    if not _are_concrete(*parts, count):
        return
    device, k = packed.device, offsets.numel()
    if k > count:
        raise FewbitError(f"{op}: of {count} elements no {k} are outliers")
    check_part(op, "packed", packed, torch.uint8, (packed_size(count, bits),), device)
    check_part(op, "counts", counts, torch.uint8, (-(-count // POSITION_BLOCK),), device)
    check_part(op, "offsets", offsets, torch.uint8, (k,), device)
    if values.dtype not in KINDS:
        raise FewbitError(f"{op}: values are float16, bfloat16 or float32, not {values.dtype}")
    check_part(op, "values", values, values.dtype, (k,), device)
    check_part(op, "levels", levels, torch.float32, (2,), device)


def _check_kind(op: str, x: Tensor) -> None:
    if x.dtype not in KINDS:
        raise TypeError(f"fewbit.{op} takes float32, float16, bfloat16, not {str(x.dtype).removeprefix('torch.')}")


def _check_result(op: str, dtype: torch.dtype, count: int) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"fewbit.{op} takes float32, bfloat16, float16, float64, not {dtype}")
    if type(count) is int and count < 0:
        raise FewbitError(f"{op}: a number of elements is not below 0")


def _check_sample_bits(op: str, x: Tensor, bits: Tensor, room: Tensor | None) -> None:
    N, D = x.shape
    if bits.dtype != torch.uint8 or bits.dim() != 1 or bits.device != x.device:
        raise FewbitError(f"{op}: the bits of samples are uint8 (N,) on {x.device}, not {_shown(bits)}")
    if room is None or room.dtype != torch.int64 or room.shape != (1,) or room.device.type not in ("cpu", "meta"):
        raise FewbitError(f"{op}: the room is int64 (1,) on cpu, not {room if room is None else _shown(room)}")
    if _are_concrete(bits, N) and bits.shape[0] != N:
        raise FewbitError(f"{op}: there are {N} samples, and bits of {bits.shape[0]}")
    if not has_values(bits, room):
        return
    if room.item() < 0:
        raise FewbitError(f"{op}: the room is a number of bytes, not {room.item()}")
    if bits.device.type != "cpu":  # kernels of other devices write nothing beyond it, and nobody waits for the values
        return
    if bits.numel() and not bool(((bits - 1) < 8).all()):  # 0 − 1 is 255
        raise FewbitError(f"{op}: the bits of a sample are from 1 to 8")
    needed = int(Rows(N, D, bits).starts()[-1])
    if room.item() < needed:
        raise FewbitError(f"{op}: the codes take {needed} bytes, and there is room for {room.item()}")


def _are_concrete(*values: Tensor | int) -> bool:
    """Return whether all sizes are known numbers; a compiler may not know them."""
    sizes = (size for v in values for size in (v.shape if isinstance(v, Tensor) else (v,)))
    return all(type(size) is int for size in sizes)


# ---- pre-activation layers -------------------------------------------------------------------------------------------


def check_preact_input(op: str, A: Tensor, x: Tensor, vectors: Sequence[Tensor], bits: int) -> None:
    """Raise FewbitError unless `A` and `x` are tensors of one shape with channels, to which `vectors` belong."""
    if A.dim() < 2 or A.dtype not in DTYPES or x.dtype not in DTYPES or A.shape != x.shape or A.device != x.device:
        raise FewbitError(
            f"{op}: A and x are floating-point tensors of one shape, not {shown_part(A)} and {shown_part(x)}"
        )
    _check_preact(op, A.shape[1], A.device, vectors, bits)


def check_preact_codes(
    op: str,
    packed: Tensor,
    vectors: Sequence[Tensor],
    bits: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Raise FewbitError unless `packed` holds codes of a dense tensor of this form, whose channels have `vectors`."""
    if dtype not in DTYPES or len(shape) < 2 or len(stride) != len(shape) or not is_dense(shape, stride):
        raise FewbitError(f"{op}: codes are of a dense floating-point tensor with channels, not {list(shape)}")
    _check_preact(op, shape[1], packed.device, vectors, bits)
    check_part(op, "packed", packed, torch.uint8, (packed_size(math.prod(shape), bits),), packed.device)


def _check_preact(op: str, channels: int, device: torch.device, vectors: Sequence[Tensor], bits: int) -> None:
    check_integer("bits", bits, 1, 8)
    if channels == 0:
        raise FewbitError(f"{op}: a tensor with channels is expected, not one of 0 channels")
    for vector in vectors:
        if vector.shape != (channels,) or not vector.is_floating_point() or vector.device != device:
            raise FewbitError(f"{op}: vectors are floating-point ({channels},) on {device}, not {shown_part(vector)}")


# ---- pooling ---------------------------------------------------------------------------------------------------------


def check_window(x: Tensor, *window: Sequence[int]) -> None:
    """Raise FewbitError unless `x` has the dimensions of a max pooling whose places fit into a byte."""
    kernel, *others = window
    d = len(kernel)
    if d not in (1, 2, 3) or any(len(other) != d for other in others) or not 1 <= math.prod(kernel) <= 256:
        raise FewbitError(f"max_pool takes windows of 1 to 3 dimensions and at most 256 places, not {list(kernel)}")
    if x.dim() not in (d + 1, d + 2) or not x.is_floating_point():
        raise FewbitError(
            f"max_pool takes floating-point tensors of {d + 1} or {d + 2} dimensions, not {shown_part(x)}"
        )


def check_places(grad: Tensor, places: Tensor) -> None:
    """Raise FewbitError unless `places` are those of an output of the shape of `grad`."""
    if places.dtype != torch.uint8 or places.shape != grad.shape or places.device != grad.device:
        raise FewbitError(f"MaxPool: places are uint8 {tuple(grad.shape)}, not {shown_part(places)}")


def check_pooled(grad: Tensor, places: Tensor, shape: Sequence[int], *window: Sequence[int]) -> None:
    """Raise FewbitError unless `grad` and `places` are of a max pooling of an input of this `shape`."""
    check_window(grad, *window)
    check_places(grad, places)
    kernel, stride, padding, dilation = window
    d = len(kernel)
    fits = len(shape) == grad.dim() and list(shape[:-d]) == list(grad.shape[:-d])
    for size, out, k, s, p, e in zip(shape[-d:], grad.shape[-d:], kernel, stride, padding, dilation, strict=True):
        # The last window begins within the padded input.
        fits = fits and s > 0 and e > 0 and 0 <= p <= k // 2 and size > 0 and out > 0 and (out - 1) * s < size + p
    if not fits:
        raise FewbitError(f"max_pool_backward: outputs {tuple(grad.shape)} are not those of an input {tuple(shape)}")
