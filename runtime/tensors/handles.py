"""Tensors that stand for objects in compiled graphs, whose ops take no objects.

    handle = new_handle(saver)        int64 (1,) on the CPU: a number, in the order in which objects get theirs
    by_handle(handle) is saver

As an input of a graph a tensor is another one in each call: a number would be a constant, and each layer a graph of its
own. A handle keeps nothing alive, and a copy of an object needs one of its own.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_objects: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def new_handle(target: Any) -> Tensor:
    """Return a handle of `target`, which can be referred to weakly."""
    number = next(_numbers)
    _objects[number] = target
    return torch.tensor([number], device="cpu")


def by_handle(handle: Tensor) -> Any:
    """Return the object of a handle; None if it is gone."""
    return _objects.get(int(handle))
