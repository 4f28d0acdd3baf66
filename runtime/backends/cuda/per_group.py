"""Per-group quantization on the GPU: x is read once, groups of up to 256 elements from registers twice."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...tensors.levels import UNIFORM, prepare_levels
from ...tensors.packing import GROUP, Rows
from ...tensors.philox import Seed
from ...tensors.traits import KINDS, name_of
from ..reference import per_group as reference
from . import launching
from .codegen.per_group import CODES_PER_BLOCK, GROUPS_PER_BLOCK, per_group_source
from .launching import Loaded, aligned, loaded, seed_arguments


def serves(x: Tensor, group_size: int) -> bool:
    """Return whether the kernels support `x` (N, D): CUDA memory, and groups that end on a byte of codes."""
    return (group_size % GROUP == 0 or group_size >= x.shape[1]) and launching.serves(x)


def quantize(
    x: Tensor, bits: int | Tensor, group_size: int, seed: Seed, room: int = 0, levels: str = UNIFORM
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, minima and ranges of `x` (N, D), as `PerGroupCompressed` saves them.

    The codes of samples with bits of their own take `room` bytes, which are not less than they need. `levels` is a name
    or a key (tensors/levels.py). The device is not waited for.
    """
    if not serves(x, group_size):
        return reference.quantize(x, bits, group_size, seed, room, levels)
    N, D = x.shape
    G = max(1, min(group_size, D))
    rows = Rows(N, D, bits)
    groups = -(-D // G)
    minimum = torch.empty(N, groups, dtype=torch.bfloat16, device=x.device)
    range_ = torch.empty_like(minimum)
    places = _Places.of(rows, room)
    packed = places.empty(rows, x.device)
    arguments = (x.data_ptr(), packed.data_ptr(), minimum.data_ptr(), range_.data_ptr(), N, D, *places.addresses)
    _launch(
        "quantize",
        x,
        rows,
        -(-N * groups // GROUPS_PER_BLOCK),
        *arguments,
        G,
        *seed_arguments(seed),
        *_lines(levels, x),
    )
    return packed, minimum, range_


def dequantize(
    packed: Tensor,
    minimum: Tensor,
    range_: Tensor,
    bits: int | Tensor,
    group_size: int,
    out: Tensor,
    levels: str = UNIFORM,
) -> None:
    """Write the dequantized codes to `out` (N, D)."""
    if not serves(out, GROUP):
        return reference.dequantize(packed, minimum, range_, bits, group_size, out, levels)
    if out.dtype not in KINDS:
        single = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        dequantize(packed, minimum, range_, bits, group_size, single, levels)
        out.copy_(single)
        return
    N, D = out.shape
    G = max(1, min(group_size, D))
    rows = Rows(N, D, bits)
    places = _Places.of(rows, packed.numel())
    packed, minimum, range_ = aligned(packed), aligned(minimum), aligned(range_)
    arguments = (packed.data_ptr(), minimum.data_ptr(), range_.data_ptr(), out.data_ptr(), N, D, *places.addresses)
    _launch("dequantize", out, rows, -(-N * rows.width * GROUP // CODES_PER_BLOCK), *arguments, G, *_lines(levels, out))


def _lines(levels: str, x: Tensor) -> tuple[int, int, int]:
    """Return the address of the lines of `levels` on the device of `x`, their width and the shape."""
    prepared = prepare_levels(levels, x.device)
    return prepared.lines.data_ptr(), prepared.width, prepared.shape


@dataclass(frozen=True, eq=False)
class _Places:
    """Bits and first byte of each sample, where they differ, and the bytes of all codes."""

    bits: Tensor | None
    starts: Tensor | None
    size: int

    @classmethod
    def of(cls, rows: Rows, size: int) -> "_Places":
        return cls(None, None, 0) if isinstance(rows.bits, int) else cls(aligned(rows.bits), rows.starts(), size)

    @property
    def addresses(self) -> tuple[int, int, int]:
        if self.bits is None or self.starts is None:
            return 0, 0, 0
        return self.bits.data_ptr(), self.starts.data_ptr(), self.size

    def empty(self, rows: Rows, device: torch.device) -> Tensor:
        """Return uninitialized memory for the codes."""
        if isinstance(rows.bits, int):
            return torch.empty(rows.N, rows.width * rows.bits, dtype=torch.uint8, device=device)
        return torch.zeros(self.size, dtype=torch.uint8, device=device)


def _launch(name: str, x: Tensor, rows: Rows, blocks: int, *arguments: int) -> None:
    """Run a kernel on the device of `x`; the last of its arguments is the shape of the levels."""
    if blocks:
        bits = rows.bits if isinstance(rows.bits, int) else None
        _kernel(name, name_of(x.dtype), bits, arguments[-1] != 0, x.get_device()).launch(blocks, *arguments)


@cache
def _kernel(name: str, dtype: str, bits: int | None, bent: bool, device: int) -> Loaded:
    return loaded(per_group_source(dtype, bits, bent), name, device)
