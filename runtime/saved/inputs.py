"""The arguments of a call that is computed again: saved exactly or in codes, and restored as the first call found them.

a tensor with gradient     in codes if it is an activation, else exactly; autograd holds it
one without                by position exactly; by keyword or in a container it is the caller's own, and stays so
a container                its members, in a new one for the second call: the caller's changes once
anything else              itself
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..layers.callers import note_input
from ..layers.saver import ExactSaver, Saver, as_saver, is_held, put_together, take_apart
from ..tensors.graphs import memory_key
from ..tensors.traits import DTYPES


@dataclass(frozen=True)
class _Input:
    """An input that is saved as it is: its place among the saved tensors."""

    index: int


@dataclass(frozen=True)
class _Codes:
    """An input that is saved in codes.

    Attributes:
        start, stop: places of their tensors.
        form: the compressed tensor without them.
        stride: of the input, by which torch chooses kernels, and what they save.
        held: whether layers save the input as it is, which is in memory anyway: they save the same again.
    """

    start: int
    stop: int
    form: Any
    stride: tuple[int, ...]
    held: bool


@dataclass
class _Lent:
    """A tensor without history, in a container or given by keyword: the caller's own, as for torch's checkpoint.

    Attributes:
        tensor: itself, or a copy if the call changes it.
        was_changed: whether it does.
    """

    tensor: Tensor
    was_changed: bool = False


@dataclass(frozen=True)
class _Container:
    """A tuple, list, dictionary or plain object among the arguments, as the first call found it.

    Attributes:
        like: its class, or of a dictionary an empty one.
        parts: forms of its members, by key or attribute if it has such.
    """

    like: Any
    parts: Any


_LISTS, _DICTIONARIES = (list, set, deque), (dict, OrderedDict, defaultdict)


class Inputs:
    """The tensors among the arguments of a call, and how they are saved.

    Args:
        saver: of what is rounded.
        shared: codes of other calls.
        fewest: elements a channel, below which an input is saved as it is.

    Attributes:
        tensors: that are saved.
        exact: those of them that are inputs themselves.
        lent: tensors that the caller holds.
        devices: of all tensors among the arguments, in order; what is saved of them may wait in host memory.
    """

    def __init__(self, saver: Saver, shared: "Shared", fewest: int = 0) -> None:
        self.tensors: list[Tensor] = []
        self.exact: list[Tensor] = []
        self.lent: list[_Lent] = []
        self.devices: dict[torch.device, None] = {}
        self._saver, self._shared, self._fewest = saver, shared, fewest
        self._seen: dict[int, Any] = {}

    def form(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return what the arguments are restored from."""
        args, keywords = arguments
        given = tuple(self._saved(a) if isinstance(a, Tensor) else self._form(a) for a in args)
        return _Container(tuple, (_Container(tuple, given), _Container({}, self._named(keywords))))

    def _named(self, parts: dict[Any, Any], exactly: bool = False) -> dict[Any, Any]:
        return {key: self._form(part, exactly) for key, part in parts.items()}

    def _form(self, value: Any, exactly: bool = False) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            if value.requires_grad and not value.is_leaf and not exactly:
                return self._saved(value)
            self.devices[value.device] = None
            self.lent.append(_Lent(value))
            return self.lent[-1]
        if id(value) in self._seen:
            return self._seen[id(value)]
        if isinstance(value, tuple):
            parts = tuple(self._form(part, exactly) for part in value)
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else _Container(kind, parts)
        if kind in _LISTS:
            form = self._seen[id(value)] = _Container(kind, [])
            form.parts.extend(self._form(part, exactly) for part in value)
            return form
        if kind in _DICTIONARIES:
            empty = defaultdict(value.default_factory) if kind is defaultdict else kind()
            form = self._seen[id(value)] = _Container(empty, {})
            form.parts.update(self._named(value, exactly))
            return form
        if _is_plain(value):
            form = self._seen[id(value)] = _Container(kind, {})
            form.parts.update(self._named(vars(value), exactly=True))
            return form
        return value

    def _saved(self, x: Tensor) -> Any:
        """Return how `x` is restored, after its tensors have been added to those that are saved.

        An object that is given several times is one again: attention asks whether its query is its key.
        """
        if id(x) in self._seen:
            return self._seen[id(x)]
        self.devices[x.device] = None
        start = len(self.tensors)
        # An activation: a gradient flows through it, and it is no weight, nor another leaf, which the graph holds.
        is_of_leaf = x.is_leaf or (x._base is not None and x._base.is_leaf)
        rounded = x.requires_grad and not is_of_leaf and x.dtype in DTYPES and x.dim() > 1
        rounded = rounded and has_storage(x) and not x.is_nested  # a nested one's sizes cannot be compared
        if not rounded or x.numel() < self._fewest * x.shape[1] or isinstance(self._saver, ExactSaver):
            self.tensors.append(x)
            self.exact.append(x)
            self._seen[id(x)] = _Input(start)
            return self._seen[id(x)]
        found = self._shared.found(x)
        if found is None:
            with torch.no_grad():
                own: list[Tensor] = []
                values = x.detach()  # of tokens, whose features make groups; or of images
                codes = as_saver(self._saver).compress_rows(values) if x.dim() < 4 else self._saver.compress(values)
                form = take_apart(codes, own)
            self._shared.note(x, form, own)
        else:
            form, own = found
        self.tensors += own
        self._seen[id(x)] = _Codes(start, len(self.tensors), form, x.stride(), is_held(x))
        return self._seen[id(x)]


def _is_plain(value: Any) -> bool:
    """Return whether an object is its attributes and nothing else, such as a cache of keys and values."""
    kind = type(value)
    plain = kind.__new__ is object.__new__ and hasattr(value, "__dict__") and not callable(value)
    return plain and kind.__reduce_ex__ is object.__reduce_ex__ and not isinstance(value, nn.Module | type)


def has_storage(x: Tensor) -> bool:
    """Return whether the numbers of `x` lie in one memory of its own."""
    return x.layout == torch.strided and not is_traceable_wrapper_subclass(x)


def restored(form: Any, tensors: Sequence[Tensor], made: dict[int, Any]) -> Any:
    """Return an argument as the first call found it.

    Args:
        form: of it.
        tensors: that were saved.
        made: containers and inputs in codes that were restored already, by their forms.
    """
    if isinstance(form, _Input):
        return tensors[form.index]
    if isinstance(form, _Lent):
        return form.tensor.clone() if form.was_changed else form.tensor
    if id(form) in made:
        return made[id(form)]
    if isinstance(form, _Codes):
        x = _Decompress.apply(torch.empty(0, requires_grad=True), form, tensors[form.start : form.stop])
        made[id(form)] = x
        if form.held:
            note_input(x)
        return x
    if not isinstance(form, _Container):
        return form
    like, parts = form.like, form.parts
    if isinstance(parts, tuple):
        values = [restored(part, tensors, made) for part in parts]
        return like(*values) if hasattr(like, "_fields") else like(values)
    if isinstance(parts, list):
        value = made[id(form)] = like()
        add = value.add if like is set else value.append
        for part in parts:
            add(restored(part, tensors, made))
        return value
    if isinstance(like, type):
        value = made[id(form)] = object.__new__(like)
        target = vars(value)
    else:
        value = target = made[id(form)] = like.copy()
    for key, part in parts.items():
        target[key] = restored(part, tensors, made)
    return value


class _Decompress(torch.autograd.Function):
    """Codes → an input of the second call; a result of a function, so that the call may change it in place."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, codes: _Codes, tensors: Sequence[Tensor]) -> Tensor:
        x = put_together(codes.form, tensors).decompress()
        stride = codes.stride
        if x.stride() == stride or x.numel() == 0:
            return x
        # A copy with the strides of the input. Up to four times the memory is the price of torch's choice of kernels,
        # by which tensors are saved alike; of more the gaps are narrower, as the first tokens of a padded batch have
        # (LED's encoder hands on 32 of 512).
        extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, stride, strict=True))
        copy = x.new_empty_strided(x.shape, stride if extent <= 4 * x.numel() else _narrowed(x.shape, stride))
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)  # an expanded dimension once
        copy[once].copy_(x[once])
        return copy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None


def _narrowed(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return strides in the same order, and with gaps in the same places, that are as small as can be."""
    narrowed, end, narrow_end, last = [*stride], 1, 1, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], dim)):
        if shape[dim] > 1 and stride[dim]:
            narrowed[dim] = narrow_end if stride[dim] == end else narrow_end + last
            last = narrowed[dim]
            end, narrow_end = stride[dim] * shape[dim], last * shape[dim]
        elif stride[dim]:
            narrowed[dim] = narrow_end
    return narrowed


class Shared:
    """The codes of inputs, as long as a graph holds them: a tensor that several blocks take is saved once."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, StorageWeakRef, Any, list[_Weak]]] = {}

    def found(self, x: Tensor) -> tuple[Any, list[Tensor]] | None:
        """Return the form and the tensors of the codes of `x`, if there are any."""
        entry = self._entries.get(x.untyped_storage()._cdata)
        if entry is None:
            return None
        identity, storage, form, references = entry
        if identity != memory_key(x) or storage.expired():
            return None
        tensors = [reference.tensor() for reference in references]
        living = [t for t in tensors if t is not None]
        return (form, living) if len(living) == len(tensors) else None

    def note(self, x: Tensor, form: Any, tensors: Sequence[Tensor]) -> None:
        """Record the codes of `x`, and forget those of tensors that are gone."""
        for key in [key for key, entry in self._entries.items() if entry[1].expired()]:
            del self._entries[key]
        storage = x.untyped_storage()
        self._entries[storage._cdata] = memory_key(x), StorageWeakRef(storage), form, [_Weak(t) for t in tensors]

    def __reduce__(self) -> Any:
        return Shared, ()

    def __deepcopy__(self, _: Any) -> "Shared":
        return Shared()


class _Weak:
    """A tensor that is found again while anything holds its memory, such as autograd or another's hook."""

    def __init__(self, x: Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())
        self._like = x.new_empty(0)
        self._place = x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> Tensor | None:
        """Return the tensor, or None if its memory is gone."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else self._like.new_empty(0).set_(storage, *self._place)
