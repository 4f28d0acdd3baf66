"""Checks that several ops share: on every device, refuse what would make a kernel read or write out of bounds."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...tables import DETERMINISTIC, FewbitError
from ..backends.forwards import forward_of
from ..tensors.packing import packed_size
from ..tensors.philox import Seed
from ..tensors.spec import is_dense
from ..tensors.table_registry import table_of
from ..tensors.traits import DTYPES, KINDS, name_of


def refuse(*_: Any) -> NoReturn:
    """Raise RuntimeError: this derivative needs more information than the codes hold."""
    raise RuntimeError(
        "fewbit activations have no second derivative (create_graph=True) and no forward mode: "
        "the codes keep f' alone; use torch's own activation here"
    )


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


# ---- dtypes and functions --------------------------------------------------------------------------------------------


def check_dtype(x: Tensor, function: str) -> None:
    """Raise TypeError if the ops do not support the dtype of `x`."""
    if x.dtype not in DTYPES:
        accepted = ", ".join(map(name_of, DTYPES))
        raise TypeError(f"fewbit.{function} takes {accepted}, not {str(x.dtype).removeprefix('torch.')}")


def check_kind(op: str, x: Tensor) -> None:
    """Raise TypeError unless the kernels of quantizers read the dtype of `x`."""
    if x.dtype not in KINDS:
        raise TypeError(f"fewbit.{op} takes float32, float16, bfloat16, not {str(x.dtype).removeprefix('torch.')}")


def check_equally_many(op: str, tensors: Sequence[Tensor], *of_each: Sequence[int], have: str) -> None:
    """Raise FewbitError unless there is one of each sequence for each tensor; `have` names them in the message."""
    if any(len(values) != len(tensors) for values in of_each):
        raise FewbitError(f"{op}: each of {len(tensors)} tensors has {have}")


def check_result(op: str, dtype: torch.dtype, count: int) -> None:
    """Raise TypeError or FewbitError unless `count` elements of `dtype` can be a quantizer's result."""
    if dtype not in DTYPES:
        raise TypeError(f"fewbit.{op} takes float32, bfloat16, float16, float64, not {dtype}")
    if type(count) is int and count < 0:
        raise FewbitError(f"{op}: a number of elements is not below 0")


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


# ---- codes and seeds -------------------------------------------------------------------------------------------------


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


def check_stride(grad: Tensor, stride: Sequence[int]) -> None:
    """Raise FewbitError unless a dense tensor of the shape of `grad` can have these strides."""
    if len(stride) != grad.dim():
        raise FewbitError(f"the stride has {grad.dim()} numbers, one a dimension of the gradient, not {len(stride)}")
    concrete = all(type(number) is int for number in (*grad.shape, *stride))
    if concrete and not is_dense(grad.shape, stride):
        raise FewbitError(f"the stride {tuple(stride)} is not that of a dense tensor of shape {tuple(grad.shape)}")


def check_seeds(like: Tensor, seeds: Tensor, count: int) -> None:
    """Raise FewbitError unless there are `count` seeds, on the host or beside `like`, whose kernel reads them there."""
    wrong = seeds.dtype != torch.int64 or seeds.dim() != 1 or seeds.device not in (torch.device("cpu"), like.device)
    if wrong or (type(seeds.shape[0]) is int and seeds.shape[0] < count):
        raise FewbitError(f"seeds are int64 ({count},) on cpu, not {shown_tensor(seeds)}")


def keys_of(seeds: Tensor) -> list[Seed]:
    """Return seeds as kernels take them: numbers, or from a GPU each () there, where nobody waits for its value."""
    return list(seeds.unbind()) if seeds.device.type == "cuda" else seeds.tolist()


def empty_codes(x: Tensor, n: Any, bits: int) -> Tensor:
    """Return memory for `n` packed codes on the device of `x`."""
    return x.new_empty(packed_size(n, bits), dtype=torch.uint8)


def are_concrete(*values: Tensor | int) -> bool:
    """Return whether all sizes are known numbers; a compiler may not know them."""
    sizes = (size for v in values for size in (v.shape if isinstance(v, Tensor) else (v,)))
    return all(type(size) is int for size in sizes)


def shown_tensor(x: Tensor) -> str:
    """Return dtype, shape and device of a tensor for a message."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
