"""Records the tensors passed to a model: its caller holds the batch until the backward pass, whatever the layers save.

    note_inputs(model)          starts to record the tensors that `model` is called with
    is_callers(x)               whether `x` is one of these, or a view of one
    forget_inputs(model)        stops recording

V-Quant saves the input of the network exactly for that reason; a compressed copy would only add memory. The storages
of tensors without a gradient function are recorded: batches, and leaves that require a gradient. Tensors that a frozen
layer computes inside the model are not recorded, and are compressed. A record lasts as long as its storage, not only
while the model runs, because a checkpoint runs parts of the model again in the backward pass and must save the same
tensors there. Records keep no memory alive.

If the caller drops its batch while the graph is alive, memory is lost: autograd then holds the batch itself, as in
exact training. In a compiled model nothing is recorded, and the input is compressed like any other tensor.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

__all__ = ["forget_inputs", "is_callers", "note_input", "note_inputs"]

_MOST_DEAD = 64  # entries of freed storages at which they are cleared


class _Storages:
    """The living storages that callers have passed, by identity."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}  # a weak reference prevents reuse of the identity
        self._next = _MOST_DEAD
        self._lock = threading.Lock()

    def add(self, x: Tensor) -> None:
        """Record the storage of `x`."""
        storage = x.untyped_storage()
        with self._lock:
            if storage._cdata not in self._known:
                self._known[storage._cdata] = StorageWeakRef(storage)
            if len(self._known) > self._next:
                self._known = {key: known for key, known in self._known.items() if not known.expired()}
                self._next = 2 * len(self._known) + _MOST_DEAD

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._known


_callers = _Storages()


def is_callers(x: Tensor) -> bool:
    """Return whether `x` is a tensor that a caller passed to a converted model, or a view of one."""
    return _has_storage(x) and x in _callers


def note_input(x: Tensor) -> None:
    """Record a tensor as one that a caller passed."""
    _callers.add(x)


def note_inputs(model: nn.Module) -> None:
    """Start to record the tensors that `model` is called with, at any depth of its arguments."""
    if isinstance(model, nn.TransformerEncoderLayer):
        return  # a hook would make torch take another path in evaluation, with other bits
    if not _hooks_of(model):
        model.register_forward_pre_hook(_note, with_kwargs=True)


def forget_inputs(model: nn.Module) -> None:
    """Undo `note_inputs` for `model` and all modules in it."""
    for module in model.modules():
        for key in _hooks_of(module):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _hooks_of(module: nn.Module) -> list[int]:
    return [key for key, hook in module._forward_pre_hooks.items() if hook is _note]


def _note(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Record the arguments of a forward pass that may save tensors."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and x.grad_fn is None and x.is_floating_point() and _has_storage(x):
            _callers.add(x)


def _has_storage(x: Tensor) -> bool:
    return x.layout == torch.strided and not is_functorch_wrapped_tensor(x)
