"""The graphs around a tensor: autograd's, those of torch.compile, and CUDA's."""

import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...tables import FewbitError
from .traits import current_stream

# ---- autograd's ------------------------------------------------------------------------------------------------------

# Modules that call a function twice: torch's checkpoint and ours. They save its inputs, to compute it again from.
CHECKPOINTS = ("torch.utils.checkpoint", f"{__name__.rsplit('.', 2)[0]}.saved.recompute")


def in_backward() -> bool:
    """Return whether a backward pass is running: a forward pass in it is a checkpoint's, which has to save the same."""
    return torch._C._current_graph_task_id() != -1  # the test of torch's own checkpoint


def in_checkpoint() -> bool:
    """Return whether the caller runs within a checkpoint, torch's or ours, the first time or again.

    It counts what is saved, both times. (Its hooks tell of it too, which torch 2.6 and 2.7 do not show.)
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


# Casts of one tensor are recognized by the graph. peft casts the input of each adapter to the adapter's dtype: where a
# model is in bfloat16 and its adapters in float32, query, key and value get three tensors of the same values, which
# are saved once.
_CAST = "ToCopyBackward0"
# Nodes of functions that keep the order of elements, each element once.
_IN_ORDER = frozenset((_CAST, "AliasBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"))
_LEAF = "torch::autograd::AccumulateGrad"
_TOKEN = "fewbit"


def cast_source(x: Tensor) -> tuple[Any, int] | None:
    """Return the node, and the number of its output, whose values `x` has, cast to another dtype or device.

    The shape may be another, the order of elements is the same. None if `x` is no cast, or has no history.
    """
    node = (x if x._base is None or x.grad_fn is not None else x._base).grad_fn
    number, is_cast = 0, False
    while node is not None and node.name() in _IN_ORDER and node.next_functions:
        is_cast |= node.name() == _CAST
        node, number = node.next_functions[0]
    return (node, number) if is_cast and node is not None else None


def memory_key(x: Tensor) -> tuple[Any, ...]:
    """Return a key that equals that of another tensor while both show the same unchanged memory, on one stream."""
    place = (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.is_neg())
    return (*place, x.dtype, x._version, current_stream(x))


def cast_key(x: Tensor) -> tuple[Any, ...] | None:
    """Return a key that equals that of another cast, of `x`'s shape, strides and dtype, if their values are equal.

    It differs between streams. It keeps neither tensors nor the graph alive. None if `x` is no cast that another one
    could equal.
    """
    found = cast_source(x)
    if found is None:
        return None
    node, number = found
    if node.name() == _LEAF:
        leaf = node.variable
        # Not its address, which the memory of a later step's leaf may have: a reference, even a weak one, keeps it.
        source = (StorageWeakRef(leaf.untyped_storage()), leaf.storage_offset(), leaf._version)
    else:
        source = (node.metadata.setdefault(_TOKEN, object()), number)
    return (*source, x.shape, x.stride(), x.storage_offset(), x.dtype, x._version, current_stream(x))


# ---- CUDA's: what lasts is made before one is captured, and outside the memory of graphs -----------------------------


def is_capturing(device: int | None = None) -> bool:
    """Return whether torch's current stream of a device, by default the current one, records a CUDA graph."""
    if not torch.cuda.is_available():
        return False
    if device is None or device == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_no_capture(what: str, device: int | None) -> None:
    """Raise FewbitError while a CUDA graph is captured, there or here: what is first used takes work of the host."""
    if is_capturing() or is_capturing(device):
        raise FewbitError(f"{what} is first used while a CUDA graph is captured: warm up first, by a step before it")


def to_last(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on a device, for a cache.

    On a GPU it is copied in a thread of its own: what this one allocates may lie in the memory of a CUDA graph that is
    warmed up, which the graph's replays overwrite.

    Raises:
        FewbitError: a CUDA graph is being captured.
    """
    if device.type != "cuda":
        return x.to(device)
    check_no_capture("a table on the GPU", device.index)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(x.to, device).result()


# ---- torch.compile's -------------------------------------------------------------------------------------------------
#
# Tensors stand for objects in compiled graphs, whose ops take no objects. As an input of a graph a tensor is another in
# each call: a number would be a constant, and each layer a graph of its own.

_objects: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def new_handle(target: Any) -> Tensor:
    """Return a handle of `target`, int64 (1,) on the CPU: a number, in the order in which objects get theirs.

    It keeps nothing alive, and a copy of an object needs one of its own.
    """
    number = next(_numbers)
    _objects[number] = target
    return torch.tensor([number], device="cpu")


def by_handle(handle: Tensor) -> Any:
    """Return the object of a handle; None if it is gone."""
    return _objects.get(int(handle))
