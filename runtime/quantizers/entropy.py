"""How much smaller the codes of a compressed tensor could still get: their entropy, and a real compressor's result.

V-Quant's paper takes 24.4 % off its 3-bit codes with Lempel-Ziv (Section 5.1). Both numbers are of the codes alone,
not of what is kept beside them. The runtime does not compress so: it is a report of what there is to win.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...tables import FewbitError
from ..tensors.packing import unpack


class _Packed(Protocol):
    """What `Outlier`, `PerGroup` and `FixedPoint` give: codes in memory order."""

    @property
    def packed(self) -> Tensor: ...

    @property
    def quantizer(self) -> Any: ...


@dataclass(frozen=True)
class CodeSizes:
    """Codes of one tensor or of many, and what they could be reduced to.

    Attributes:
        elements: their number, those that fill the last group of eight included.
        packed: bytes that they take.
        entropy: bytes by Shannon's entropy of how often each code occurs in its tensor: the best that any compressor
            does which looks at single codes.
        compressed: bytes that the compressor makes of the packed codes, each tensor by itself.
        compressor: its name.
    """

    elements: int
    packed: int
    entropy: float
    compressed: int
    compressor: str

    @property
    def off(self) -> float:
        """The part by which the compressor makes them smaller; below 0 if it does not."""
        return 1 - self.compressed / self.packed if self.packed else 0.0

    @property
    def entropy_off(self) -> float:
        """The part by which the entropy is smaller."""
        return 1 - self.entropy / self.packed if self.packed else 0.0


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    """Return the compressors there are, the preferred first: zstd and LZ4 if their packages are installed, and zlib."""
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
    """Return what the codes of a compressed tensor could be reduced to.

    Args:
        compressed: of any quantizer.
        compressor: "zstd", "lz4" or "zlib"; None takes the first of these that is installed.

    Raises:
        FewbitError: there is no such compressor, or its package is not installed.
    """
    known = compressors()
    name = compressor or next(iter(known))
    if name not in known:
        raise FewbitError(f"no compressor {name!r}; installed are {', '.join(known)}")
    packed = compressed.packed.reshape(-1).cpu()
    bits = compressed.quantizer.bits
    elements = packed.numel() * 8 // bits
    counts = torch.bincount(unpack(packed, bits, elements).int(), minlength=1 << bits).double()
    entropy = float(torch.special.entr(counts / max(1, elements)).sum()) / torch.log(torch.tensor(2.0)).item()
    size = len(known[name](packed.numpy().tobytes())) if elements else 0
    return CodeSizes(elements, packed.numel(), entropy * elements / 8, size, name)


def total(parts: Iterable[CodeSizes]) -> CodeSizes:
    """Return the sum over several tensors, which one compressor has compressed.

    Raises:
        FewbitError: there are none, or of several compressors.
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
