"""What is saved exactly in bits: dropout noise, and on which side of a bound each number lies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors.abstract import is_abstract
from ..tensors.layout import as_dense, flat
from ..tensors.packing import pack_mask, packed_size, unpack_mask
from ..tensors.spec import TensorSpec
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
