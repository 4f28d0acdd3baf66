"""Shares one compressed copy of a tensor: a ReLU attaches its codes to its output, and the next layer saves them too.

    y = relu(x); leave(y, codes)          ...          found(y) is codes, and found(y.flatten(1)) their view

The codes are an attribute of the output tensor. They are freed with it, unless a backward pass saved them, and are
invalid once it has been changed in place.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..quantizers import OutlierCompressed
from ..tensors.layout import as_dense
from ..tensors.spec import TensorSpec

_CODES = "_fewbit_codes"


def leave(y: Tensor, codes: OutlierCompressed) -> None:
    """Attach `codes`, of all elements of the dense tensor `y`, for the next layer that saves `y` or a view of it."""
    setattr(y, _CODES, (codes, _version_of(y)))


def found(x: Tensor) -> OutlierCompressed | None:
    """Return the codes attached to `x` or to the base of the view `x`; None if there are none.

    A view shares them if it contains every element once: codes are in memory order, whatever the shape.
    """
    for tensor in (x, x._base):
        codes, version = getattr(tensor, _CODES, (None, None))
        if tensor is None or codes is None:
            continue
        same = version == _version_of(x) and tensor.numel() == x.numel() and tensor.dtype == x.dtype
        if same and as_dense(x) is x:
            return codes if codes.form == TensorSpec.of(x) else of_form(codes, x)
    return None


def of_form(codes: OutlierCompressed, x: Tensor) -> OutlierCompressed:
    """Return `codes` in the form of the dense tensor `x` of the same memory."""
    parts = (codes.packed, codes.counts, codes.offsets, codes.values, codes.levels)
    return OutlierCompressed(codes.quantizer, TensorSpec.of(x), *parts)


def _version_of(x: Tensor) -> int:
    """Return how often `x` has changed in place."""
    return _as_long_as_version(x).shape[0] if is_compiling() else x._version


@torch.compiler.allow_in_graph
def _as_long_as_version(x: Tensor) -> Tensor:
    """Return a tensor whose size is the version of `x`: a compiler knows sizes while it traces, but not versions."""
    return torch.empty(x._version, device="meta")
