"""One step of an operator: the forward pass, what autograd keeps after it, and the gradients."""

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fewbit.runtime.layers.saver import take_apart
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .operators import requires_grad

Function = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """What a step gives.

    Attributes:
        outputs: tensors that the operator returns.
        gradients: of the inputs that require one; None where none arrives.
        nbytes: of the memory that autograd keeps after the forward pass, without the inputs', which their owner holds.
    """

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    nbytes: int


class _Token:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, held: Any) -> None:
        # An output would form a cycle with its node and this token.
        self.held = held.detach() if isinstance(held, Tensor) else held

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it holds now."""
        found: list[Tensor] = []
        take_apart(self.held, found)
        return found


def step(function: Function, sample: Any, around: saved_tensors_hooks | None = None) -> Step:
    """Call an operator with a sample and go backward through it.

    Inputs reach the operator as results of another one, as in a model: leaves are saved exactly whatever they are.

    Args:
        function: the operator, or what a way makes of it.
        sample: torch's `SampleInput`.
        around: hooks in force during the forward pass.
    """
    leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
    owned = [x.detach().requires_grad_() if requires_grad(x) else x for x in leaves]
    given = [x.clone() if requires_grad(x) else x for x in owned]
    tokens: list[weakref.ref[_Token]] = []

    def pack(x: Tensor) -> _Token:
        token = _Token(x if around is None else around.pack_hook(x))
        tokens.append(weakref.ref(token))
        return token

    def unpack(token: _Token) -> Tensor:
        return token.held if around is None else around.unpack_hook(token.held)

    torch.manual_seed(1)
    value, args, kwargs = tree_unflatten(given, form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if around is not None:
            around.__enter__()
        try:
            with saved_tensors_hooks(pack, unpack):
                result = function(value, *args, **kwargs)
        finally:
            if around is not None:
                around.__exit__(None, None, None)
        del value, args, kwargs, given
        nbytes = _bytes([t for t in (reference() for reference in tokens) if t is not None], owned)
        return Step(*_backward(sample, result, owned), nbytes)


def _backward(sample: Any, result: Any, owned: list[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    # Of a decomposition, what is the same for every choice of signs and phases.
    roots = [x for x in tree_leaves(sample.output_process_fn_grad(result)) if requires_grad(x)]
    torch.manual_seed(2)
    weights = [torch.randn(x.shape, dtype=x.dtype) for x in roots]
    inputs = [x for x in owned if requires_grad(x)]
    gradients: Any = torch.autograd.grad(roots, inputs, weights, allow_unused=True) if roots else [None] * len(inputs)
    return [x.detach() for x in outputs], list(gradients)


def _bytes(tokens: list[_Token], owned: list[Any]) -> int:
    seen = {_identity(x) for x in owned if isinstance(x, Tensor)}
    total = 0
    for x in (part for token in tokens for part in token.tensors):
        if _identity(x) not in seen:
            seen.add(_identity(x))
            total += x.untyped_storage().nbytes() if x.layout == torch.strided else x.numel() * x.element_size()
    return total


def _identity(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)
