"""The storages of a tensor."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of `tensor`: itself, unless it is sparse or wraps others."""
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from parts_of(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.strided:
        yield tensor


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the numbers of `tensor`, of all its parts."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def identity_of(tensor: Tensor) -> int:
    """Return an id of the tensor's storage, equal for tensors sharing it; data addresses are 0 on the meta device."""
    return tensor.untyped_storage()._cdata
