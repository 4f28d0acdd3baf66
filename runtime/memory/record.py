"""Measures the tensors that autograd saves between forward and backward, to the byte.

Every tensor that an op saves passes through a saved-tensor hook, which hands autograd a token in its place. The tensors
whose token is alive after the forward pass are counted: tensors saved for a result that has been freed are gone with
its graph. Each storage is counted once; parameters and buffers are not counted, as they stay in memory anyway.

Outer saved-tensor hooks, such as those of `fewbit.compress_saved_tensors` around the call, still run, and the tensors
that they return are counted (torch 2.6 does not expose outer hooks, so there they are ignored).

A hook does not get the node that saves. But autograd numbers the nodes of a graph as it makes them, and a node saves
just after it was made: the last number at that moment identifies it (`Ops`). Reading the tensors back from the nodes
(`node._saved_self`) would also work, but it runs the unpack hooks of others: checkpointing would recompute.

A tensor that a custom function stores as an attribute of `ctx`, without `save_for_backward`, is not seen.
"""

import gc
import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from ..layers.rebuilding import Hooks
from ..layers.saver import take_apart
from .listing import FIELDS, Field, Sort, check_fields, listing, share
from .values import identity_of, parts_of, values_for


@dataclass(frozen=True)
class Saved:
    """One storage that an op saves for the backward pass.

    Attributes:
        module: qualified name of the innermost module whose forward saved it; "" for the model itself.
        kind: class name of that module.
        op: the op that saved it, by the name of its function (gelu, addmm, native_layer_norm); the class of a
            `torch.autograd.Function`; "checkpoint" for the inputs of a checkpoint; "?" if unknown.
        bytes: size of the storage, which may be larger than the tensor that was saved.
        dtype: of the tensor that was saved.
        line: file and line of the model's own code that called the op, "model.py:41"; "" if it has none.
    """

    module: str
    kind: str
    op: str
    bytes: int
    dtype: torch.dtype
    line: str = field(default="", compare=False)


@dataclass(frozen=True)
class Profile:
    """All storages that one forward pass saves for backward. `str(profile)` is a table of them.

    Attributes:
        saved: each storage once, under the module and op that saved it first, in that order.
        again: the same storages under the other ops that saved them too; these take no memory of their own, but
            compressing the storage for one op frees nothing while another op saves it.
    """

    saved: tuple[Saved, ...]
    again: tuple[Saved, ...] = ()

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(s.bytes for s in self.saved)

    @property
    def total_by_each(self) -> int:
        """Bytes that would be saved if every op had its own copy."""
        return sum(s.bytes for s in (*self.saved, *self.again))

    def by(self, *fields: Field) -> dict[tuple[str, ...], int]:
        """Return bytes for each combination of `fields` ("module", "kind", "op", "dtype"), in the order of saving.

        Raises:
            FewbitError: a field is not "module", "kind", "op" or "dtype".
        """
        check_fields(fields)
        result: dict[tuple[str, ...], int] = {}
        for s in self.saved:
            values = [getattr(s, field) for field in fields]
            key = tuple(value if isinstance(value, str) else str(value).removeprefix("torch.") for value in values)
            result[key] = result.get(key, 0) + s.bytes
        return result

    def by_module(self) -> dict[str, int]:
        """Return bytes for each module that saved anything, in order."""
        return {module: size for (module,), size in self.by("module").items()}

    def by_op(self) -> dict[str, int]:
        """Return bytes for each op that saved anything, in order."""
        return {op: size for (op,), size in self.by("op").items()}

    def of_kind(self, kind: str) -> int:
        """Return the bytes that modules of the class name `kind` saved."""
        return sum(s.bytes for s in self.saved if s.kind == kind)

    def table(self, *fields: Field, sort: Sort = "order", limit: int | None = None) -> str:
        """Return rows of `fields` (all four if none is named) with their bytes and share, and the total below.

        Args:
            fields: the columns; storages that agree in all of them make one row.
            sort: "order" of saving, "bytes" (largest first) or "name" (by the fields).
            limit: most rows to show; the rest is summed up in one row.

        Raises:
            FewbitError: `sort` or a field is not one of the values above, or `limit` is below 1.
        """
        rows = {key: (size,) for key, size in self.by(*(fields or FIELDS)).items()}
        return listing(rows, fields or FIELDS, ("bytes", "share"), lambda row, all: share(*row, *all), sort, limit)

    def __str__(self) -> str:
        return self.table()


# ---- recording -------------------------------------------------------------------------------------------------------


class _Token:
    """The object that autograd holds in place of a saved tensor, as its only owner."""

    __slots__ = ("__weakref__", "_opaque", "by_checkpoint", "held", "line", "module", "number")

    def __init__(self, tensor: Tensor, held: object, module: nn.Module) -> None:
        if isinstance(held, Tensor):
            held = held.detach()  # an output would form a reference cycle with its node and this token
        self.held = held
        self._opaque = None if _tensors_of(held) else tensor.detach()
        self.module = module
        self.number = next_number() - 1  # of the node that saves; see `Ops`
        # The module that called the saving op tells checkpoints, whose inputs no op's node of the graph holds.
        frame = sys._getframe(2)  # below: pack
        while frame and frame.f_globals.get("__name__") == "torch.autograd.function":  # apply
            frame = frame.f_back
        self.by_checkpoint = frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        self.line = _line()

    @property
    def tensors(self) -> list[Tensor]:
        """What is held now: hooks may go over from codes to the tensor itself once another op has to have it."""
        return _tensors_of(self.held) if self._opaque is None else [self._opaque]


def _tensors_of(held: object) -> list[Tensor]:
    tensors: list[Tensor] = []
    take_apart(held, tensors)
    return tensors


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

    outer = Hooks.outer()

    def pack(tensor: Tensor) -> _Token:
        token = _Token(tensor, outer.pack(tensor), running[-1])
        tokens.append(weakref.ref(token))
        return token

    start = next_number()
    with ExitStack() as stack:
        for mode in values_for(model, inputs):
            stack.enter_context(mode)
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: outer.unpack(token.held)):
            result = call()
        kept = [token for token in (reference() for reference in tokens) if token is not None]
        names: list[str | None] = []
        for roots in (lambda: tree_leaves(result), gc.get_objects):  # the graph of the result, or all living tensors
            ops = Ops(roots(), start)
            names = ["checkpoint" if token.by_checkpoint else ops.name_at(token.number) for token in kept]
            if None not in names:
                break
        return _count(model, kept, [name or "?" for name in names])


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


# ---- which op saved --------------------------------------------------------------------------------------------------

_ON_VIEW = "CopySlices"
_GENERATED = "GeneratedBackwardFor_"  # what torch.library calls the node of an op: then namespace, op and overload


def next_number() -> int:
    """Return the number that the next node made in this thread will have."""
    return _get_sequence_nr()


class Ops:
    """The nodes of a graph that can save a tensor, by their numbers.

    Args:
        roots: the graph is traversed to its leaves from the tensors among these.
        since: nodes with a smaller number are older than the call and left out.
    """

    def __init__(self, roots: Iterable[object], since: int) -> None:
        nodes = _nodes(roots, since)
        self._on_views = {number for number, node in nodes.items() if type(node).__name__ == _ON_VIEW}
        self._made = sorted(nodes)
        self._names = {number: op_name(node) for number, node in nodes.items() if _saves(type(node))}
        self._saving = sorted(self._names)

    def name_at(self, number: int) -> str | None:
        """Return the op that saved a tensor when `number` was the last one assigned, or None.

        It is not always the node of that number. The graph of an input that was changed through another view is rebuilt
        in between, and a custom function may build its own graph before it saves: then it is the last node that can
        save. The node of an in-place op on a view is hidden in the CopySlices made next.
        """
        if number in self._names:
            return self._names[number]
        place = bisect_right(self._made, number)
        if place < len(self._made) and self._made[place] in self._on_views and number not in self._made:
            return self._names[self._made[place]]
        place = bisect_right(self._saving, number)
        return self._names[self._saving[place - 1]] if place else None


def op_name(node: Node) -> str:
    """Return the name of the function whose gradient `node` computes: gelu for GeluBackward0."""
    name = node.name()
    if isinstance(node, BackwardCFunction):  # a user's torch.autograd.Function, or an op of torch.library
        return name.removesuffix("Backward").removeprefix(_GENERATED).removesuffix("_default")
    name = re.sub(r"Backward\d*$", "", name.removeprefix("torch::autograd::"))
    name = re.sub(r"(\d)D", r"\1d", name)  # MaxPool2DWithIndices
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _nodes(roots: Iterable[object], since: int) -> dict[int, Node]:
    # By type(): isinstance would make lazy objects load.
    todo: list[Node | None] = [cast(Tensor, root).grad_fn for root in roots if issubclass(type(root), Tensor)]
    found: dict[int, Node] = {}
    while todo:
        node = todo.pop()
        if node is None or type(node).__name__ == "AccumulateGrad":
            continue
        number = node._sequence_nr()
        if number >= since and number not in found:
            found[number] = node
            todo += [following for following, _ in node.next_functions]
    return found


@cache
def _saves(kind: type) -> bool:
    """Return whether nodes of a class can save a tensor, as far as the class shows it."""
    hidden = kind.__name__ in (_ON_VIEW, "CppFunction")  # the latter: an extension's opaque node
    return hidden or any(name.startswith("_raw_saved_") for name in dir(kind))
