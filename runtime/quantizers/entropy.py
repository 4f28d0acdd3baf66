"""Entropy of a compressed tensor's codes, and their size after a lossless compressor.

V-Quant's paper takes 24.4 % off its 3-bit codes with Lempel-Ziv (Section 5.1). Both numbers count the codes alone,
without the levels, counts, offsets and values saved beside them. The runtime does not compress further: this only
reports what could be gained.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log
from typing import Any, Protocol

import torch
from torch import Tensor

from ...tables import FewbitError
from ..tensors.packing import unpack


class _Packed(Protocol):
    """A tensor compressed by `Outlier`, `PerGroup` or `FixedPoint`: codes in memory order."""

    @property
    def packed(self) -> Tensor: ...

    @property
    def quantizer(self) -> Any: ...


@dataclass(frozen=True)
class CodeSizes:
    """Size of the codes of one or more tensors: packed, at their entropy, and compressed.

    Attributes:
        elements: number of codes, with the padding of the last group of eight.
        packed: bytes of the packed codes.
        entropy: bytes by the Shannon entropy of each tensor's code frequencies: the lower bound for a compressor that
            codes each symbol by itself.
        compressed: bytes of the packed codes after the compressor, each tensor by itself.
        compressor: name of the compressor.
    """

    elements: int
    packed: int
    entropy: float
    compressed: int
    compressor: str

    @property
    def off(self) -> float:
        """Fraction that the compressor takes off; below 0 if it makes the codes larger."""
        return 1 - self.compressed / self.packed if self.packed else 0.0

    @property
    def entropy_off(self) -> float:
        """Fraction between the packed size and the entropy."""
        return 1 - self.entropy / self.packed if self.packed else 0.0


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    """Return the available compressors, the preferred first: zstd and LZ4 if their packages are installed, and zlib."""
    found: dict[str, Callable[[bytes], bytes]] = {}
    try:
        import zstandard

        found["zstd"] = lambda data: zstandard.ZstdCompressor(level=3).compress(data)
    except ModuleNotFoundError:
        pass
    try:
        import lz4.frame as lz4  # pyright: ignore[reportMissingImports]

        found["lz4"] = lambda data: lz4.compress(data)
    except ModuleNotFoundError:
        pass
    found["zlib"] = lambda data: zlib.compress(data, 6)
    return found


def measure(compressed: _Packed, compressor: str | None = None) -> CodeSizes:
    """Return the size of a compressed tensor's codes, packed, at their entropy and compressed.

    Args:
        compressed: tensor compressed by any quantizer.
        compressor: "zstd", "lz4" or "zlib"; None takes the first that is installed.

    Raises:
        FewbitError: `compressor` is not "zstd", "lz4" or "zlib", or its package is not installed.
    """
    known = compressors()
    name = compressor or next(iter(known))
    if name not in known:
        raise FewbitError(f"no compressor {name!r}; installed are {', '.join(known)}")
    packed = compressed.packed.reshape(-1).cpu()
    bits = compressed.quantizer.bits
    elements = packed.numel() * 8 // bits
    counts = torch.bincount(unpack(packed, bits, elements).int(), minlength=1 << bits).double()
    entropy = float(torch.special.entr(counts / max(1, elements)).sum()) / log(2)
    size = len(known[name](packed.numpy().tobytes())) if elements else 0
    return CodeSizes(elements, packed.numel(), entropy * elements / 8, size, name)


def total(parts: Iterable[CodeSizes]) -> CodeSizes:
    """Return the sum over several tensors, all compressed by one compressor.

    Raises:
        FewbitError: `parts` is empty, or names several compressors.
    """
    listed = list(parts)
    names = {part.compressor for part in listed}
    if len(names) != 1:
        raise FewbitError("the codes are of no tensor" if not names else "the codes are of several compressors")
    return CodeSizes(
        sum(part.elements for part in listed),
        sum(part.packed for part in listed),
        sum(part.entropy for part in listed),
        sum(part.compressed for part in listed),
        *names,
    )
