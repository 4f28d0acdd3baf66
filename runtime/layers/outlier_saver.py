"""The codes of V-Quant (Section 4.1): the saver of its layers, and one copy of them for a ReLU and the layer after it.

    y = relu(x); leave(y, codes)          ...          found(y) is codes, and found(y.flatten(1)) their view

The codes are an attribute of the output tensor. They are freed with it, unless a backward pass saved them, and are
invalid once it has been changed in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..quantizers import Compressed, Outlier, OutlierCompressed
from ..tensors.spec import TensorSpec, as_dense
from .saver import QuantizerSaver, Saver

# ---- sharing ---------------------------------------------------------------------------------------------------------

# Compiled code attaches parts, and neither finds what the other left: a graph may end between two layers.
_CODES, _PARTS, _HANDLES = "_fewbit_codes", "_fewbit_parts", "_fewbit_handles"


def leave(y: Tensor, codes: OutlierCompressed) -> None:
    """Attach `codes`, of all elements of the dense tensor `y`, for the next layer that saves `y` or a view of it."""
    if is_compiling():
        _attach(y, *_parts_of(codes), codes.quantizer.bits)
    else:
        setattr(y, _CODES, (codes, y._version))


def found(x: Tensor) -> OutlierCompressed | None:
    """Return the codes attached to `x` or to the base of the view `x`; None if there are none.

    A view shares them if it contains every element once: codes are in memory order, whatever the shape.
    """
    if is_compiling():
        bits = _bits_attached(x).shape[0]
        whole = bits > 0 and as_dense(x) is x
        return OutlierCompressed(Outlier(bits, relu=True), TensorSpec.of(x), *_attached(x)) if whole else None
    for tensor in (x, x._base):
        codes, version = getattr(tensor, _CODES, (None, None))
        if tensor is None or codes is None:
            continue
        same = version == x._version and tensor.numel() == x.numel() and tensor.dtype == x.dtype
        if same and as_dense(x) is x:
            return codes if codes.form == TensorSpec.of(x) else of_form(codes, x)
    return None


def of_form(codes: OutlierCompressed, x: Tensor) -> OutlierCompressed:
    """Return `codes` in the form of the dense tensor `x` of the same memory."""
    return OutlierCompressed(codes.quantizer, TensorSpec.of(x), *_parts_of(codes))


def _parts_of(codes: OutlierCompressed) -> tuple[Tensor, ...]:
    return codes.packed, codes.counts, codes.offsets, codes.values, codes.levels


# ---- in compiled code ------------------------------------------------------------------------------------------------
#
# Dynamo sees neither views nor changes in place. The functions below stand in its graph as they are: they see the
# tensors of each stage, first without values, then those that autograd traces. What Dynamo has to know is the size of a
# tensor, for sizes are constants while it traces.


@torch.compiler.allow_in_graph
def _attach(y: Tensor, *parts_and_bits: Any) -> Tensor:
    """Attach the parts of RV-Quant's codes, and their bits, to `y`."""
    setattr(y, _PARTS, (parts_and_bits, y._version))
    return torch.empty(0, device="meta")


@torch.compiler.allow_in_graph
def _bits_attached(x: Tensor) -> Tensor:
    """Return a tensor of as many elements as the codes attached to all elements of `x` have bits, or of none."""
    codes, version = _found_attached(x)
    return torch.empty(codes[-1] if codes and version == x._version else 0, device="meta")


@torch.compiler.allow_in_graph
def _attached(x: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of the codes attached to `x`."""
    return tuple(part.view_as(part) for part in _found_attached(x)[0][:-1])


@torch.compiler.allow_in_graph
def first_handle(x: Tensor, handle: Tensor, way: int) -> Tensor:
    """Return the first handle that a layer of this graph attached to `x` unchanged: `handle` if none did.

    Args:
        x: input of the layer.
        handle: of its saver.
        way: number of the way in which the layer compresses it: others have handles of their own.
    """
    handles, version = getattr(x, _HANDLES, ({}, x._version))
    handles = {way: handle} | (handles if version == x._version else {})
    setattr(x, _HANDLES, (handles, x._version))
    return handles[way].clone()


def _found_attached(x: Tensor) -> tuple[tuple[Any, ...], int]:
    for tensor in (x, x._base):
        if tensor is not None and hasattr(tensor, _PARTS):
            same = tensor.numel() == x.numel() and tensor.dtype == x.dtype
            return getattr(tensor, _PARTS) if same else ((), 0)
    return (), 0


# ---- the saver -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutlierSaver(QuantizerSaver):
    """Saves the codes attached by the ReLU before, or else those of `quantizer`.

    Attributes:
        quantizer: for inputs from other modules, so with ``relu=False``.
    """

    quantizer: Outlier

    def with_codes_of(self, x: Tensor, way: int) -> Saver:
        """Return a saver of `x` alone that has found its codes, for a compiler, which does not find them later."""
        codes = found(x)
        if codes is None and self.quantizer.sample_every > 1:  # sizes that depend on values are known outside functions
            codes = self.quantizer.compress(x)
        return self if codes is None else _Found(codes)

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` in few bits."""
        codes = None if is_compiling() else found(x)
        return super().compress(x) if codes is None else codes

    def __str__(self) -> str:
        return f"V-Quant(bits={self.quantizer.bits}, ratio={self.quantizer.ratio})"


@dataclass(frozen=True)
class _Found(Saver):
    """The saver of one tensor whose codes exist."""

    codes: OutlierCompressed

    def compress(self, x: Tensor) -> Compressed:
        """Return the codes of `x`."""
        return of_form(self.codes, x)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Learn nothing."""
