"""Memory layout of the packed codes of N samples, all with the same bits or each with its own.

The same bits b: uint8 (N, w·b) with w = ⌈D/8⌉ groups of the packing. Separate bits b_n: one row of bytes in which
sample n begins at the next multiple of 8, so that words of any size are aligned, and takes w·b_n; gaps are zero. Bits
that were allocated on a device come with room for the codes of their budget (`SampleBits`): what they take exactly is
known there alone, and to ask would be to wait for the device. Bytes that are left over at the end are zero too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...tables import FewbitError
from ...tables.errors import shown
from .packing import GROUP, pack, unpack

ALIGNMENT = 8  # bytes: the largest word that kernels read of codes

Integers = TypeVar("Integers", Tensor, NDArray[np.int64])


@dataclass(frozen=True, eq=False)
class Rows:
    """Positions of the codes of N samples.

    Attributes:
        N, D: number of samples, of elements in a sample.
        bits: of all samples, or of each: uint8 (N,).
    """

    N: int
    D: int
    bits: int | Tensor

    @property
    def width(self) -> int:
        """Number of groups of the packing in a sample."""
        return -(-self.D // GROUP)

    def starts(self) -> Tensor:
        """Return the first byte of each sample, int64 (N + 1,) on the device of the bits; the last is the size."""
        if isinstance(self.bits, int):
            return torch.arange(self.N + 1) * (self.width * self.bits)
        if self.bits.device.type == "cpu" and type(self.bits) is Tensor:  # numpy's calls take a fraction of torch's
            sizes = aligned_sizes(self.bits.numpy().astype(np.int64), self.width)
            return torch.from_numpy(np.append(0, sizes.cumsum()))
        ends = aligned_sizes(self.bits.long(), self.width).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends])

    def pack(self, codes: Tensor, room: int = 0) -> Tensor:
        """Return the codes (N, D), uint8, packed; those of samples with bits of their own in `room` bytes."""
        codes = torch.nn.functional.pad(codes, (0, self.width * GROUP - self.D))
        if isinstance(self.bits, int):
            return pack(codes, self.bits).view(self.N, self.width * self.bits)
        packed = codes.new_zeros(room)
        for bits, samples, places in self._alike(codes.device):
            packed[places] = pack(codes[samples], bits).view(places.shape)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the codes, uint8 (N, D)."""
        width = self.width * GROUP
        if isinstance(self.bits, int):
            return unpack(packed.view(-1), self.bits, self.N * width).view(self.N, width)[:, : self.D]
        codes = packed.new_empty(self.N, width)
        for bits, samples, places in self._alike(packed.device):
            codes[samples] = unpack(packed[places].view(-1), bits, len(samples) * width).view(len(samples), width)
        return codes[:, : self.D]

    def _alike(self, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each number of bits in use, its samples, and the positions of their bytes."""
        assert isinstance(self.bits, Tensor)
        starts = self.starts()
        for bits in self.bits.unique().tolist():
            samples = (self.bits == bits).nonzero().squeeze(1)
            places = starts[samples].unsqueeze(1) + torch.arange(self.width * bits, device=starts.device)
            yield bits, samples.to(device), places.to(device)


def aligned_sizes(bits: Integers, width: int) -> Integers:
    """Return the bytes from the beginning of each sample of `width` groups to that of the next, for int64 `bits`."""
    return -(-bits * width // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class SampleBits:
    """Bits that were allocated to the samples of a tensor, and room for their codes.

    Attributes:
        bits: uint8 (N,), each from 1 to 8, on the device of the tensor.
        room: bytes that are not less than the codes take; in a compiled graph int64 (1,) on the CPU.
    """

    bits: Tensor
    room: int | Tensor


def most_bytes(N: int, D: int, total: int) -> int:
    """Return bytes in which the codes of `N` samples of `D` elements lie whose bits add up to `total` at most."""
    width = -(-D // GROUP)
    padding = max(-b * width % ALIGNMENT for b in range(1, 9))
    return -(-total * width // ALIGNMENT) * ALIGNMENT + N * padding


def check_sample_bits(bits: object, N: int) -> Tensor:
    """Return the bits of `N` samples as uint8 (N,) on the CPU.

    Raises:
        FewbitError: `bits` is not N integers from 1 to 8.
    """
    try:
        values = torch.as_tensor(bits)
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    integer = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    if values.shape != (N,) or not (integer or N == 0) or (N and not 1 <= int(values.min()) <= int(values.max()) <= 8):
        given = f"those of shape {tuple(values.shape)}" if isinstance(bits, Tensor) else shown(bits)
        raise FewbitError(f"sample_bits are {N} integers from 1 to 8, one a sample, not {given}")
    return values.to("cpu", torch.uint8)


def packed_bytes(bits: Sequence[int], D: int) -> int:
    """Return the bytes of the codes of samples of `D` elements, where each sample has its own bits."""
    width = -(-D // GROUP)
    return sum(-(-b * width // ALIGNMENT) * ALIGNMENT for b in bits)


def sample_bits_list(bits: Tensor | Sequence[int], N: int) -> list[int]:
    """Return the bits of `N` samples of a tensor without values; see `check_sample_bits`.

    No tensor is made of them: under ``torch.device("meta")`` or in fake mode it would have no values either.
    """
    with _disable_current_modes():
        values = bits.tolist() if isinstance(bits, Tensor) else [*bits]
    if len(values) != N or not all(isinstance(b, int) and 1 <= b <= 8 for b in values):
        raise FewbitError(f"sample_bits are {N} integers from 1 to 8, one a sample, not {shown(bits)}")
    return values
