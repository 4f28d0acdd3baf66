"""The packing format: 8 consecutive b-bit codes make b bytes.

    byte group = Σ_{j=0…7} code_j · 2^{jb}, little-endian:   element 0 in the lowest bits of the first byte

The last group is padded with zeros, so n codes take ⌈n/8⌉·b bytes, for every b from 1 to 8. This file is the
specification in plain torch, on any device; every kernel must give these bytes.
"""

import numpy as np
import torch
from torch import Tensor

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
