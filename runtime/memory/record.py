"""Measures the tensors that autograd saves between forward and backward, to the byte.

Every tensor that an op saves passes through a saved-tensor hook, which hands autograd a token in its place. The tensors
whose token is alive after the forward pass are counted: tensors saved for a result that has been freed are gone with
its graph. Each storage is counted once; parameters and buffers are not counted, as they stay in memory anyway.

Outer saved-tensor hooks, such as those of `fewbit.compress_saved_tensors` around the call, still run, and the tensors
that they return are counted (torch 2.6 does not expose outer hooks, so there they are ignored).

A tensor that a custom function stores as an attribute of `ctx`, without `save_for_backward`, is not seen.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..layers.saver import take_apart
from .graph import Ops, next_number
from .saved import Profile, Saved
from .storages import identity_of, parts_of
from .values import values_for


class _Token:
    """The object that autograd holds in place of a saved tensor, as its only owner."""

    __slots__ = ("__weakref__", "_opaque", "by_checkpoint", "held", "line", "module", "number")

    def __init__(self, tensor: Tensor, held: object, module: nn.Module) -> None:
        if isinstance(held, Tensor):
            held = held.detach()  # an output would form a reference cycle with its node and this token
        self.held = held
        self._opaque = None if _tensors_of(held) else tensor.detach()
        self.module = module
        self.number = next_number() - 1  # of the node that saves; see graph.py
        self.by_checkpoint = _called_from() == "torch.utils.checkpoint"
        self.line = _line()

    @property
    def tensors(self) -> list[Tensor]:
        """What is held now: hooks may go over from codes to the tensor itself once another op has to have it."""
        return _tensors_of(self.held) if self._opaque is None else [self._opaque]


def _tensors_of(held: object) -> list[Tensor]:
    tensors: list[Tensor] = []
    take_apart(held, tensors)
    return tensors


def _called_from() -> str:
    """Return the name of the Python module that called the saving op.

    It identifies checkpoints, whose inputs are not held by an op's node of the graph.
    """
    frame = sys._getframe(3)  # below: _Token and pack
    while frame and frame.f_globals.get("__name__") == "torch.autograd.function":  # apply
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


def _line() -> str:
    """Return file and line of the innermost code that is neither torch's nor ours, within the call."""
    frame = sys._getframe(3)
    while frame and frame.f_code is not profile_call.__code__:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_LIBRARIES = ("torch", __name__.partition(".")[0])


def profile(model: nn.Module, *inputs: object, **keywords: object) -> Profile:
    """Run `model(*inputs, **keywords)` once and return the storages that autograd saves for its backward pass.

    The outputs are dropped; there are no side effects but those of the model's own forward. A model built under
    ``torch.device("meta")`` (with inputs there) or under a FakeTensorMode is measured without allocating memory: the
    bytes are the same as far as the same kernels are chosen there.

    Example:
        print(fewbit.memory.profile(model, x))
    """
    return profile_call(model, lambda: model(*inputs, **keywords), inputs=(inputs, keywords))


def profile_call(model: nn.Module, call: Callable[[], object], *, inputs: object = ()) -> Profile:
    """Run `call`, which runs `model` and may also compute a loss; return the storages that autograd saves for backward.

    Args:
        model: storages are listed under the names of its modules.
        call: takes no arguments; its result is held until all storages are counted.
        inputs: any nest of tensors; if these or the parameters are fake, `call` runs in their FakeTensorMode.

    Example:
        print(fewbit.memory.profile_call(model, lambda: model(x).square().mean()))
    """
    running: list[nn.Module] = [model]
    tokens: list[weakref.ref[_Token]] = []

    def enter(module: nn.Module, _: object) -> None:
        running.append(module)

    def leave(module: nn.Module, _: object, __: object) -> None:
        running.pop()

    outer_pack, outer_unpack = _hooks_in_force()

    def pack(tensor: Tensor) -> _Token:
        token = _Token(tensor, outer_pack(tensor), running[-1])
        tokens.append(weakref.ref(token))
        return token

    start = next_number()
    with ExitStack() as stack:
        for mode in values_for(model, inputs):
            stack.enter_context(mode)
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: outer_unpack(token.held)):
            result = call()
        kept = [token for token in (reference() for reference in tokens) if token is not None]
        ops = _ops_of(kept, result, start)
        return _count(model, kept, ops)


def _hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the innermost saved-tensor hooks in force, or identities if there are none or torch is too old."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    top = getattr(autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    return top(False) or (_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _ops_of(kept: list[_Token], result: object, start: int) -> list[str]:
    """Return the op that saved each token, from the graph of `result`, or else from all living tensors."""
    for roots in (lambda: tree_leaves(result), gc.get_objects):
        ops = Ops(roots(), start)
        names = ["checkpoint" if token.by_checkpoint else ops.name_at(token.number) for token in kept]
        if None not in names:
            break
    return [name or "?" for name in names]


def _count(model: nn.Module, kept: list[_Token], ops: list[str]) -> Profile:
    names = {module: name for name, module in model.named_modules()}
    own = {identity_of(part) for t in (*model.parameters(), *model.buffers()) for part in parts_of(t)}
    saved: dict[int, Saved] = {}
    again: list[Saved] = []
    counted: set[tuple[int, int]] = set()  # an op that saves three views of one storage counts once
    for token, op in zip(kept, ops, strict=True):
        for part in (part for tensor in token.tensors for part in parts_of(tensor)):
            size, identity = part.untyped_storage().nbytes(), identity_of(part)
            if not size or identity in own or (identity, token.number) in counted:
                continue
            counted.add((identity, token.number))
            one = Saved(names[token.module], type(token.module).__name__, op, size, part.dtype, token.line)
            if identity in saved:
                again.append(one)
            else:
                saved[identity] = one
    return Profile(tuple(saved.values()), tuple(again))
