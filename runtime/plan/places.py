"""Names the saved tensors of a model by place, the same in every step: the module that saves it, and a number.

    model.layers.0.mlp.act_fn:0      the first tensor that this module saves in a forward pass

A plan is made in one step and carried out in others, so both must call a tensor by one name. `Places` surrounds the
forward pass of a model with the hooks of `compress_saved_tensors` and passes each saved tensor, with its place, to a
policy: one that measures (trace.py, gradient_error.py) or one that carries out a plan (fitted.py).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..quantizers import Compressed, Quantizer
from ..saved_tensors import compress_by


class Policy(Protocol):
    """Decides how tensors are saved, by place."""

    def choose(self, place: str, x: Tensor, function: str) -> Quantizer:
        """Return the quantizer of `x`, which the torch function of this name saves at `place`."""
        ...

    def share(self, compressed: Compressed, module: str) -> None:
        """Note that `module` saves again what `compressed` was made of."""
        ...

    def keep(self, x: Tensor, module: str, in_bits: bool) -> None:
        """Note that `module` saves `x` exactly, by the rules of `compress_saved_tensors`: as it is, or in bits."""
        ...

    def enter(self, module: str, given: list[Tensor]) -> None:
        """Note that the forward pass of `module` begins, with the tensors `given`."""
        ...

    def leave(self, module: str) -> None:
        """Note that the forward pass of `module` ends."""
        ...


class Places:
    """Hooks of a model that ask a policy about each tensor saved in its forward pass, as long as gradients are on.

    A context manager: the hooks are removed at its end. Compiled calls run without them.

    Attributes:
        policy: that is asked.
        suspended: whether forward passes that begin now run without.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.policy = policy
        self._running: list[str] = []
        self._counts: Counter[str] = Counter()
        self._context: Any = None
        self._handles: list[Any] = []
        self.suspended = False
        for name, module in model.named_modules():
            if module is not model:
                self._handles.append(module.register_forward_pre_hook(_Entering(self, name), with_kwargs=True))
                self._handles.append(module.register_forward_hook(_Leaving(self, name), always_call=True))
        self._handles.append(model.register_forward_pre_hook(self._begin, prepend=True))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- of the model's forward pass ---------------------------------------------------------------------------------

    def _begin(self, *_: object) -> None:
        if self.suspended or self._context is not None:
            return
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._running, self._context = [""], compress_by(self)
        self._counts.clear()
        self._context.__enter__()
        self.policy.enter("", [])

    def _end(self, *_: object) -> None:
        if self._context is None or self._running != [""]:
            return
        self.policy.leave("")
        context, self._context = self._context, None
        self._running = []
        context.__exit__(None, None, None)

    def entered(self, name: str, given: object) -> None:
        """Note that a module begins."""
        if self._context is not None:
            self._running.append(name)
            self.policy.enter(name, [t for t in tree_leaves(given) if isinstance(t, Tensor)])

    def left(self, name: str) -> None:
        """Note that a module ends."""
        if self._context is not None and self._running[-1] == name:
            self._running.pop()
            self.policy.leave(name)

    # ---- of the saved tensors: a `Chooser` ---------------------------------------------------------------------------

    def choose(self, x: Tensor, function: str) -> Quantizer:
        """Return the policy's quantizer for `x`."""
        module = self._running[-1]
        place = f"{module}:{self._counts[module]}"
        self._counts[module] += 1
        return self.policy.choose(place, x, function)

    def share(self, compressed: Compressed) -> None:
        """Pass it on to the policy."""
        self.policy.share(compressed, self._running[-1])

    def keep(self, x: Tensor, in_bits: bool = False) -> None:
        """Pass it on to the policy."""
        self.policy.keep(x, self._running[-1], in_bits)


@dataclass(frozen=True)
class _Entering:
    """The hook before a module; an object, so that copies of the model have their own."""

    places: Places
    name: str

    def __call__(self, _: nn.Module, *given: object) -> None:
        self.places.entered(self.name, given)


@dataclass(frozen=True)
class _Leaving:
    """The hook after a module."""

    places: Places
    name: str

    def __call__(self, *_: object) -> None:
        self.places.left(self.name)
