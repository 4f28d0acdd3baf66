"""Activations whose table is exchanged while training, on CUDA: the kernels of activation.py would be compiled anew."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ...tensors.levels import prepare
from ...tensors.packing import packed_size
from ...tensors.spec import with_stride
from ...tensors.traits import KINDS, name_of
from ..forwards import forward_of
from ..reference import activation as reference
from .codegen.following import ELEMENTS_PER_BLOCK, following_source
from .launching import Loaded, aligned, available, loaded


def activation(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    """Return f(x), torch's own, and the packed codes in its memory order."""
    if x.dtype not in KINDS or not available(x.get_device()):
        return reference.activation(x, function, parameters, table)
    y = forward_of(function).call(x, *parameters)
    dense, t = with_stride(x, y.stride()), prepare(table, x.dtype, x.device)
    packed = torch.empty(packed_size(x.numel(), t.bits), dtype=torch.uint8, device=x.device)
    pointers = (dense.data_ptr(), packed.data_ptr(), x.numel(), t.boundaries.data_ptr(), t.boundaries.numel())
    _launch("encode", x, t.bits, *pointers, t.codes.data_ptr())
    return y, packed


def multiply(grad: Tensor, packed: Tensor, table: str) -> Tensor:
    """Return gradient × level for the dense tensor `grad`, in its dtype and layout."""
    if grad.dtype not in KINDS or not available(grad.get_device()):
        return reference.multiply(grad, packed, table)
    t, packed = prepare(table, grad.dtype, grad.device), aligned(packed)
    result = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
    pointers = (grad.data_ptr(), packed.data_ptr(), result.data_ptr(), grad.numel(), t.levels.data_ptr())
    _launch("multiply", grad, t.bits, *pointers, t.levels.numel())
    return result


def _launch(name: str, x: Tensor, bits: int, *arguments: int) -> None:
    """Run a kernel over the elements of `x` on its device."""
    if x.numel():
        _kernel(name, name_of(x.dtype), bits, x.get_device()).launch(-(-x.numel() // ELEMENTS_PER_BLOCK), *arguments)


@cache
def _kernel(name: str, dtype: str, bits: int, device: int) -> Loaded:
    return loaded(following_source(dtype, bits), name, device)
