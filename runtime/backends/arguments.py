"""Checks of the arguments of ops: on every device, refuse what would make a kernel read or write out of bounds."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.checks import check_integer
from ..tensors.dtypes import DTYPES
from ..tensors.glu_parts import GROUP_SIZE
from ..tensors.layout import is_dense
from ..tensors.packing import packed_size
from ..tensors.table_registry import table_of
from .forwards import forward_of
from .reference.glu_derivatives import derivative_of


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
