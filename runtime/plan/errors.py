"""What rounding does to the gradient, by numbers of bits: how few passes tell it, and estimates from shapes.

    Errors          of one tensor or module, at each number of bits
    errors_of_each  of equal layers, from three passes for all of them
    Trial           of modules that are converted, each time by a forward and a backward pass
    errors_by_shape of models without values

gradient_error.py measures saved tensors by backward passes alone.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..convert.api import convert_beside
from ..convert.gated_mlps import GatedMLPs
from ..saved.exactness import OF_SCORES
from ..tensors.philox import draw_seed
from .step import Step
from .structure import structure_aside
from .trace import Trace, Traced

BITS = (1, 2, 3, 4, 5, 6, 8)
PROBE = 4  # at which tensors are measured
# Of groups that are turned, which have the error of one to two bits more: with everything in 2 bits small models ended
# .02 above exact training, in 3 bits as it (plots/results/two_bits.md).
ROTATED_BITS = (2, 3)
TABLE_BITS = (1, 2, 3, 4)
TABLE_PROBE = 3
# Least bits by the function that saves a tensor. A plan is measured at one moment, and what hardly matters to a fresh
# model may matter later: its attention is even, and queries in 1 bit do no harm. A GPT-2 of four layers planned at its
# first step without these ended 300 steps .53 above exact training's loss, at a predicted error of .006.
LEAST_LINEAR, LEAST_BITS, LEAST_OF_SCORES, LEAST_OF_TABLE = 3, 4, 6, 2
LINEAR = frozenset(("linear", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"))
SEGMENTS = 2  # passes for the tensors of one place in equal layers: of the first layers, of the last
_T = TypeVar("_T")


def least_bits(x: Traced) -> int:
    """Return the fewest bits that a plan gives a tensor."""
    if x.function in OF_SCORES:
        return LEAST_OF_SCORES
    return LEAST_LINEAR if x.function in LINEAR else LEAST_BITS


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


def noise_and_bias_of(one: Sequence[Tensor], two: Sequence[Tensor]) -> tuple[float, float]:
    """Return the squared norm of an error that averages out over steps, and the rest, from the errors of two halves.

    With the error e₁ where the first half alone is rounded, and e₂ where the second is, 4⟨e₁, e₂⟩ is the square of what
    both have in common.
    """
    both = [x + y for x, y in zip(one, two, strict=True)]
    square = product(both, both)
    bias = min(max(0.0, 4 * product(one, two)), square)
    return square - bias, bias


# ---- of modules that are converted -----------------------------------------------------------------------------------


class Trial:
    """A step that runs with some of its modules converted, always with the same dropout.

    What a table does to the gradient is the same each time, yet it averages out over steps as far as other batches err
    otherwise. Two halves of one batch tell: with e₁ the error if the modules are converted for the first half alone,
    and e₂ for the second, the error is e₁ + e₂, and 4⟨e₁, e₂⟩ the square of what all batches have in common.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._state = torch.random.get_rng_state()

    @cached_property
    def exact(self) -> list[Tensor]:
        """The gradient without conversions."""
        return self.gradient(0)

    @cached_property
    def scale(self) -> float:
        """The squared norm of the gradient."""
        return product(self.exact, self.exact) or 1.0

    def converted(self, *methods: Any, include: Sequence[str]) -> "Converted":
        """Return what the conversion of some modules does to the gradient.

        Args:
            *methods: of `convert`.
            include: names of the modules.
        """
        model = self.step.model
        # The other half of the batch runs by copies, which have parameters and buffers in common with the model.
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        before = {name: copy.deepcopy(model.get_submodule(name), dict(shared)) for name in include}
        exact, halves, whole = self.exact, [], None
        with structure_aside(model):
            report = convert_beside(model, *methods, include=include)
            names = [name for name in dict.fromkeys(row.name for row in report.replaced) if name in before]
            for draw in range(2):
                with _only_half(model, {name: before[name] for name in names}, draw):
                    halves.append(difference(self.gradient(draw), exact))
            if any(isinstance(method, GatedMLPs) for method in methods):  # of which alone `rounding` is asked
                whole = difference(self.gradient(len(halves)), exact)
        both = [x + y for x, y in zip(*halves, strict=True)]
        squares, rounding = noise_and_bias_of(*halves), 0.0
        if whole is not None:
            rounding = max(0.0, (product(both, both) + product(whole, whole)) / 2 - product(both, whole))
        return Converted(names, *(square / self.scale / max(1, len(names)) for square in (*squares, rounding)))

    def gradient(self, draw: int) -> list[Tensor]:
        """Return the gradient; what is rounded at random is so otherwise in each draw."""
        torch.random.set_rng_state(self._state)
        for _ in range(draw):  # copies are rounded by a stream of their own, which begins anew with torch's
            draw_seed()
        loss, _ = self.step.forward()
        parameters = self.step.parameters
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@dataclass(frozen=True)
class Converted:
    """What the conversion of some modules does to the gradient.

    Attributes:
        names: of the modules.
        noise, bias: the squared relative error of each of them that averages out over steps, and the rest.
        rounding: the part of it that is another one in each draw; 0 where it is not measured.
    """

    names: list[str]
    noise: float
    bias: float
    rounding: float


@contextmanager
def _only_half(model: nn.Module, exact: Mapping[str, nn.Module], half: int) -> Iterator[None]:
    """Let modules compute one half of a batch by themselves, the other half by exact copies, until the end of this."""
    modules = {name: model.get_submodule(name) for name in exact}
    for name, module in modules.items():
        vars(module)["forward"] = partial(_halves, half, partial(type(module).forward, module), exact[name])
    try:
        yield
    finally:
        for module in modules.values():
            vars(module).pop("forward", None)


def _halves(half: int, converted: Any, exact: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the output of `converted` for one half of the arguments' first dimension above 1, of `exact` otherwise."""
    x = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
    dim = next((d for d in range(x.dim()) if x.shape[d] > 1), None)
    if dim is None:
        return converted(*args, **kwargs)
    size, middle = x.shape[dim], x.shape[dim] // 2
    in_place = False

    def part(start: int, end: int) -> Any:
        def copied(leaf: Any) -> Any:
            belongs = isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size
            # In views of one tensor, what the second half does in place would change what the first has saved.
            return leaf.narrow(dim, start, end - start).clone() if belongs else leaf

        return tree_map(copied, (args, kwargs))

    outputs = []
    for i, (given, named) in enumerate((part(0, middle), part(middle, size))):
        outputs.append((converted if i == half else exact)(*given, **named))
        in_place = in_place or any(leaf is outputs[-1] for leaf in tree_leaves((given, named)))
    return x.copy_(torch.cat(outputs, dim)) if in_place else torch.cat(outputs, dim)


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
