"""Checks of packed parts before their addresses reach a kernel.

A kernel reads and writes as many bytes as shape and bits imply, whatever the tensors hold. So `decompress` checks the
sizes of all parts first, in constant time; parts from outside (a pickle, a file, a state_dict) have their contents
checked too, by `Unpickled` and `check_outliers`. Contents changed later give other numbers, but no access out of
bounds: kernels clamp every index they read.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from .packing import Rows, aligned_sizes, most_bytes, packed_size
from .spec import is_dense
from .traits import DTYPES, name_of


class Unpickled:
    """Mixin of dataclasses: unpickling and copying go through the constructor, which validates."""

    def __setstate__(self, state: Any) -> None:
        kind: Any = type(self)
        names = [field.name for field in fields(kind) if field.init]
        given = state if isinstance(state, dict) else {}
        own = {field.name for field in fields(kind)}
        try:
            if not given.keys() <= own:
                raise TypeError
            made = kind(**{name: given[name] for name in names if name in given})
        except TypeError:
            raise FewbitError(f"a pickled {kind.__name__} holds {', '.join(names)}, not {shown(state)}") from None
        vars(self).update(vars(made))
        self.check_contents()

    def check_contents(self) -> None:
        """Raise FewbitError if the parts do not fit each other; the default checks nothing."""


def check_form(owner: str, form: Any) -> int:
    """Return the number of elements of `form`; raise FewbitError if it is not the spec of a dense tensor."""
    shape, stride = getattr(form, "shape", None), getattr(form, "stride", None)
    if (
        not isinstance(shape, torch.Size)
        or not isinstance(stride, tuple)
        or len(shape) != len(stride)
        or not all(type(step) is int and step >= 0 for step in stride)
        or form.dtype not in DTYPES
        or not isinstance(form.device, torch.device)
        or not is_dense(shape, stride)
    ):
        raise FewbitError(f"{owner}: the form is that of a dense floating-point tensor, not {shown(form)}")
    return math.prod(shape)  # torch's own product overflows


def check_part(
    owner: str, name: str, part: Any, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise FewbitError unless `part` is a row-major tensor of this dtype and shape on this device."""
    if (
        not isinstance(part, Tensor)
        or part.dtype is not dtype
        or part.shape != shape
        or part.device != device
        or part.layout is not torch.strided
        or not part.is_contiguous()
    ):
        raise FewbitError(f"{owner}: {name} is {name_of(dtype)} {tuple(shape)} on {device}, not {shown_part(part)}")


def check_packed(owner: str, packed: Any, n: int, bits: Any, device: torch.device) -> None:
    """Raise FewbitError unless `packed` has the dtype and size of `n` packed codes of `bits` bits, 1 to 8."""
    check_bits(owner, bits)
    check_part(owner, "packed", packed, torch.uint8, (packed_size(n, bits),), device)


def check_bits(owner: str, bits: Any, least: int = 1) -> None:
    """Raise FewbitError unless `bits` is an integer from `least` to 8."""
    if type(bits) is not int or not least <= bits <= 8:
        raise FewbitError(f"{owner}: bits are an integer from {least} to 8, not {shown(bits)}")


def shown_part(part: Any) -> str:
    """Return dtype, shape, device and layout of a tensor for a message; the `repr` of anything else."""
    if not isinstance(part, Tensor):
        return shown(part)
    gaps = "" if part.layout is not torch.strided or part.is_contiguous() else f" with stride {part.stride()}"
    layout = "" if part.layout is torch.strided else f" in the layout {name_of(part.layout)}"
    return f"{name_of(part.dtype)} {tuple(part.shape)} on {part.device}{gaps}{layout}"


def has_values(*tensors: Tensor) -> bool:
    """Return whether all `tensors` have values: none is a meta or fake one."""
    return all(type(t) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not t.is_meta for t in tensors)


# ---- the parts of each quantizer -------------------------------------------------------------------------------------


def check_groups(
    owner: str,
    rows: tuple[int, int],
    bits: int | Tensor,
    parts: tuple[Any, Any, Any],
    group_size: Any,
    device: torch.device,
) -> None:
    """Raise FewbitError unless `parts` are packed codes, minima and ranges of `PerGroup`.

    Args:
        owner: name in the message.
        rows: N samples of D elements.
        bits: of all samples, or of each: uint8 (N,). Their values are looked at on the CPU alone: kernels of other
            devices read nothing beyond the codes.
        parts: packed, minimum, range.
        group_size: G.
        device: of all parts.
    """
    N, D = rows
    if type(group_size) is not int or group_size < 1:
        raise FewbitError(f"{owner}: group_size is an integer not below 1, not {shown(group_size)}")
    groups = -(-D // max(1, min(group_size, D)))
    if isinstance(bits, Tensor):
        check_part(owner, "bits", bits, torch.uint8, (N,), device)
        room = parts[0].numel() if isinstance(parts[0], Tensor) else 0
        if device.type == "cpu" and has_values(bits):
            values = bits.detach().numpy().astype(np.int64)
            if N and not (values.min() >= 1 and values.max() <= 8):
                raise FewbitError(f"{owner}: the bits of each sample are from 1 to 8, not {shown(bits.tolist())}")
            least = int(aligned_sizes(values, Rows(N, D, bits).width).sum())
            most = most_bytes(N, D, int(values.sum()))
            room = min(max(room, least), most)
        shape = (room,)
    else:
        check_bits(owner, bits)
        shape = (N, packed_size(D, bits))
    check_part(owner, "packed", parts[0], torch.uint8, shape, device)
    for name, part in (("minimum", parts[1]), ("range", parts[2])):
        check_part(owner, name, part, torch.bfloat16, (N, groups), device)


def check_channels(owner: str, form: Any, scale: Any, shift: Any, channel_dim: Any) -> None:
    """Raise FewbitError unless `scale` and `shift` have one number for each channel of `form`."""
    dimensions = len(form.shape)
    if type(channel_dim) is not int or not -dimensions <= channel_dim < dimensions:
        raise FewbitError(
            f"{owner}: channel_dim is a dimension of a {dimensions}-dimensional tensor, not {shown(channel_dim)}"
        )
    C = form.shape[channel_dim]
    for name, vector in (("scale", scale), ("shift", shift)):
        right = isinstance(vector, Tensor) and vector.is_floating_point() and vector.layout is torch.strided
        if not right or vector.shape != (C,) or vector.device != form.device:
            raise FewbitError(f"{owner}: {name} is floating-point ({C},) on {form.device}, not {shown_part(vector)}")


def check_outlier_parts(owner: str, n: int, block: int, form: Any, quantizer: Any, parts: Sequence[Any]) -> None:
    """Raise FewbitError unless `parts` have the sizes and dtypes that `Outlier` makes of `n` elements.

    Args:
        owner: name in the message.
        n: number of elements.
        block: number of elements in a block of positions.
        form, quantizer: of the compressed tensor.
        parts: packed, counts, offsets, values, levels.
    """
    packed, counts, offsets, values, levels = parts
    device = form.device
    check_packed(owner, packed, n, quantizer.bits, device)
    check_part(owner, "counts", counts, torch.uint8, (-(-n // block),), device)
    k = offsets.numel() if isinstance(offsets, Tensor) else -1
    if not torch.compiler.is_compiling() and k > n:  # a compiler does not know them
        raise FewbitError(f"{owner}: of {n} elements no {k} are outliers")
    check_part(owner, "offsets", offsets, torch.uint8, (k,), device)
    dtype = quantizer.value_dtype or (torch.float32 if form.dtype == torch.float64 else form.dtype)
    check_part(owner, "values", values, dtype, (k,), device)
    check_part(owner, "levels", levels, torch.float32, (2,), device)


def check_outliers(owner: str, n: int, block: int, counts: Tensor, offsets: Tensor) -> None:
    """Raise FewbitError unless `counts` and `offsets` are positions of outliers among `n` elements."""
    if not n or not has_values(counts, offsets):
        return
    total = int(counts.sum(dtype=torch.int64))
    if total != offsets.numel():
        raise FewbitError(f"{owner}: counts add up to {total} outliers, and there are {offsets.numel()} offsets")
    lengths = torch.full(counts.shape, block, device=counts.device)
    lengths[-1] = n - block * (counts.numel() - 1)
    if bool((counts > lengths).any()):
        raise FewbitError(f"{owner}: a block of {block} elements counts more outliers than that")
    blocks = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts.int())
    if bool((offsets >= lengths[blocks]).any()):
        raise FewbitError(f"{owner}: an offset lies outside its block of {block} elements")
    positions = blocks * block + offsets
    if bool((positions[1:] <= positions[:-1]).any()):
        raise FewbitError(f"{owner}: the offsets in a block of {block} elements do not increase")
