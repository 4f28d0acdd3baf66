"""Any graph's saved tensors in few bits: what autograd keeps for the backward pass goes through a quantizer.

    with fewbit.compress_saved_tensors(PerGroup(bits=4)):
        loss = model(x)
    loss.backward()

A saved-tensor hook sees tensors and not what they are for. It leaves alone what compressing would not make smaller or
would spoil (see `compress_saved_tensors`), and compresses each piece of memory once: what is saved again, whole or a
view of it, shares the codes of the first.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import disable
from torch.multiprocessing.reductions import StorageWeakRef

from ..tables import FewbitError
from ..tables.errors import shown
from .abstract import is_abstract
from .layout import as_dense, with_stride
from .prepared import DTYPES
from .quantizers import Compressed, FixedPoint, Quantizer

# What autocast and views put between a parameter and what an op saves of it.
_SAME_VALUES = frozenset(
    name + "Backward0"
    for name in (
        *("Alias", "Detach", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy"),
        *("Transpose", "UnsafeView", "Unsqueeze", "View"),
    )
)


def compress_saved_tensors(
    quantizer: Quantizer, *, smallest: int = 1024, keep: Iterable[Tensor] = ()
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which whatever autograd saves is compressed, and decompressed when the backward pass asks.

    Left alone are

    * parameters, other leaves that require a gradient, their views and casts, and the tensors in `keep`: they stay in
      memory anyway. (A frozen weight that autocast has cast cannot be told from an activation.)
    * integers, booleans and complex numbers; sparse tensors, subclasses, tensors of functorch
    * tensors of fewer than `smallest` elements, and those whose last dimension is 1: statistics, as a rule
    * what the quantizer would not make smaller.

    A tensor that is saved several times, or as views of what was saved whole, is compressed once. Contexts may be
    nested: the innermost counts, as with all of torch's hooks. A second derivative (`create_graph=True`) is that of the
    graph at the decompressed values. The context may surround a compiled model; inside a compiled function it ends the
    graph. There the compiled backward pass decompresses all of a graph before it starts.

    Args:
        quantizer: `PerGroup`, `Outlier`, or whatever has compress(x) → decompress(), nbytes. `FixedPoint` does not fit:
            it needs the scale and shift of each tensor.
        smallest: elements from which on a tensor is compressed.
        keep: tensors to be left alone, as model.buffers() or inputs that you hold.

    Raises:
        FewbitError: `quantizer` cannot compress a tensor by itself.
    """
    if isinstance(quantizer, FixedPoint | type) or not hasattr(quantizer, "compress"):
        raise FewbitError(
            "compress_saved_tensors takes a quantizer that compresses a tensor by itself, as PerGroup(bits=4) or "
            f"Outlier(), not {shown(quantizer)}"
        )
    store = _Store(quantizer, smallest, {t.untyped_storage()._cdata for t in keep})
    # In a compiled function the hooks run between compiled pieces; they are not to be compiled themselves.
    pack: Any = disable(store.pack)
    unpack: Any = disable(_unpack)
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, eq=False)
class _Entry:
    """Compressed memory.

    Attributes:
        compressed: a tensor that fills a stretch of memory.
        start, end: of the stretch, in elements of the storage.
        version, dtype: of the tensor when it was compressed.
        storage: keeps the identity of the storage from being used again, and none of its memory.
    """

    compressed: Compressed
    start: int
    end: int
    version: int
    dtype: torch.dtype
    storage: StorageWeakRef

    def holds(self, x: Tensor, end: int) -> bool:
        """Tell whether the values of `x`, a tensor of the same storage that reaches up to `end`, are in this memory."""
        same = self.version == x._version and self.dtype == x.dtype
        return same and self.start <= x.storage_offset() and end <= self.end


@dataclass(frozen=True)
class _View:
    """What autograd holds in place of a tensor: where it lies in compressed memory."""

    entry: _Entry
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor, decompressed."""
        whole = self.entry.compressed.decompress()
        if (whole.shape, whole.stride(), 0) == (self.shape, self.stride, self.offset):
            return whole
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Copy:
    """What autograd holds in place of a tensor with gaps or repeats, which shares its codes with no other."""

    compressed: Compressed
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Return the tensor, decompressed."""
        return with_stride(self.compressed.decompress(), self.stride).expand(self.shape)


@dataclass(frozen=True, eq=False)
class _Store:
    """What the hooks of one context share.

    Attributes:
        kept: identities of storages to be left alone.
        entries: identity of a storage → what has been compressed of it, as long as a graph holds that.
    """

    quantizer: Quantizer
    smallest: int
    kept: set[int]
    entries: dict[int, list[weakref.ref[_Entry]]] = field(default_factory=dict)

    def pack(self, x: Tensor) -> Tensor | _View | _Copy:
        """Return what autograd shall keep of `x`."""
        if not is_plain(x) or _stays(x):
            return x
        storage = StorageWeakRef(x.untyped_storage())
        if storage.cdata in self.kept:
            return x
        entry = self._entry_with(x, storage.cdata)
        if entry is None:
            if x.numel() < self.smallest or (x.dim() > 1 and x.shape[-1] == 1):
                return x
            core = _without_repeats(x)
            if _overlaps(core):
                return x
            with torch.no_grad():
                compressed = self.quantizer.compress(core)
            if compressed.nbytes >= core.numel() * core.element_size():
                return x
            if core.numel() < x.numel() or as_dense(core) is not core:
                return _Copy(compressed, x.shape, core.stride())
            start = int(x.storage_offset())
            entry = _Entry(compressed, start, start + x.numel(), x._version, x.dtype, storage)
            self._remember(entry)
        return _View(entry, x.shape, x.stride(), int(x.storage_offset()) - entry.start)

    def _entry_with(self, x: Tensor, storage: int) -> _Entry | None:
        end = int(x.storage_offset()) + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        found = (reference() for reference in self.entries.get(storage, ()))
        return next((entry for entry in found if entry is not None and entry.holds(x, end)), None)

    def _remember(self, entry: _Entry) -> None:
        entries = self.entries

        def forget(reference: weakref.ref[_Entry], storage: int = entry.storage.cdata) -> None:
            entries[storage].remove(reference)
            if not entries[storage]:
                del entries[storage]

        entries.setdefault(entry.storage.cdata, []).append(weakref.ref(entry, forget))


def _unpack(kept: Tensor | _View | _Copy) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()


def is_plain(x: Tensor) -> bool:
    """Tell whether `x` is memory that a quantizer takes."""
    known = type(x) in (Tensor, nn.Parameter) or is_abstract(x)
    return (
        known
        and x.layout == torch.strided
        and x.dtype in DTYPES
        and x.numel() > 0
        and not is_functorch_wrapped_tensor(x)
    )


def _stays(x: Tensor) -> bool:
    """Tell whether `x` is a parameter or leaf, or its values in another shape or dtype."""
    if any(isinstance(t, nn.Parameter) or (t.is_leaf and t.requires_grad) for t in (x, x._base) if t is not None):
        return True
    node = x.grad_fn
    while node is not None and node.name() in _SAME_VALUES and node.next_functions:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _without_repeats(x: Tensor) -> Tensor:
    """Return `x` with each dimension in which it repeats itself cut to one."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _overlaps(x: Tensor) -> bool:
    """Tell whether two elements of `x` may be one in memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
