"""What each operator decides, and how the second time takes over the decision of the first (decisions.py).

A rule is a function of a call: it returns the operator's result, and records or takes over what is decided. A new
operator that decides is a line in one of the tables; integers and truth values need none.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn


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


class Decides(Protocol):
    """What records decisions, or puts those of the first time in place of the second's.

    Attributes:
        again: the second time, None in the first.
        exact: memory of tensors that are the same both times.
    """

    again: Again | None
    exact: frozenset[int]

    def decide(self, function: str, value: Any, most: int | None = None, shape: torch.Size | None = None) -> Any:
        """Return what the first call decided: `value`, or what it returns."""
        ...


@dataclass(frozen=True)
class Call:
    """A call of an operator of torch, below autograd.

    Attributes:
        name: of the operator, without the underscore of what works in place.
        function: the operator.
        args, kwargs: its arguments.
        mode: that records.
    """

    name: str
    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    mode: Decides

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
        exact = self.mode.exact
        return all(isinstance(t, nn.Parameter) or _memory(t) in exact for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors of floating-point numbers among the arguments."""
        return [t for t in _tensors([*self.args, *self.kwargs.values()]) if t.is_floating_point()]

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
        return self.mode.again is not None

    def decide(self, value: Any, shape: torch.Size | None = None, most: int | None = None) -> Any:
        """Return what was decided the first time: `value`, or what it returns."""
        return self.mode.decide(self.name, value, most, shape)

    def move(self, x: Tensor, moved: Tensor) -> Tensor:
        """Let `moved` be what the operation takes, and saves, in place of its argument `x`; return it."""
        again = self.mode.again
        if again is None:
            return x
        again.replace(x, moved, copied=self.in_place)
        if self.function._schema.is_mutable or self.name == "rrelu_with_noise":  # which fills the noise that is saved
            return x.copy_(moved) if self.in_place and x is self.args[0] else moved
        again.stop()
        return moved


def _memory(x: Tensor) -> int | None:
    return x.untyped_storage()._cdata if x.layout == torch.strided else None


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [t for t in value if isinstance(t, Tensor)]
    return found


Rule = Callable[[Call], Any]
Side = tuple[str, Any]  # a comparison, and the number or tensor with which x is compared


@cache
def rule_of(func: Any) -> Rule | None:
    """Return what is done with an operator; None if it decides nothing."""
    space, _, full = func._schema.name.partition("::")
    if space == "fewbit" or "out" in func._overloadname:
        return None
    if space != "aten":
        return _integers
    name = full.removesuffix("_")
    for rule, names in _RULES.items():
        if name in names:
            return rule
    if name in _BY_INDEX and any(argument.name == "dim" for argument in func._schema.arguments):
        return _by_index
    if name in _BY_RESULT:
        return _by_result
    if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_UNDECIDED) or name.endswith("_like"):
        return None
    return _integers


# What is drawn is drawn again; pivots belong to the factors that are computed with them.
_UNDECIDED = ("linalg_", "_linalg_", "lu_", "new_", "empty", "_cudnn", "_scaled_dot_product", "_efficient", "_flash")


def _integers(call: Call) -> Any:
    """Integers and truth values that come of floating-point numbers."""
    result = call.run()
    outputs: Any = result if isinstance(result, tuple | list) else (result,)
    decided = [t for t in outputs if isinstance(t, Tensor) and not (t.is_floating_point() or t.is_complex())]
    if not decided or call.is_exact:
        return result
    if torch.Tag.dynamic_output_shape in call.function.tags:
        return _whole(call, result)
    most = None
    if call.name in ("argmax", "argmin", "bucketize", "searchsorted"):
        whole = call.name.startswith("arg") and call.argument("dim") is None
        most = max(t.numel() if whole else max(t.shape, default=1) for t in call.tensors())
    elif call.name in _POOLING:
        most = math.prod(call.x.shape[-_POOLING[call.name] :])
    for output in decided:
        _put(call, output, most)
    if call.name in _POOLING and call.is_again:
        _take(outputs[0], call.x, outputs[1], _POOLING[call.name])
    return result


# Pooling that returns where its values come from, by the number of dimensions that this counts through.
_POOLING = {
    **dict.fromkeys(("max_pool2d_with_indices", "adaptive_max_pool2d", "fractional_max_pool2d"), 2),
    **dict.fromkeys(("max_pool3d_with_indices", "adaptive_max_pool3d", "fractional_max_pool3d"), 3),
}


def _take(values: Tensor, x: Tensor, indices: Tensor, dims: int) -> None:
    values.copy_(x.flatten(-dims).gather(-1, indices.flatten(-dims)).view(indices.shape))


_BY_INDEX = frozenset(("topk", "kthvalue", "mode", "sort", "max", "min", "median", "nanmedian", "cummax", "cummin"))


def _by_index(call: Call) -> Any:
    """Values and where they are along a dimension."""
    result = call.run()
    values, indices = result
    if call.is_exact:
        return result
    most = max(call.x.shape, default=1)
    _put(call, indices, most)
    if not call.is_again:
        return result
    dim = call.argument("dim")
    dim = -1 if dim is None else dim
    if call.x.dim() == 0 or indices.dim() == call.x.dim():
        values.copy_(call.x.gather(dim, indices))
    else:
        values.copy_(call.x.gather(dim, indices.unsqueeze(dim)).squeeze(dim))
    return result


def _whole(call: Call, result: Any = None) -> Any:
    """What is kept as it is: numbers of Python, and tensors whose shape depends on values."""
    result = call.run() if result is None else result
    if call.is_exact:
        return result
    outputs = result if isinstance(result, tuple | list) else (result,)
    decided = [call.decide(output) for output in outputs]
    return type(result)(decided) if isinstance(result, tuple | list) else decided[0]


def _by_byte(call: Call) -> Any:
    """Floating-point numbers that are integers, or 0 and 1: of those near x̂'s, the one of the same low byte."""
    if call.is_exact or (call.name == "div" and call.argument("rounding_mode") is None):
        return call.run()
    result = call.run()
    if not result.is_floating_point():
        return result if result.is_complex() else _put(call, result)
    low = lambda: torch.remainder(result.float(), 256).nan_to_num(0).to(torch.uint8)  # noqa: E731
    decided = call.decide(low, result.shape)
    if not call.is_again:
        return result
    step = torch.remainder(decided.float() - result.float() + 128, 256) - 128
    return result.add_(step.nan_to_num(0).to(result.dtype))


def _put(call: Call, result: Tensor, most: int | None = None) -> Tensor:
    """Put what was decided the first time into a result."""
    decided = call.decide(result, result.shape, most)
    return result.copy_(decided) if call.is_again else result


# ---- kinks and comparisons -------------------------------------------------------------------------------------------


def _bounds(call: Call) -> list[Side]:
    low, high = call.argument("min"), call.argument("max")
    return [*([] if low is None else [("ge", low)]), *([] if high is None else [("le", high)])]


# The comparisons by which the derivative of torch decides.
_KINKS: dict[str, Callable[[Call], list[Side]]] = {
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
    "clamp": _bounds,
    "clamp_min": _bounds,
    "clamp_max": _bounds,
}


def _by_kinks(call: Call) -> Any:
    """Functions of one number with kinks."""
    if not call.saves or not call.x.is_floating_point():
        return call.run()
    return call.run(call.move(call.x, _on_sides(call, call.x, _KINKS[call.name](call))))


def _on_sides(call: Call, x: Tensor, sides: Sequence[Side]) -> Tensor:
    """Return `x`, on the sides on which the first call found it, in the shape in which it is compared."""
    shape = torch.broadcast_shapes(x.shape, *(bound.shape for _, bound in sides if isinstance(bound, Tensor)))
    moved = x = x.expand(shape)
    for comparison, bound in sides:
        compare = getattr(torch, comparison)
        mask = call.decide(lambda compare=compare, bound=bound: compare(x, bound), shape)
        if call.is_again:
            moved = _moved(moved, comparison, bound, mask)
    return moved


def _moved(x: Tensor, comparison: str, bound: Any, mask: Tensor) -> Tensor:
    """Return the numbers nearest to `x` for which the comparison gives `mask`."""
    down, up = _beside(bound, x)
    true = {
        "gt": lambda: _at_least(x, up),
        "ge": lambda: _at_least(x, bound),
        "lt": lambda: _at_most(x, down),
        "le": lambda: _at_most(x, bound),
    }
    opposite = {"gt": "le", "le": "gt", "ge": "lt", "lt": "ge"}
    return torch.where(mask, true[comparison](), true[opposite[comparison]]())


def _beside(bound: Any, x: Tensor) -> tuple[Any, Any]:
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


def _relu(call: Call) -> Any:
    """ReLU, whose derivative torch takes from its result."""
    if not call.saves or not call.x.is_floating_point():
        return call.run()
    negative = call.decide(lambda: call.x <= 0, call.x.shape)
    if not call.is_again:
        return call.run()
    out = call.x if call.in_place else call.x.clone()
    return out.clamp_(min=torch.finfo(out.dtype).tiny).masked_fill_(negative, 0)


def _sampling(call: Call) -> Any:
    """Interpolation at the places of a grid, which is kept: beyond the edge of a cell the derivative is another one."""
    x, grid = call.args[:2]
    if not torch.is_grad_enabled() or call.is_exact:
        return call.run()
    kept = call.decide(lambda: grid, grid.shape)
    return call.run(x, call.move(grid, kept) if call.is_again else grid)


def _by_comparison(call: Call) -> Any:
    """The greater or smaller of two numbers."""
    x, other = call.args[0], call.argument("other")
    if not call.saves or not (x.is_floating_point() and other.is_floating_point()):
        return call.run()
    # That of more numbers is moved; where each has some of its own, it stands for all with which it is compared.
    swap = other.requires_grad and (not x.requires_grad or other.numel() > x.numel())
    mine, theirs = (other, x) if swap else (x, other)
    moved = call.move(mine, _on_sides(call, mine, [("gt", theirs), ("lt", theirs)]))
    return call.run(x, moved) if swap else call.run(moved)


# ---- which elements are the result -----------------------------------------------------------------------------------

_BY_RESULT = {"amax": 1, "amin": -1, "max": 1, "min": -1, "median": 0, "nanmedian": 0}


def _by_result(call: Call) -> Any:
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
    value, moved = _equal_there(x, mask, dims, _BY_RESULT[call.name])
    call.move(x, moved)
    return value if keeps else (value.squeeze(dims) if value.dim() and dims else value)


def _equal_there(x: Tensor, mask: Tensor, dims: list[int], sign: int) -> tuple[Tensor, Tensor]:
    """Return the mean of `x` where the mask is, and `x` with it there and nowhere else."""
    count = mask.sum(dims, keepdim=True) if dims else mask.to(torch.int64)
    total = torch.where(mask, x, 0)
    value = (total.sum(dims, keepdim=True) if dims else total) / count
    value = value.to(x.dtype)
    down, up = _beside(value, x)
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


def _both_extremes(call: Call) -> Any:
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


def _norm(call: Call) -> Any:
    """Norms: of order 1 by signs, of infinite order by the greatest magnitude."""
    order = float(call.argument("ord"))
    if not call.saves or not call.x.is_floating_point() or order not in (1.0, math.inf, -math.inf):
        return call.run()
    x = call.x
    if order == 1:
        return call.run(call.move(x, _on_sides(call, x, [("gt", 0), ("lt", 0)])))
    dims = call.argument("dim")
    dims = [*range(x.dim())] if not dims else [*dims]
    result, keeps = call.run(), bool(call.argument("keepdim"))
    mask = call.decide(lambda: x.abs() == _with_dims(result, dims, x, keeps), x.shape)
    if not call.is_again:
        return result
    _, moved = _equal_there(x.abs(), mask, dims, 1 if order > 0 else -1)
    return call.run(call.move(x, torch.copysign(moved, x)))


_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")  # which in place give 0 and 1
_ROUNDING = ("round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide", "div", "bernoulli")
_UNIQUE = ("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")

_RULES: dict[Rule, frozenset[str]] = {
    _relu: frozenset(("relu",)),
    _by_kinks: frozenset(_KINKS),
    _by_comparison: frozenset(("maximum", "minimum", "fmax", "fmin")),
    _by_byte: frozenset((*_ROUNDING, *_COMPARISONS)),
    _both_extremes: frozenset(("aminmax",)),
    _norm: frozenset(("linalg_vector_norm",)),
    _sampling: frozenset(("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")),
    _whole: frozenset(("_local_scalar_dense", "equal", "multinomial", "poisson", "binomial", *_UNIQUE)),
}
