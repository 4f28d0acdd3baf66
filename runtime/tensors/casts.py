"""Recognizes casts of one tensor, by the graph of autograd.

peft casts the input of each adapter to the adapter's dtype: where a model is in bfloat16 and its adapters in float32,
query, key and value get three tensors of the same values. They are saved once.
"""

from typing import Any

from torch import Tensor

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


def cast_key(x: Tensor) -> tuple[Any, ...] | None:
    """Return a key that equals that of another cast, of `x`'s shape, strides and dtype, if their values are equal.

    The key keeps neither tensors nor the graph alive. None if `x` is no cast that another one could equal.
    """
    found = cast_source(x)
    if found is None:
        return None
    node, number = found
    if node.name() == _LEAF:
        leaf = node.variable
        source = (leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf._version)
    else:
        source = (node.metadata.setdefault(_TOKEN, object()), number)
    return (*source, x.shape, x.stride(), x.storage_offset(), x.dtype, x._version)
