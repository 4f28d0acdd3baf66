"""What rounding does to the gradient, by numbers of bits, and how few backward passes of equal layers tell it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

from .bits import BITS
from .trace import Trace

SEGMENTS = 2  # passes for the tensors of one place in equal layers: of the first layers, of the last
_T = TypeVar("_T")


@dataclass(frozen=True)
class Errors:
    """What rounding a tensor at each number of bits does to the gradient.

    Attributes:
        noise: squared relative error that averages out, by number of bits.
        bias: the rest.
    """

    noise: Mapping[int, float]
    bias: Mapping[int, float]

    def times(self, noise: float, bias: float) -> "Errors":
        """Return them with both parts multiplied."""
        noises = {bits: noise * error for bits, error in self.noise.items()}
        return replace(self, noise=noises, bias={bits: bias * error for bits, error in self.bias.items()})


def finite(errors: Mapping[str, Errors]) -> dict[str, Errors]:
    """Return the errors that are finite.

    Where a backward pass makes NaN of a rounded tensor, as that of `amax`, which asks where its input is its result,
    there is no option to round it.
    """
    return {
        name: each
        for name, each in errors.items()
        if all(isfinite(value) for part in (each.noise, each.bias) for value in part.values())
    }


def total(errors: Sequence[Errors]) -> Errors:
    """Return the errors of tensors that are rounded together."""
    noise = {bits: sum(e.noise[bits] for e in errors) for bits in BITS}
    return Errors(noise, {bits: sum(e.bias[bits] for e in errors) for bits in BITS})


# ---- of equal layers -------------------------------------------------------------------------------------------------


def together(items: Iterable[_T], kind: Callable[[_T], str]) -> Iterator[list[_T]]:
    """Yield the items that one pass measures: of each kind those of the first layers and of the last."""
    for equal in alike(items, kind):
        yield from segments(equal)


def alike(items: Iterable[_T], kind: Callable[[_T], str]) -> list[list[_T]]:
    """Return the items of each kind."""
    by_kind: defaultdict[str, list[_T]] = defaultdict(list)
    for item in items:
        by_kind[kind(item)].append(item)
    return [*by_kind.values()]


def errors_of_each(
    equal: Sequence[_T], wrong: Callable[[Sequence[_T]], list[Tensor]], scale: float
) -> Iterator[tuple[_T, tuple[float, float]]]:
    """Yield each of equal layers' items with its noise and its bias.

    Args:
        equal: the items.
        wrong: returns the error of the gradient with some of them rounded, in another draw at each call.
        scale: the squared norm of the gradient.
    """
    parts = [*segments(equal)]
    draws = [wrong(part) for part in parts]
    squares = [product(draw, draw) for draw in draws]
    again = wrong(equal)
    once = [torch.stack(each).sum(0) for each in zip(*draws, strict=True)]
    if len(parts) == 1:
        squares = [(squares[0] + product(again, again)) / 2]
    of_bias = min(max(0.0, product(once, again) / (sum(squares) or 1.0)), 1.0)
    for part, square in zip(parts, squares, strict=True):
        share = square / scale / len(part)
        yield from ((item, ((1 - of_bias) * share, of_bias * share)) for item in part)


def segments(equal: Sequence[_T]) -> Iterator[list[_T]]:
    """Yield the parts of a list of equal layers' tensors that passes measure together, up to `SEGMENTS`."""
    parts = min(SEGMENTS, len(equal))
    for i in range(parts):
        yield list(equal[i * len(equal) // parts : (i + 1) * len(equal) // parts])


def product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the inner product of two gradients."""
    return sum(float(torch.dot(x.flatten().float(), y.flatten().float())) for x, y in zip(a, b, strict=True))


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Return the difference of two gradients."""
    return [x - y for x, y in zip(a, b, strict=True)]


# ---- estimates, for models without values ----------------------------------------------------------------------------

# Rounding a group of normal numbers to b bits at random has the variance r(b) of the numbers' own, and the gradient of
# a weight errs by about as much, relatively, as its operand. How much a tensor weighs depends on its use: these are
# shares of the relative variance that reach the gradient, of all tensors of one use together. They are means over small
# models that were measured, so that an estimate may be wrong by a factor of 3.
OPERANDS, PRODUCTS, ATTENTION, OTHERS = 0.6, 0.25, 0.05, 0.02
_USES = {
    **dict.fromkeys(("linear", "addmm", "conv1d", "conv2d", "conv3d"), OPERANDS),
    **dict.fromkeys(("mul", "matmul", "bmm"), PRODUCTS),
    "scaled_dot_product_attention": ATTENTION,
}
TABLES = {1: 0.02, 2: 0.005, 3: 0.0012, 4: 0.0003}  # squared errors of all activations together


def relative_variance(bits: int) -> float:
    """Return the variance that rounding normal numbers in groups of 256, whose range is 5.6 deviations, at random to
    so many bits adds to them, relative to their own."""
    return (5.6 / (2**bits - 1)) ** 2 / 6


def errors_by_shape(trace: Trace) -> dict[str, Errors]:
    """Return the estimated errors of each saved tensor by its place."""
    counts: dict[float, int] = {}
    uses = {x.place: _USES.get(x.function, OTHERS) for x in trace.tensors}
    for use in uses.values():
        counts[use] = counts.get(use, 0) + 1
    return {
        place: Errors({b: use * relative_variance(b) / counts[use] for b in BITS}, dict.fromkeys(BITS, 0.0))
        for place, use in uses.items()
    }
