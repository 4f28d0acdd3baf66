"""A call of an operator of torch, as the rules of its decisions see it (rules.py, selections.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..tensors.traits import tensors_among


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
        return all(
            isinstance(t, nn.Parameter) or (t.layout == torch.strided and t.untyped_storage()._cdata in exact)
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
        return self.mode.again is not None

    def decide(self, value: Any, shape: torch.Size | None = None, most: int | None = None) -> Any:
        """Return what was decided the first time: `value`, or what it returns."""
        return self.mode.decide(self.name, value, most, shape)

    def move(self, x: Tensor, moved: Tensor) -> Tensor:
        """Let `moved` be what the operation takes, and saves, in place of its argument `x`; return it."""
        again = self.mode.again
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
        if self.mode.again is not None:
            self.mode.again.replace(x, value, copied=False)
