"""Kinks, comparisons and jumps: x̂ is moved to the side, or into the step, in which the first call found x."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call

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
        if call.is_again:
            moved = _moved(moved, comparison, bound, mask)
    return moved


def _moved(x: Tensor, comparison: str, bound: Any, mask: Tensor) -> Tensor:
    """Return the numbers nearest to `x` for which the comparison gives `mask`."""
    down, up = beside(bound, x)
    true = {
        "gt": lambda: _at_least(x, up),
        "ge": lambda: _at_least(x, bound),
        "lt": lambda: _at_most(x, down),
        "le": lambda: _at_most(x, bound),
    }
    opposite = {"gt": "le", "le": "gt", "ge": "lt", "lt": "ge"}
    return torch.where(mask, true[comparison](), true[opposite[comparison]]())


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


def _other(call: Call) -> Any:
    return call.argument("other")


def _scale(call: Call) -> Any:
    scale, axis = call.argument("scale"), call.argument("axis")
    return scale if axis is None else scale.view([-1 if i == axis else 1 for i in range(call.x.dim())])


# Functions that jump, by how they round the number of their step, and its width.
STEPS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Call], Any]]] = {
    "remainder": (torch.floor, _other),
    "fmod": (torch.trunc, _other),
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
