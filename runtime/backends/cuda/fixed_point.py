"""Fixed-point quantization on the GPU, 8 elements a thread, and launches of pre-activation layers' kernels."""

from functools import cache

import torch
from torch import Tensor

from ...tensors.packing import packed_size
from ...tensors.spec import flat
from ...tensors.traits import KINDS, name_of
from ..reference import fixed_point as reference
from ..reference.fixed_point import QuantParams
from .codegen.fixed_point import ELEMENTS_PER_BLOCK, ROWS, WARPS_PER_BLOCK, fixed_point_source
from .launching import Loaded, aligned, loaded, serves


def table(scale: Tensor, shift: Tensor, bits: int, rows: int = ROWS) -> Tensor:
    """Return the parameters of each channel's codes under γ and β, (C,): (7, C), 32 bits each; see fixed_point.cuh.

    Rows from `rows` on are not written, if they are the last three.
    """
    C = scale.numel()
    result = torch.empty(ROWS, C, dtype=torch.float32, device=scale.device)
    γ, β = _readable(scale), _readable(shift)
    vectors = (γ.data_ptr(), _KINDS[γ.dtype], β.data_ptr(), _KINDS[β.dtype], result.data_ptr())
    launch("tabulate", result, bits, C, *vectors, C, int(rows == ROWS), per_block=WARPS_PER_BLOCK * 32)
    return result


_KINDS = {**KINDS, torch.float64: len(KINDS)}


def _readable(vector: Tensor) -> Tensor:
    """Return numbers of channels as the kernel reads them."""
    return aligned(vector if vector.dtype in _KINDS else vector.double())


def quant_params(scale: Tensor, shift: Tensor, bits: int) -> QuantParams:
    """Return the parameters of the codes under γ and β, (C,), computed by one kernel."""
    origin, step, inverse, zero, *_ = table(scale, shift, bits, rows=4)
    return QuantParams(origin, step, inverse, zero.view(torch.int32))


def quantize(x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> Tensor:
    """Return the packed codes of the dense tensor `x`; element i in memory belongs to channel ⌊i/inner⌋ mod C."""
    if not serves(x):
        return reference.quantize(x, scale, shift, inner, bits)
    n, c = x.numel(), quant_params(scale, shift, bits)
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device=x.device)
    parameters = (c.origin.data_ptr(), c.inverse.data_ptr(), c.zero.data_ptr())
    launch("quantize", x, bits, n, x.data_ptr(), packed.data_ptr(), *parameters, n, inner, c.zero.numel())
    return packed


def dequantize(packed: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int, out: Tensor) -> None:
    """Write the dequantized codes to the dense tensor `out`."""
    if not serves(out):
        return reference.dequantize(packed, scale, shift, inner, bits, out)
    n = out.numel()
    if out.dtype not in KINDS:
        single = torch.empty(n, dtype=torch.float32, device=out.device)
        dequantize(packed, scale, shift, inner, bits, single)
        flat(out).copy_(single)
        return
    packed, c = aligned(packed), quant_params(scale, shift, bits)
    parameters = (c.origin.data_ptr(), c.step.data_ptr(), c.zero.data_ptr())
    launch("dequantize", out, bits, n, packed.data_ptr(), out.data_ptr(), *parameters, n, inner, c.zero.numel())


def launch(
    name: str, like: Tensor, bits: int, elements: int, *arguments: int, per_block: int = ELEMENTS_PER_BLOCK
) -> None:
    """Run a kernel for the dtype of `like` on its device, `per_block` elements a block."""
    if elements:
        _kernel(name, name_of(like.dtype), bits, like.get_device()).launch(-(-elements // per_block), *arguments)


@cache
def _kernel(name: str, dtype: str, bits: int, device: int) -> Loaded:
    return loaded(fixed_point_source(dtype, bits), name, device)
