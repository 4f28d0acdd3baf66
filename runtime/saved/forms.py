"""The forms in which a tensor is saved: exact, in bits, a view of codes of its memory, codes of its own, signs beside
codes.

A DTensor of torch is saved in parts: a rank holds a part of one that is sharded, and a copy of one that is replicated.
What is saved is that part, as if it were a tensor of its own, with the history of the whole; in the backward pass it is
a DTensor again. No rank waits for another. Copies are rounded alike where the ranks draw alike, which tensor
parallelism asks of dropout anyway: seed them alike.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..quantizers import Compressed
from ..tensors.exact import Exact
from ..tensors.packing import pack_mask, packed_size, unpack_mask
from ..tensors.spec import TensorSpec, as_dense, flat
from ..tensors.traits import current_stream, is_abstract
from .exactness import Sides


@dataclass(frozen=True, eq=False)
class Bits:
    """A tensor of zeros and one other number, saved exactly in one bit per element.

    Attributes:
        form: shape, layout and dtype of the tensor.
        bits: packed bits, 1 at the other number.
        value: the other number, of one element.
    """

    form: TensorSpec
    bits: Tensor
    value: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Bits | None":
        """Return the bits of `x`, or None if it has more than one number besides 0."""
        if is_abstract(x):
            return None
        x = as_dense(x)
        value, other = x.amax(), flat(x) != 0
        if not torch.equal(flat(x) == value, other) and bool(other.any()):
            return None
        return cls(TensorSpec.of(x), pack_mask(other), value)

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.bits.numel() + self.value.element_size()

    def decompress(self) -> Tensor:
        """Return the tensor."""
        return self.form.filled(unpack_mask(self.bits, self.form.numel)).mul_(self.value)


@dataclass(frozen=True, eq=False)
class InSides:
    """One of few numbers in place of each number of a tensor, in bits: all that its function's gradient asks for.

    Attributes:
        form: shape, layout and dtype of the tensor.
        bits: packed bits of each of the sets.
        numbers: of the sets, and of what is in none.
    """

    form: TensorSpec
    bits: tuple[Tensor, ...]
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, x: Tensor, sides: Sides) -> "InSides":
        """Return on which sides the numbers of `x` lie."""
        x = as_dense(x.detach())
        form = TensorSpec.of(x)
        if is_abstract(x):
            size = packed_size(x.numel(), 1)
            return cls(form, tuple(x.new_empty(size, dtype=torch.uint8) for _ in sides.tests), sides.numbers)
        return cls(form, tuple(pack_mask(test(flat(x))) for test in sides.tests), sides.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return sum(bits.numel() for bits in self.bits)

    def decompress(self) -> Tensor:
        """Return the numbers in the tensor's stead."""
        x = self.form.empty()
        if is_abstract(self.bits[0]):
            return x
        *numbers, other = self.numbers
        x.fill_(other)
        for bits, number in zip(self.bits, numbers, strict=True):
            flat(x).masked_fill_(unpack_mask(bits, self.form.numel).view(torch.bool), number)
        return x


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
        stream: on which codes lie.
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
    stream: int
    storage: StorageWeakRef

    def is_of(self, x: Tensor) -> bool:
        """Return whether `x`, of the same storage, is unchanged since."""
        return self.version == x._version and self.dtype == x.dtype

    def holds(self, core: Tensor, end: int) -> bool:
        """Return whether the values of `core`, a tensor of the same storage that ends at `end`, are in this block."""
        start = core.storage_offset()
        if self.is_dense:
            found = self.is_of(core) and self.start <= start and end <= self.end
        else:
            found = self.is_of(core) and (start, core.shape, core.stride()) == (self.start, self.shape, self.stride)
        return found and (isinstance(self.compressed, Exact) or self.stream == current_stream(core))


@dataclass(frozen=True)
class Repeated:
    """A sample in codes, in place of as many equal ones.

    Attributes:
        compressed: of the one.
        shape: of all.
    """

    compressed: Compressed
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return self.compressed.nbytes

    def decompress(self) -> Tensor:
        """Return all samples, contiguous."""
        return self.compressed.decompress().expand(self.shape).contiguous()


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


# ---- parts of a DTensor ----------------------------------------------------------------------------------------------


def part_of(x: Tensor) -> Tensor | None:
    """Return this rank's part of a DTensor, detached; None for any other tensor."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # not imported: without it there are no DTensors
    if type(x) is Tensor or tensors is None or type(x) is not tensors.DTensor:
        return None
    return x._local_tensor.detach()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class SavedPart:
    """Saved in place of a DTensor.

    Attributes:
        part: what is saved of this rank's part, a tensor or what gives one by `tensor`.
        spec: torch's, where the other parts are.
    """

    part: Any
    spec: Any

    def tensor(self) -> Tensor:
        """Return the DTensor."""
        local = self.part if isinstance(self.part, Tensor) else self.part.tensor()
        tensors: Any = sys.modules["torch.distributed.tensor"]
        return tensors.DTensor(local, self.spec, requires_grad=False)


# ---- the operands of torchao's float8 training -----------------------------------------------------------------------
#
# A `Float8Linear` saves its input as it is, and casts it to float8 in the backward pass, as it did in the forward pass:
#
#     y = Q(x) Q(W)ᵀ,    ∂W = Q(∂y)ᵀ Q(x)
#
# Saved as Q(x), it takes half of a bfloat16, and the gradient is the same bit for bit: torchao's backward pass takes an
# operand that is in float8 already. The layers of TransformerEngine save Q(x) themselves, in memory that no hook
# rounds.

_LAYERS = "torchao.float8.float8_linear"


@dataclass(frozen=True)
class Float8Operand:
    """The quantizer of what float8 layers of one configuration save of their input.

    Attributes:
        config: torchao's, of the layers.
        products: torchao's, of their matrix products.
    """

    config: Any
    products: Any

    @classmethod
    def of(cls, layer: nn.Module) -> "Float8Operand | None":
        """Return that of a layer; None if the gradient of its weight is not that of Q(x), with one scale for all.

        Recipes with a scale a row cast the input along another dimension in the backward pass.
        """
        if type(layer).__module__ != _LAYERS:
            return None
        config: Any = layer.config
        cast = config.cast_config_input_for_grad_weight
        is_cast_with_one_scale = (cast.scaling_type.value, cast.scaling_granularity.value) == ("dynamic", "tensorwise")
        return cls(config, layer.linear_mm_config) if is_cast_with_one_scale else None

    def compress(self, x: Tensor) -> "_Operand":
        """Return Q(x), as the backward pass computes it."""
        from torchao.float8.float8_scaling_utils import (  # pyright: ignore[reportMissingImports]
            GemmInputRole,
            hp_tensor_to_float8_dynamic,
        )

        cast = self.config.cast_config_input_for_grad_weight
        operand = hp_tensor_to_float8_dynamic(
            x.detach(),
            cast.target_dtype,
            self.products,
            gemm_input_role=GemmInputRole.INPUT,
            scaling_granularity=cast.scaling_granularity,
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return _Operand(operand)


@dataclass(frozen=True)
class _Operand:
    """Q(x), a tensor of torchao's class."""

    operand: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and their scale."""
        return self.operand._data.nbytes + self.operand._scale.nbytes

    def decompress(self) -> Tensor:
        """Return it; float8 layers take it for x."""
        return self.operand
