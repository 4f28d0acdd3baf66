"""The forms in which a tensor is saved: exact, a view of codes of its memory, codes of its own, signs beside codes."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..quantizers import Compressed
from ..tensors.abstract import is_abstract
from ..tensors.packing import pack_mask, packed_size, unpack_mask


@dataclass(frozen=True)
class Exact:
    """Saved in place of a tensor that is not compressed.

    Detached, because an output that refers to its own graph node would never be freed. Autograd does not check what
    hooks return, so in-place changes are checked here.
    """

    whole: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> "Exact":
        """Return the tensor `x` with its version."""
        return cls(x.detach(), x._version)

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.whole.numel() * self.whole.element_size()

    def decompress(self) -> Tensor:
        """Return the tensor, as `tensor` does."""
        return self.tensor()

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: the tensor was modified in place.
        """
        if self.whole._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.whole.shape)} is at version {self.whole._version}, expected version "
                f"{self.version} instead"
            )
        return self.whole


class Exactly:
    """The quantizer that a `Chooser` gives a tensor to be saved as it is: once, as codes are, for all its users."""

    def compress(self, x: Tensor) -> Exact:
        """Return `x`; a copy if it is a part of a larger block of memory, which it would keep alive."""
        return Exact.of(x if x.numel() * x.element_size() == x.untyped_storage().nbytes() else x.clone())


@dataclass(eq=False)
class Entry:
    """A block of memory that is saved.

    Attributes:
        compressed: a tensor of shape `shape`, and of strides `stride` if it is dense; exact from when one of its users
            must have it exactly.
        start, end: bounds of the block, in elements of the storage.
        shape, stride: of the tensor; one with gaps between its elements serves for no other.
        is_dense: whether it has no gaps.
        version, dtype: of the tensor when it was compressed.
        storage: weak reference that prevents reuse of the storage's identity, without its memory.
    """

    compressed: Compressed
    start: int
    end: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_dense: bool
    version: int
    dtype: torch.dtype
    storage: StorageWeakRef

    def is_of(self, x: Tensor) -> bool:
        """Return whether `x`, of the same storage, is unchanged since."""
        return self.version == x._version and self.dtype == x.dtype

    def holds(self, core: Tensor, end: int) -> bool:
        """Return whether the values of `core`, a tensor of the same storage that ends at `end`, are in this block."""
        start = core.storage_offset()
        if self.is_dense:
            return self.is_of(core) and self.start <= start and end <= self.end
        return self.is_of(core) and (start, core.shape, core.stride()) == (self.start, self.shape, self.stride)


@dataclass(frozen=True)
class View:
    """Saved in place of a tensor: its shape, strides and offset in a block."""

    entry: Entry
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor, decompressed."""
        whole = self.entry.compressed.decompress()
        if not self.entry.is_dense:
            return whole.expand(self.shape)
        if (whole.shape, whole.stride(), 0) == (self.shape, self.stride, self.offset):
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class Own:
    """Saved in place of a tensor: what serves only functions that ask for no more of it.

    Attributes:
        compressed: of the tensor without repeats.
        shape: of the tensor.
        storage: weak reference that prevents reuse of the storage's identity, without its memory.
    """

    compressed: Compressed
    shape: torch.Size
    storage: StorageWeakRef

    def tensor(self) -> Tensor:
        """Return what its function asks for."""
        return self.compressed.decompress().expand(self.shape)


@dataclass(frozen=True)
class Signed:
    """Saved in place of a tensor: codes, and a bit where it is positive, which rounding must not change.

    Attributes:
        codes: of the tensor.
        positive: packed bits, in memory order of the tensor that `codes` gives.
    """

    codes: "View | Exact"
    positive: Tensor

    @classmethod
    def of(cls, x: Tensor, codes: "View | Exact") -> "Signed":
        """Return `codes` of `x` with its signs."""
        if is_abstract(x):
            return cls(codes, x.new_empty(packed_size(x.numel(), 1), dtype=torch.uint8))
        return cls(codes, pack_mask(x.detach() > 0))

    def tensor(self) -> Tensor:
        """Return the tensor, decompressed."""
        x = self.codes.tensor()
        if is_abstract(x):
            return x
        positive = unpack_mask(self.positive, x.numel()).to(torch.bool).view(x.shape)
        tiny = torch.finfo(x.dtype).tiny
        return torch.where(positive, x.clamp_min(tiny), x.clamp_max(0.0))


@dataclass(frozen=True)
class Probabilities:
    """Saved in place of what softmax returned: codes, which sum to 1 again once they are read.

    The gradient is p·(g − Σp·g). Where the g of a row have a mean beside which they hardly differ, as values of
    attention behind a sigmoid have, a sum of p that is off by 1 % left more of the mean than there is of the gradient.

    Attributes:
        codes: of the tensor.
        dimension: that it sums to 1 over.
    """

    codes: View
    dimension: int

    @classmethod
    def of(cls, x: Tensor, codes: View) -> "Probabilities | View":
        """Return `codes`, of `x`, and where it is a softmax over which dimension."""
        node = x.grad_fn
        if node is None or node.name() not in ("SoftmaxBackward0", "SafeSoftmaxBackward0"):
            return codes
        dimension: int = node._saved_dim  # pyright: ignore[reportAttributeAccessIssue]
        return cls(codes, dimension if dimension < x.dim() else dimension - 2**64)  # torch has -1 without its sign

    def tensor(self) -> Tensor:
        """Return the tensor, decompressed."""
        x = self.codes.tensor()
        if is_abstract(x) or isinstance(self.codes.entry.compressed, Exact):
            return x
        total = x.sum(self.dimension, keepdim=True)
        return x.div_(total.masked_fill_(total == 0, 1.0))
