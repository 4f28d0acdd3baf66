"""What autograd keeps between forward and backward, to the byte.

Every tensor that an op saves passes through a saved-tensor hook; each storage is counted once, under the module that
saved it first, and parameters and buffers not at all: they stay whether saved or not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Saved:
    """One storage kept for the backward pass.

    Attributes:
        module: qualified name of the innermost module whose forward saved it; "" for the model itself.
        kind: class name of that module.
        bytes: size of the storage.
        dtype: of the tensor that was saved.
    """

    module: str
    kind: str
    bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Profile:
    """All that one forward pass keeps for backward, in the order in which it was saved."""

    saved: tuple[Saved, ...]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(s.bytes for s in self.saved)

    def by_module(self) -> dict[str, int]:
        """Return bytes for each module that saved anything, in order."""
        result: dict[str, int] = {}
        for s in self.saved:
            result[s.module] = result.get(s.module, 0) + s.bytes
        return result

    def of_kind(self, kind: str) -> int:
        """Return the bytes that modules of the class name `kind` saved."""
        return sum(s.bytes for s in self.saved if s.kind == kind)


def profile(model: nn.Module, *inputs: object, **keywords: object) -> Profile:
    """Run `model(*inputs, **keywords)` once and return what autograd keeps for its backward pass.

    The outputs are dropped; nothing but what the model's own forward changes is changed.
    """
    return profile_call(model, lambda: model(*inputs, **keywords))


def profile_call(model: nn.Module, call: Callable[[], object]) -> Profile:
    """Run `call`, which runs `model` and may go on to a loss, and return what autograd keeps for backward."""
    names = {module: name for name, module in model.named_modules()}
    own = {_identity(t) for t in (*model.parameters(), *model.buffers())}
    running: list[nn.Module] = [model]
    kept: list[Tensor] = []  # alive until the end, so that no identity is used twice
    saved: dict[int, Saved] = {}

    def enter(module: nn.Module, _: object) -> None:
        running.append(module)

    def leave(module: nn.Module, _: object, __: object) -> None:
        running.pop()

    def pack(tensor: Tensor) -> Tensor:
        size = tensor.untyped_storage().nbytes()
        identity = _identity(tensor)
        if size and identity not in own and identity not in saved:
            module = running[-1]
            saved[identity] = Saved(names[module], type(module).__name__, size, tensor.dtype)
            kept.append(tensor.detach())
        return tensor

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        result = call()
        del result
    return Profile(tuple(saved.values()))


def _identity(tensor: Tensor) -> int:
    """Return what two tensors have in common that share a storage; its address is 0 on the meta device."""
    return tensor.untyped_storage()._cdata
