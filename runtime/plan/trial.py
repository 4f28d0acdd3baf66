"""Measures what changing some modules of a step does to its gradient, each time by a forward and a backward pass."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..convert.api import convert_beside
from ..convert.gated_mlps import GatedMLPs
from ..tensors.philox import draw_seed
from .errors import difference, product
from .step import Step
from .structure import structure_aside


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
        before = {name: _with_shared_parameters(model.get_submodule(name)) for name in include}
        exact = self.exact
        wholes, halves = [], []
        with structure_aside(model):
            report = convert_beside(model, *methods, include=include)
            names = [name for name in dict.fromkeys(row.name for row in report.replaced) if name in before]
            for draw in range(2):
                with _only_half(model, {name: before[name] for name in names}, draw):
                    halves.append(difference(self.gradient(draw), exact))
            if any(isinstance(method, GatedMLPs) for method in methods):
                wholes.append(difference(self.gradient(len(halves)), exact))
        return Converted(names, self.scale, halves[0], halves[1], wholes[0] if wholes else None)

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
    """Errors of the gradient with some modules converted.

    Attributes:
        names: of the modules.
        scale: the squared norm of the exact gradient.
        one, two: with the modules converted for the first and the second half of the batch, rounded in two draws.
        whole: for all of the batch, in a third draw.
    """

    names: list[str]
    scale: float
    one: list[Tensor]
    two: list[Tensor]
    whole: list[Tensor] | None

    @property
    def both(self) -> list[Tensor]:
        """The error of the whole batch."""
        return [x + y for x, y in zip(self.one, self.two, strict=True)]

    @property
    def noise_and_bias(self) -> tuple[float, float]:
        """The squared relative error of each module that averages out over steps, and the rest."""
        square = product(self.both, self.both)
        bias = min(max(0.0, 4 * product(self.one, self.two)), square)
        return self._share(square - bias), self._share(bias)

    @property
    def rounding(self) -> float:
        """The part of it that is another one in each draw."""
        assert self.whole is not None
        square = (product(self.both, self.both) + product(self.whole, self.whole)) / 2
        return self._share(max(0.0, square - product(self.both, self.whole)))

    def _share(self, square: float) -> float:
        return square / self.scale / max(1, len(self.names))


def _with_shared_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has its parameters and buffers in common with it."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(t): t for t in tensors})


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
