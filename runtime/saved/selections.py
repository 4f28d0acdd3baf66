"""Which elements are the result: the mask of them is kept, and x̂ is equal to the result there and nowhere else."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .kinks import beside, on_sides

BY_RESULT = {"amax": 1, "amin": -1, "max": 1, "min": -1, "median": 0, "nanmedian": 0}


def by_result(call: Call) -> Any:
    """Reductions whose gradient goes to the elements that are equal to the result."""
    if not call.saves or not call.x.is_floating_point():
        return call.run()
    x, dims = call.x, call.argument("dim")
    dims = [*range(x.dim())] if dims is None or dims == [] else ([dims] if isinstance(dims, int) else [*dims])
    keeps = bool(call.argument("keepdim"))
    if not call.is_again:
        result = call.run()
        call.decide(x == _with_dims(result, dims, x, keeps))
        return result
    mask = call.decide(None, x.shape)
    value, moved = _equal_there(x, mask, dims, BY_RESULT[call.name])
    call.move(x, moved)
    return value if keeps else (value.squeeze(dims) if value.dim() and dims else value)


def _equal_there(x: Tensor, mask: Tensor, dims: list[int], sign: int) -> tuple[Tensor, Tensor]:
    """Return the mean of `x` where the mask is, and `x` with it there and nowhere else."""
    count = mask.sum(dims, keepdim=True) if dims else mask.to(torch.int64)
    total = torch.where(mask, x, 0)
    value = (total.sum(dims, keepdim=True) if dims else total) / count
    value = value.to(x.dtype)
    down, up = beside(value, x)
    if sign > 0:
        others = torch.minimum(x, down)
    elif sign < 0:
        others = torch.maximum(x, up)
    else:
        others = torch.where(x == value, up, x)
    return value, torch.where(mask, value, others)


def _with_dims(result: Tensor, dims: Sequence[int], x: Tensor, keeps: bool) -> Tensor:
    if keeps or not x.dim():  # a number has dimension 0 or -1 where one is asked for, and nothing to reduce
        return result
    for dim in sorted(d % x.dim() for d in dims):
        result = result.unsqueeze(dim)
    return result


def both_extremes(call: Call) -> Any:
    """`aminmax`."""
    if not call.saves:
        return call.run()
    x, dim, keeps = call.x, call.argument("dim"), bool(call.argument("keepdim"))
    dims = [*range(x.dim())] if dim is None else [dim]
    result = call.run()
    masks = [call.decide(x == _with_dims(extreme, dims, x, keeps), x.shape) for extreme in result]
    if not call.is_again:
        return result
    low, moved = _equal_there(x, masks[0], dims, -1)
    high, moved = _equal_there(moved, masks[1], dims, 1)
    call.move(x, torch.where(masks[0], low, moved))
    return type(result)([v if keeps else (v.squeeze(dims) if v.dim() and dims else v) for v in (low, high)])


def norm(call: Call) -> Any:
    """Norms: of order 1 by signs, of infinite order by the greatest magnitude."""
    order = float(call.argument("ord"))
    if not call.saves or not call.x.is_floating_point() or order not in (1.0, math.inf, -math.inf):
        return call.run()
    x = call.x
    if order == 1:
        return call.run(call.move(x, on_sides(call, x, [("gt", 0), ("lt", 0)])))
    if order < 0:  # the smallest magnitude may lie on the other side of 0
        x = on_sides(call, x, [("lt", 0)])
    dims = call.argument("dim")
    dims = [*range(x.dim())] if not dims else [*dims]
    result, keeps = call.run(), bool(call.argument("keepdim"))
    mask = call.decide(lambda: x.abs() == _with_dims(result, dims, x, keeps), x.shape)
    if not call.is_again:
        return result
    _, moved = _equal_there(x.abs().clamp(min=torch.finfo(x.dtype).tiny), mask, dims, 1 if order > 0 else -1)
    return call.run(call.move(call.x, torch.copysign(moved, x)))


def scattered(call: Call) -> Any:
    """`scatter_reduce` and `index_reduce` with the greatest or the smallest number of each cell."""
    x, dim, index, source, reduce = call.args[:5]
    if not call.saves or reduce not in ("amax", "amin"):
        return call.run()
    if x.untyped_storage()._cdata == source.untyped_storage()._cdata:  # one tensor cannot be moved in two ways
        return by_operands(call)
    whole = index.dim() == source.dim() and call.name == "scatter_reduce"
    part = source[tuple(slice(n) for n in index.shape)] if whole else source  # of more numbers the first are taken
    at = lambda cells: cells.gather(dim, index) if whole else cells.index_select(dim, index)  # noqa: E731
    if not call.is_again:
        before = x.clone() if call.in_place else x
        result = call.run()
        call.decide(before == result)
        call.decide(part == at(result))
        return result
    own, theirs = call.decide(None, x.shape), call.decide(None, part.shape)
    none = math.inf if reduce == "amin" else -math.inf
    reduced = getattr(torch, call.name)
    best = reduced(torch.where(own, x, none), dim, index, torch.where(theirs, part, none), reduce)
    moved = source.clone()
    moved[tuple(slice(n) for n in part.shape)] = _beyond(part, theirs, at(best), reduce)
    call.replace(source, moved)
    return call.run(call.move(x, _beyond(x, own, best, reduce)), dim, index, moved)


def _beyond(x: Tensor, mask: Tensor, best: Tensor, reduce: str) -> Tensor:
    """Return `best` where the mask is, and elsewhere `x`, which does not reach it."""
    down, up = beside(best, x)
    return torch.where(mask, best, torch.minimum(x, down) if reduce == "amax" else torch.maximum(x, up))


# Operators that compare numbers within them, and what is said of those that do not: an argument and its values.
COMPARED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "_cdist_forward": ("p", (2,)),
    "_pdist_forward": ("p", (2,)),
    "dist": ("p", (2,)),
    "segment_reduce": ("reduce", ("sum", "mean", "prod")),
    "multi_margin_loss": ("p", (2,)),
    "multilabel_margin_loss_forward": ("", ()),
}


def by_operands(call: Call) -> Any:
    """Operators that compare numbers within them: their operands are kept as they are."""
    name, smooth = COMPARED.get(call.name, ("", ()))
    if not call.saves or call.argument(name) in smooth:
        return call.run()
    kept = list(call.args)
    for index, x in enumerate(call.args):
        if isinstance(x, Tensor) and x.is_floating_point():
            kept[index] = call.decide(lambda x=x: x, x.shape)
    if not call.is_again:
        return call.run()
    for x, exact in zip(call.args, kept, strict=True):
        if exact is not x:
            call.replace(x, exact)
    call.mode.again.stop()  # pyright: ignore[reportOptionalMemberAccess]
    return call.run(*kept)
