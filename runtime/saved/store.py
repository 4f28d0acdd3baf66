"""What is saved in place of the tensors of a graph: codes, exact tensors and bits, of each piece of memory once.

A tensor saved again, whole or as a view, shares the codes of the first. Where one of its users must have it exactly,
all have: it would take more than torch's to hold it in codes besides. So a piece of memory never takes more than what
torch would keep alive of it.
"""

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cache
from math import pi
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..layers.saver import Saver
from ..quantizers import Compressed, PerGroup, Quantizer, RotatedCompressed
from ..tensors.exact import Exact
from ..tensors.graphs import cast_key, memory_key
from ..tensors.spec import as_dense
from ..tensors.traits import current_stream, is_abstract
from .exactness import OF_ROWS, PERIODIC, SIGNED, Rule
from .forms import Bits, Entry, InSides, Own, Probabilities, Repeated, Signed, View

_LEAST_GROUP = 8  # elements; shorter rows share a group all the same
_TURN = 2 * pi
_WIDE = 3 * _TURN  # then 4 bits err by half a radian; of one turn by a sixth


class Chooser(ABC):
    """Chooses for each saved tensor how it is compressed, and is told the rest."""

    @abstractmethod
    def choose(self, x: Tensor, function: str) -> Quantizer:
        """Return the quantizer of `x`, which the torch function of this name saves."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        """Return what saves query, key and value of `scaled_dot_product_attention`, which the backward pass then
        computes again; None lets torch's own save what it saves."""

    def share(self, compressed: Compressed, x: Tensor) -> None:  # noqa: B027
        """Note that another op saves `x`, the tensor that `compressed` was made of or a part of it."""

    def keep(self, x: Tensor, in_bits: bool = False) -> None:  # noqa: B027
        """Note that `x` is saved exactly: as it is, because it must not be rounded or would not become smaller; or in
        one bit an element, such as signs and masks of dropout."""

    def attended(self, output: Tensor) -> None:  # noqa: B027
        """Note what the attention that `attend` was asked about has returned."""


@dataclass(frozen=True, eq=False)
class Store:
    """What the hooks of one context have saved.

    Attributes:
        chooser, smallest: as for `compress_by`.
        entries: identity of a storage → its blocks, as long as a graph refers to them.
        casts: what casts of one tensor have in common (tensors/graphs.py) → the block of the first.
        owns: a tensor and what functions ask of it → what is saved for them.
    """

    chooser: Chooser
    smallest: int
    entries: dict[int, list[weakref.ref[Entry]]] = field(default_factory=dict)
    casts: weakref.WeakValueDictionary[Any, Entry] = field(default_factory=weakref.WeakValueDictionary)
    owns: weakref.WeakValueDictionary[Any, Own] = field(default_factory=weakref.WeakValueDictionary)

    def exactly(self, x: Tensor) -> View | Exact:
        """Save `x` exactly, for all who save its memory; a small part of a larger block is copied out of it."""
        core = _core(x)
        entry = self._entry_with(core, x)
        if entry is not None and isinstance(entry.compressed, Exact):
            self.chooser.share(entry.compressed, x)
            return _view(entry, x)
        self.chooser.keep(x)
        storage = x.untyped_storage()
        numel = storage.nbytes() // x.element_size()
        if numel < self.smallest and storage._cdata not in self.entries:
            return Exact.of(x)
        if entry is None and 2 * core.numel() <= numel and not _overlaps(core):
            entry = self._block(core, Exact.of(core.detach().clone()))
            if entry is not None:
                return _view(entry, x)
        return _view(self._whole(x, numel), x)

    def rounded(self, x: Tensor, rule: Rule) -> View | Exact | Own | Signed | Probabilities:
        """Save `x`, which may be rounded, in codes, or in bits where its function asks for no more."""
        core = _core(x)
        entry = self._entry_with(core, x)
        if entry is not None and isinstance(entry.compressed, Exact):
            self.chooser.share(entry.compressed, x)
            return _view(entry, x)
        wide = False
        if rule.name in PERIODIC and not is_abstract(core) and _bytes_of(core) == core.untyped_storage().nbytes():
            low, high = core.detach().aminmax()  # a whole piece of memory of angles, which rounding would spoil
            wide = bool(high - low > _WIDE)
        if rule.sides is not None or wide:
            return (None if self._is_small(core, x) else self._own(core, x, rule)) or self.exactly(x)
        cast = cast_key(x)
        entry = entry or self.casts.get(cast)
        if entry is not None:
            self.chooser.share(entry.compressed, x)
        else:
            compressed = None if self._is_small(core, x) else self._compressed(core, rule)
            entry = None if compressed is None else self._block(core, compressed)
            if entry is None:
                return self.exactly(x)
            if cast is not None:
                self.casts[cast] = entry
        saved = _view(entry, x)
        if isinstance(entry.compressed, Exact):
            return saved
        return Signed.of(x, saved) if rule.name in SIGNED else Probabilities.of(x, saved)

    def _is_small(self, core: Tensor, x: Tensor) -> bool:
        small = x.numel() < self.smallest or (core.dim() > 1 and 1 in (core.shape[-1], x.shape[-1]))
        return small or _overlaps(core)

    def _own(self, core: Tensor, x: Tensor, rule: Rule) -> Own | None:
        """Return what the function of `rule` asks for of `x`; None if that does not become smaller."""
        key = (memory_key(x), rule.sides)
        own = self.owns.get(key)
        if own is not None:
            self.chooser.share(own.compressed, x)
            return own
        if rule.sides is not None:
            self.chooser.keep(core, in_bits=True)
            compressed = InSides.of(core, rule.sides)
        else:
            compressed = self._compressed(torch.remainder(core.detach(), _TURN), rule)
        if compressed is None or compressed.nbytes >= _bytes_of(core):
            return None
        self.owns[key] = own = Own(compressed, x.shape, StorageWeakRef(x.untyped_storage()))
        return own

    def _block(self, core: Tensor, compressed: Compressed) -> Entry | None:
        """Return the block of `core`; None if it is not smaller, or its memory would take more than as it is."""
        storage = core.untyped_storage()
        if compressed.nbytes >= _bytes_of(core) and not isinstance(compressed, Exact):
            return None
        taken = sum(entry.compressed.nbytes for entry in self._entries_of(storage._cdata) if entry.is_of(core))
        if taken and taken + compressed.nbytes > storage.nbytes():
            return None
        start, dense = int(core.storage_offset()), as_dense(core) is core
        end = start + core.numel() if dense else _end(core)
        form = start, end, core.shape, core.stride(), dense, core._version, core.dtype, current_stream(core)
        entry = Entry(compressed, *form, StorageWeakRef(storage))
        self._remember(entry)
        return entry

    def _compressed(self, x: Tensor, rule: Rule) -> Compressed | None:
        """Return `x` compressed, or None if it is not finite or, from dropout, has no exact form in bits."""
        with torch.no_grad():
            if x.grad_fn is None and rule.may_be_dropouts(x):
                self.chooser.keep(x, in_bits=True)
                return Bits.of(x)
            quantizer: Any = self.chooser.choose(x, rule.name)
            if x.dim() > 1 and hasattr(quantizer, "within"):
                features = x.shape[min(range(x.dim()), key=x.stride)]
                quantizer = within_rows(quantizer, features, rule.name)
            one = x
            if x.dim() > 1 and len(x) > 1 and x.numel() and x.is_contiguous() and not is_abstract(x):
                # One sample as often as there are samples, such as queries that a model learns. Rounded each by itself
                # they would differ, and what cancels between them would not: h − h[:1] of equal rows is 0, and at 8
                # bits the gradient behind it was off by .7 of its norm.
                with torch._C.DisableTorchFunction():  # through the mode of the hooks it takes 4 % of a small step
                    if torch.equal(x[0], x[1]) and torch.equal(x[1:], x[:1].expand(len(x) - 1, *x.shape[1:])):
                        one = x[:1]
            compressed = quantizer.compress(one)
            if not _is_finite(compressed, one):
                return None
            return compressed if one is x else Repeated(compressed, x.shape)

    def _whole(self, x: Tensor, numel: int) -> Entry:
        """Return the whole memory of `x` as a block; what has been saved of it in codes refers to it from now on."""
        storage = x.untyped_storage()
        memory = x.detach().as_strided((numel,), (1,), 0)
        for entry in self._entries_of(storage._cdata):
            if entry.is_of(x):
                entry.compressed = Exact.of(memory.as_strided(entry.shape, entry.stride, entry.start))
        reference = StorageWeakRef(storage)
        form = 0, numel, memory.shape, (1,), True, x._version, x.dtype, current_stream(x)
        whole = Entry(Exact.of(memory), *form, reference)
        self._remember(whole)
        return whole

    def _entry_with(self, core: Tensor, x: Tensor) -> Entry | None:
        """Return a block that holds `core`, which is `x` without repeats."""
        entries = self._entries_of(x.untyped_storage()._cdata)
        if not entries:
            return None
        end = _end(core)
        return next((entry for entry in entries if entry.holds(core, end)), None)

    def _entries_of(self, storage: int) -> list[Entry]:
        found = (reference() for reference in self.entries.get(storage, ()))
        return [entry for entry in found if entry is not None]

    def _remember(self, entry: Entry) -> None:
        entries = self.entries

        def forget(reference: weakref.ref[Entry], storage: int = entry.storage.cdata) -> None:
            entries[storage].remove(reference)
            if not entries[storage]:
                del entries[storage]

        entries.setdefault(entry.storage.cdata, []).append(weakref.ref(entry, forget))


def _view(entry: Entry, x: Tensor) -> View:
    return View(entry, x.shape, x.stride(), int(x.storage_offset()) - entry.start)


def within_rows(quantizer: Any, features: int, function: str) -> Any:
    """Return the quantizer of a tensor with rows of so many features, which the torch function of a name saves.

    Its groups do not span rows; of functions that divide each row by its own norm each row is a group.
    """
    quantizer = quantizer.within(features)
    return _by_rows(quantizer, features) if function in OF_ROWS and isinstance(quantizer, PerGroup) else quantizer


@cache
def _by_rows(quantizer: PerGroup, features: int) -> PerGroup:
    """Return the quantizer with a group for each row, where several would share one."""
    return replace(quantizer, group_size=features) if _LEAST_GROUP <= features < quantizer.group_size else quantizer


def _bytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _is_finite(compressed: Compressed, x: Tensor) -> bool:
    """Return whether all of `x` is finite or has no values; minima of groups and scales are NaN where it is not."""
    if is_abstract(x) or isinstance(compressed, Exact):
        return True
    of_groups = compressed.scale if isinstance(compressed, RotatedCompressed) else getattr(compressed, "minimum", None)
    if isinstance(of_groups, Tensor):
        return not bool(of_groups.isnan().any())
    low, high = x.aminmax()
    return bool(low.isfinite() & high.isfinite())


def _end(x: Tensor) -> int:
    """Return the position after the last element of `x` in its storage."""
    return int(x.storage_offset()) + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def _core(x: Tensor) -> Tensor:
    """Return `x` with every expanded dimension reduced to size 1."""
    if 0 not in x.stride():
        return x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _overlaps(x: Tensor) -> bool:
    """Return whether two elements of `x` may share memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
