"""Packed codes: 8 consecutive b-bit codes make b bytes, and the codes of samples lie one after the other.

    byte group = Σ_{j=0…7} code_j · 2^{jb}, little-endian:   element 0 in the lowest bits of the first byte

The last group is padded with zeros, so n codes take ⌈n/8⌉·b bytes, for every b from 1 to 8. This file is the
specification in plain torch, on any device; every kernel must give these bytes.

N samples, all with the same bits b: uint8 (N, w·b) with w = ⌈D/8⌉ groups. Separate bits b_n: one row of bytes in which
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

GROUP = 8  # codes in a group: b-bit codes then fill whole bytes


def packed_size(n: int, bits: int) -> int:
    """Return the size in bytes of `n` packed codes of `bits` bits."""
    return (n + GROUP - 1) // GROUP * bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return packed codes, read in row-major order.

    Args:
        codes: uint8, any shape; each below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8 (⌈n/8⌉·bits,) on the same device.
    """
    n = codes.numel()
    padding = codes.new_zeros(-n % GROUP)
    groups = torch.cat([codes.reshape(-1), padding]).view(-1, GROUP)
    # The group's 8·bits bits, lowest first, then regrouped by eight into bytes.
    single = (groups.unsqueeze(-1) >> _shifts(bits, codes)) & 1
    bytes_of_bits = single.view(-1, 8) << _shifts(8, codes)
    return bytes_of_bits.sum(dim=1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the `n` codes, uint8 (n,), that `pack` packed."""
    single = (packed.unsqueeze(-1) >> _shifts(8, packed)) & 1
    codes = (single.view(-1, bits) << _shifts(bits, packed)).sum(dim=1, dtype=torch.uint8)
    return codes[:n]


def pack_mask(mask: Tensor) -> Tensor:
    """Return the packed bits of truth values, read in row-major order: `pack` of one bit, by NumPy on the CPU.

    Args:
        mask: bool, any shape.
    """
    if mask.device.type != "cpu":
        return pack(mask.to(torch.uint8), 1)
    packed = mask.new_empty(packed_size(mask.numel(), 1), dtype=torch.uint8)
    packed.numpy()[:] = np.packbits(mask.reshape(-1).numpy(), bitorder="little")
    return packed


def unpack_mask(packed: Tensor, n: int) -> Tensor:
    """Return the `n` bits, uint8 (n,) of 0 and 1, that `pack_mask` packed."""
    if packed.device.type != "cpu":
        return unpack(packed, 1, n)
    bits = packed.new_empty(n)
    bits.numpy()[:] = np.unpackbits(packed.numpy(), count=n, bitorder="little")
    return bits


def _shifts(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


# ---- samples ---------------------------------------------------------------------------------------------------------

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
        values = bits if isinstance(bits, Tensor) else torch.as_tensor(bits, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0, device="cpu")
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
