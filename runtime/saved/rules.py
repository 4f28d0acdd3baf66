"""What operators decide, a rule for each kind: what the first time keeps, and the second takes over (decisions.py).

A rule is a function of a call: it returns the operator's result, and records or takes over what is decided.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..tensors.traits import tensors_among

# ---- a call of an operator, as its rule sees it ----------------------------------------------------------------------


class Again(Protocol):
    """The second time that a call is computed."""

    deferred: bool

    def begin(self) -> None:
        """Note that another operation begins."""
        ...

    def replace(self, x: Tensor, value: Tensor, copied: bool) -> None:
        """Let `value` be what the running operation saved of its input `x`, or of a copy of it."""
        ...

    def stop(self) -> None:
        """End the call if all that its backward pass needs is there."""
        ...


@dataclass(frozen=True)
class Call:
    """A call of an operator of torch, below autograd.

    Attributes:
        name: of the operator, without the underscore of what works in place.
        function: the operator.
        args, kwargs: its arguments.
        again: the second time, None in the first.
        exact: memory of tensors that are the same both times.
        take: (function, value, most, shape) -> what the first call decided: `value`, or what it returns.
    """

    name: str
    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    again: Again | None
    exact: frozenset[int]
    take: Callable[..., Any]

    @property
    def x(self) -> Tensor:
        """The first argument."""
        return self.args[0]

    @property
    def in_place(self) -> bool:
        """Whether the first argument is changed."""
        return self.function._schema.name.endswith("_")

    @property
    def saves(self) -> bool:
        """Whether autograd decides by a rounded tensor in the backward pass."""
        return torch.is_grad_enabled() and not self.is_exact and any(t.requires_grad for t in self.tensors())

    @property
    def is_exact(self) -> bool:
        """Whether all its floating-point numbers, if there are any, are the same both times."""
        return all(
            isinstance(t, nn.Parameter) or (t.layout == torch.strided and t.untyped_storage()._cdata in self.exact)
            for t in self.tensors()
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors of floating-point and complex numbers among the arguments."""
        found = tensors_among(*self.args, self.kwargs)
        return [t for t in found if t.is_floating_point() or t.is_complex()]

    def argument(self, name: str) -> Any:
        """Return an argument by name, whether it was given so, by position, or not at all."""
        for index, argument in enumerate(self.function._schema.arguments):
            if argument.name == name:
                given = self.args[index] if index < len(self.args) else self.kwargs.get(name)
                return argument.default_value if given is None else given
        return None

    def run(self, *args: Any) -> Any:
        """Return the operator's result, of other arguments in place of the first ones."""
        return self.function(*args, *self.args[len(args) :], **self.kwargs)

    @property
    def is_again(self) -> bool:
        """Whether this is the second time."""
        return self.again is not None

    def decide(self, value: Any, shape: torch.Size | None = None, most: int | None = None) -> Any:
        """Return what was decided the first time: `value`, or what it returns."""
        return self.take(self.name, value, most, shape)

    def move(self, x: Tensor, moved: Tensor) -> Tensor:
        """Let `moved` be what the operation takes, and saves, in place of its argument `x`; return it."""
        again = self.again
        if again is None:
            return x
        draws = self.name == "rrelu_with_noise"  # which fills the noise that is saved; in place it saves no input
        if not (draws and self.in_place):
            again.replace(x, moved, copied=self.in_place)
        if self.function._schema.is_mutable or draws:
            return x.copy_(moved) if self.in_place and x is self.args[0] else moved
        again.stop()
        return moved

    def replace(self, x: Tensor, value: Tensor) -> None:
        """Let `value` be what the operation saves of one of several arguments, before `move` of the last."""
        if self.again is not None:
            self.again.replace(x, value, copied=False)


# ---- kinks, comparisons and jumps: x̂ is moved to the side, or into the step, in which the first call found x --------

Side = tuple[str, Any]  # a comparison, and the number or tensor with which x is compared


def _bounds(call: Call) -> list[Side]:
    low, high = call.argument("min"), call.argument("max")
    return [*([] if low is None else [("ge", low)]), *([] if high is None else [("le", high)])]


# The comparisons by which the derivative of torch decides.
KINKS: dict[str, Callable[[Call], list[Side]]] = {
    "leaky_relu": lambda _: [("gt", 0)],
    "_prelu_kernel": lambda _: [("gt", 0)],
    "elu": lambda _: [("le", 0)],
    "rrelu_with_noise": lambda _: [("le", 0)],
    "abs": lambda _: [("gt", 0), ("lt", 0)],
    "threshold": lambda call: [("le", call.argument("threshold"))],
    "hardtanh": lambda call: [("le", call.argument("min_val")), ("ge", call.argument("max_val"))],
    "hardswish": lambda _: [("lt", -3), ("le", 3)],
    "hardsigmoid": lambda _: [("gt", -3), ("lt", 3)],
    "softshrink": lambda call: [("ge", -call.argument("lambd")), ("le", call.argument("lambd"))],
    "hardshrink": lambda call: [("ge", -call.argument("lambd")), ("le", call.argument("lambd"))],
    "logit": lambda call: [("ge", eps), ("le", 1 - eps)] if (eps := call.argument("eps")) is not None else [],
    "clamp": _bounds,
    "clamp_min": _bounds,
    "clamp_max": _bounds,
}


def by_kinks(call: Call) -> Any:
    """Functions of one number with kinks."""
    if not call.saves or not call.x.is_floating_point():
        return call.run()
    return call.run(call.move(call.x, on_sides(call, call.x, KINKS[call.name](call))))


def on_sides(call: Call, x: Tensor, sides: Sequence[Side]) -> Tensor:
    """Return `x`, on the sides on which the first call found it, in the shape in which it is compared."""
    shape = torch.broadcast_shapes(x.shape, *(bound.shape for _, bound in sides if isinstance(bound, Tensor)))
    moved = x = x.expand(shape)
    for comparison, bound in sides:
        compare = getattr(torch, comparison)
        mask = call.decide(lambda compare=compare, bound=bound: compare(x, bound), shape)
        if not call.is_again:
            continue
        # The numbers nearest to x̂ for which the comparison gives the mask.
        down, up = beside(bound, x)
        if comparison in ("gt", "ge"):
            least, most = (up, bound) if comparison == "gt" else (bound, down)
            moved = torch.where(mask, _at_least(moved, least), _at_most(moved, most))
        else:
            least, most = (bound, down) if comparison == "lt" else (up, bound)
            moved = torch.where(mask, _at_most(moved, most), _at_least(moved, least))
    return moved


def beside(bound: Any, x: Tensor) -> tuple[Any, Any]:
    """Return a number below `bound` and one above it, which stay so in the dtype of `x`."""
    info = torch.finfo(x.dtype)
    if isinstance(bound, Tensor):
        step = (2 * info.eps * bound.abs()).clamp(min=info.tiny)
        return bound - step, bound + step
    step = max(2 * info.eps * abs(bound), info.tiny)  # not a subnormal, which some processors take for 0
    return bound - step, bound + step


def _at_least(x: Tensor, bound: Any) -> Tensor:
    return torch.maximum(x, bound.to(x.dtype)) if isinstance(bound, Tensor) else x.clamp(min=bound)


def _at_most(x: Tensor, bound: Any) -> Tensor:
    return torch.minimum(x, bound.to(x.dtype)) if isinstance(bound, Tensor) else x.clamp(max=bound)


def relu(call: Call) -> Any:
    """ReLU, whose derivative torch takes from its result."""
    if not call.saves or not call.x.is_floating_point():
        return call.run()
    negative = call.decide(lambda: call.x <= 0, call.x.shape)
    if not call.is_again:
        return call.run()
    out = call.x if call.in_place else call.x.clone()
    return out.clamp_(min=torch.finfo(out.dtype).tiny).masked_fill_(negative, 0)


def sampling(call: Call) -> Any:
    """Interpolation at the places of a grid, which is kept: beyond the edge of a cell the derivative is another one."""
    x, grid = call.args[:2]
    if not torch.is_grad_enabled() or call.is_exact:
        return call.run()
    kept = call.decide(lambda: grid, grid.shape)
    return call.run(x, call.move(grid, kept) if call.is_again else grid)


def by_comparison(call: Call) -> Any:
    """The greater or smaller of two numbers."""
    x, other = call.args[0], call.argument("other")
    if not call.saves or not (x.is_floating_point() and other.is_floating_point()):
        return call.run()
    # That of more numbers is moved; where each has some of its own, it stands for all with which it is compared.
    swap = other.requires_grad and (not x.requires_grad or other.numel() > x.numel())
    mine, theirs = (other, x) if swap else (x, other)
    moved = call.move(mine, on_sides(call, mine, [("gt", theirs), ("lt", theirs)]))
    return call.run(x, moved) if swap else call.run(moved)


SIGNED = {"copysign": 1, "atan2": 0}  # functions that jump where this argument changes its sign


def by_sign(call: Call) -> Any:
    """`copysign` and `atan2`."""
    arguments = list(call.args)
    x = arguments[SIGNED[call.name]]
    if not isinstance(x, Tensor) or not x.is_floating_point() or call.is_exact:
        return call.run()
    arguments[SIGNED[call.name]] = call.move(x, on_sides(call, x, [("lt", 0)]))
    return call.run(*arguments)


def _scale(call: Call) -> Any:
    scale, axis = call.argument("scale"), call.argument("axis")
    return scale if axis is None else scale.view([-1 if i == axis else 1 for i in range(call.x.dim())])


# Functions that jump, by how they round the number of their step, and its width.
STEPS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Call], Any]]] = {
    "remainder": (torch.floor, lambda call: call.argument("other")),
    "fmod": (torch.trunc, lambda call: call.argument("other")),
    "frac": (torch.trunc, lambda _: 1.0),
    "fake_quantize_per_tensor_affine_cachemask": (torch.round, _scale),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": (torch.round, _scale),
    "_fake_quantize_learnable_per_tensor_affine": (torch.round, _scale),
    "fake_quantize_per_channel_affine_cachemask": (torch.round, _scale),
    "_fake_quantize_learnable_per_channel_affine": (torch.round, _scale),
}
# What the step n holds, where n is a multiple of its width.
_HELD: dict[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    torch.floor: lambda n: (n, n + 1),
    torch.trunc: lambda n: (torch.where(n > 0, n, n - 1), torch.where(n < 0, n, n + 1)),
    torch.round: lambda n: (n - 0.5, n + 0.5),
}


def by_step(call: Call) -> Any:
    """Functions that jump from step to step, such as `remainder`."""
    x = call.x
    if not isinstance(x, Tensor) or not x.is_floating_point() or call.is_exact:
        return call.run()
    rounded, width_of = STEPS[call.name]
    width = width_of(call)
    near = rounded(x / width)
    low, high = _HELD[rounded](nearest_of_byte(call, near))
    if not call.is_again or near.shape != x.shape:
        return call.run()
    edges = torch.minimum(low * width, high * width), torch.maximum(low * width, high * width)
    return call.run(call.move(x, _at_most(_at_least(x, beside(edges[0], x)[1]), beside(edges[1], x)[0])))


def nearest_of_byte(call: Call, n: Tensor) -> Tensor:
    """Return, of the integers near `n`, that which has the low byte that the first call found."""
    low = lambda: torch.remainder(n.float(), 256).nan_to_num(0).to(torch.uint8)  # noqa: E731
    decided = call.decide(low, n.shape)
    if not call.is_again:
        return n
    step = torch.remainder(decided.float() - n.float() + 128, 256) - 128
    return n + step.nan_to_num(0).to(n.dtype)


# ---- selections: the mask of the result's elements is kept, and x̂ is equal to the result there and nowhere else -----

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
    call.again.stop()  # pyright: ignore[reportOptionalMemberAccess]
    return call.run(*kept)
