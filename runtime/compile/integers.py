"""Integers of a known range, saved in fewer bytes: places of maxima, sorted and chosen places, buckets.

limit_of(node)                      the places along a dimension of 1,000 elements are below 1,000
(y,) = narrowed(x, bits=16)         x in 8, 16 or 32 bits a number
x = widened(y, dtype=torch.int64)
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from .nodes import is_view, packet, tensor_of, value_of

aten, prims = torch.ops.aten, torch.ops.prims

NARROWED = {8: torch.int8, 16: torch.int16, 32: torch.int32}

_SECOND_RESULTS = {aten.max, aten.min, aten.topk, aten.sort, aten.kthvalue, aten.mode, aten.median, aten.cummax}
_SECOND_RESULTS |= {aten.nanmedian, aten.cummin}
_RESULTS = {aten.argmax, aten.argmin, aten.argsort}
_BOUNDARIES = {aten.bucketize: 1, aten.searchsorted: 0}  # and which argument they are
_COPIES = {aten.clone, aten._to_copy, prims.convert_element_type, aten.index, aten.gather, aten.flip, aten.roll}


def limit_of(node: fx.Node) -> int | None:
    """Return a bound that the integers of a node are below, none of them negative; None if none is known.

    Sizes that vary from call to call tell nothing.
    """
    x = tensor_of(node)
    if x is not None and x.dtype == torch.bool:
        return 2  # before it is cast
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None
    if node.target is operator.getitem:
        if packet(source) in _SECOND_RESULTS and node.args[1] == 1:
            return _size(source)
        return limit_of(source.all_input_nodes[0]) if is_view(node) else None
    if packet(node) in _RESULTS:
        return _size(node)
    if packet(node) in _BOUNDARIES:
        boundaries = tensor_of(node.args[_BOUNDARIES[packet(node)]])  # pyright: ignore[reportArgumentType]
        size: Any = None if boundaries is None else boundaries.shape[-1]
        return size + 1 if isinstance(size, int) else None
    y = tensor_of(source)
    if y is None or y.is_floating_point() or y.dtype.is_complex:
        return None
    return limit_of(source) if is_view(node) or packet(node) in _COPIES else None


def _size(node: fx.Node) -> int | None:
    """Return the size of the dimension along which an operator finds places; of all elements if it has none."""
    x = value_of(node.args[0])  # pyright: ignore[reportArgumentType]
    dimension = _argument(node, "dim")
    size: Any = x.numel() if dimension is None else x.shape[dimension] if x.dim() else 1
    return size if isinstance(size, int) else None


def _argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operator's call, or its default."""
    for place, argument in enumerate(node.target._schema.arguments):  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def narrowed(x: Tensor, *, bits: int) -> tuple[Tensor, ...]:
    """Return integers in 8, 16 or 32 bits each."""
    return (x.to(NARROWED[bits]),)


def widened(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return what `narrowed` was given, of that dtype."""
    return x.to(dtype)
