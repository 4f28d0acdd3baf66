"""Bytes that autograd keeps from forward to backward."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor


def kept_bytes(run: Callable[[Tensor], Tensor], x: Tensor, without: Collection[int] = ()) -> int:
    """Return the bytes of the storages that autograd saves in `run(x)`, counting each once.

    Args:
        run: the function.
        x: its input.
        without: addresses of storages to leave out, such as those of parameters.
    """
    storages: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        run(x)
    return sum(size for address, size in storages.items() if address not in without)
