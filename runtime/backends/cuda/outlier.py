"""Outlier quantization on the GPU: the exact threshold digit by digit, reading x three times and writing it once.

    first      histogram of the highest digit of all magnitudes
    survey     outliers above that digit, range of what is below; the few that share it, the candidates, are listed
    refine     histogram of the last digit of candidates (float32 alone)
    count      which candidates are outliers
    add        how many outliers there are in each part of the chunks
    scan       where those of each chunk begin
    quantize   the levels, codes and outliers

The number of outliers follows from the size of x, so nothing waits for the GPU; with a sampled threshold it is read
back. If a warp has more candidates than its part of the list holds, it looks for them in x again.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ....tables import FewbitError
from ...tensors.graphs import is_capturing
from ...tensors.packing import packed_size
from ...tensors.traits import KINDS, name_of
from ..reference import outlier as reference
from ..reference.outlier import POSITION_BLOCK, count_of
from .codegen.outlier import (
    CHUNK,
    CHUNKS_PER_BLOCK,
    SELECTION_BYTES,
    WARPS_PER_BLOCK,
    codes_source,
    has_third_digit,
    selection_source,
)
from .launching import Loaded, aligned, loaded, serves

_LISTED = 1 / 16  # of the elements there is room in the list; of a usual tensor 1 to 2 % are candidates
_ENTRY = 8  # bytes of a candidate
_BLOCKS_PER_MULTIPROCESSOR = 4  # of all kernels of a search, for which the assembler leaves room


def quantize(
    x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return packed, counts, offsets, values and levels of `x` (n,), equal to the reference's."""
    n = x.numel()
    if n == 0 or not serves(x):
        return reference.quantize(x, bits, ratio, relu, value_dtype, sample_every)
    search = _Search.of(x, relu)
    if sample_every > 1:
        search.survey_above(x[::sample_every].contiguous(), ratio)
    else:
        search.survey_largest(count_of(n, ratio))
    search.scan()
    k = search.outliers() if sample_every > 1 else count_of(n, ratio)
    packed, counts, offsets = (
        torch.empty(size, dtype=torch.uint8, device=x.device)
        for size in (packed_size(n, bits), -(-n // POSITION_BLOCK), k)
    )
    values = torch.empty(k, dtype=value_dtype or x.dtype, device=x.device)
    levels = torch.empty(2, dtype=torch.float32, device=x.device)
    results = (packed, counts, offsets, values, levels)
    addresses = (part.data_ptr() for part in (x, *results, search.selection))
    places = (search.equals, search.starts)
    _launch("quantize", x, bits, search.blocks, *addresses, *places, n, k, int(relu), KINDS[values.dtype])
    return results


def dequantize(
    packed: Tensor,
    counts: Tensor,
    offsets: Tensor,
    values: Tensor,
    levels: Tensor,
    bits: int,
    relu: bool,
    out: Tensor,
) -> None:
    """Write the dequantized codes, and the outliers, to `out` (n,)."""
    n = out.numel()
    if n == 0 or not serves(out):
        return reference.dequantize(packed, counts, offsets, values, levels, bits, relu, out)
    if out.dtype not in KINDS:
        single = torch.empty(n, dtype=torch.float32, device=out.device)
        dequantize(packed, counts, offsets, values, levels, bits, relu, single)
        out.copy_(single)
        return
    packed, counts, offsets, values, levels = map(aligned, (packed, counts, offsets, values, levels))
    chunks, scans = -(-n // CHUNK), _scans(n)
    starts = torch.empty(chunks + scans, dtype=torch.int64, device=out.device)
    totals = starts[chunks:].data_ptr()
    _launch("add", out, bits, scans, counts.data_ptr(), totals, n)
    _launch("locate", out, bits, scans, counts.data_ptr(), totals, starts.data_ptr(), n)
    parts = (part.data_ptr() for part in (packed, counts, offsets, values, levels, starts, out))
    _launch("dequantize", out, bits, _blocks(out), *parts, n, values.numel(), int(relu), KINDS[values.dtype])


@dataclass(frozen=True, eq=False)
class _Search:
    """The search for the outliers of `x`, and its memory on the device.

    Attributes:
        x: the tensor (n,).
        relu: whether negative numbers count as 0.
        blocks: of the grid.
        selection: of the tensor as a whole, uint8 (SELECTION_BYTES,).
        memory: what `list`, `listed`, `totals`, `starts`, `equals` and `counts` are addresses in: see outlier.cuh.
        room: entries of each warp in the list.
    """

    x: Tensor
    relu: bool
    blocks: int
    selection: Tensor
    memory: Tensor
    room: int
    list: int
    listed: int
    totals: int
    starts: int
    equals: int
    counts: int

    @classmethod
    def of(cls, x: Tensor, relu: bool) -> "_Search":
        """Allocate the memory of a search."""
        blocks, chunks = _blocks(x), -(-x.numel() // CHUNK)
        warps = blocks * WARPS_PER_BLOCK
        room = int(-(-chunks // warps) * CHUNK * _LISTED)
        # Aligned: multiples of 8 first.
        sizes = (warps * room * _ENTRY, warps * 8, _scans(x.numel()) * 8, chunks * 8, chunks * 8, chunks * 4)
        selection = torch.zeros(SELECTION_BYTES, dtype=torch.uint8, device=x.device)
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=x.device)
        places = (memory.data_ptr() + sum(sizes[:i]) for i in range(len(sizes)))
        return cls(x, relu, blocks, selection, memory, room, *places)

    def survey_largest(self, k: int) -> None:
        """Find the `k` outliers of largest magnitude, among equals the first."""
        if k == 0:
            self._survey()
            return
        self._select(k)
        self._launch("count", *self._chunks, self.x.numel())

    def survey_above(self, sample: Tensor, ratio: float) -> None:
        """Find the outliers: what is above that `ratio` of a `sample`."""
        k = max(1, count_of(sample.numel(), ratio)) if ratio else 0
        if k == 0:
            self._survey()
            return
        of_sample = _Search.of(sample, self.relu)
        of_sample._select(k)
        self._survey(sample=of_sample.selection.data_ptr())

    def scan(self) -> None:
        """Find where the outliers of each chunk begin."""
        n = self.x.numel()
        _launch("add", self.x, None, _scans(n), *self._chunks, self.totals, n)
        self._launch("scan", *self._chunks, self.totals, self.starts, n, blocks=_scans(n))

    def outliers(self) -> int:
        """Return their number; waits for the GPU, which a CUDA graph cannot."""
        if is_capturing(self.x.get_device()):
            raise FewbitError("Outlier: sample_every > 1 waits for the GPU, which a CUDA graph cannot: sample_every=1")
        return int(self.selection[:8].view(torch.int64).item())

    def _select(self, k: int) -> None:
        """Count the digits that tell the `k`-th largest magnitude."""
        self._launch("first", self.x.numel())
        self._survey(rank=k)
        if has_third_digit(name_of(self.x.dtype)):
            self._launch("refine", *self._chunks, self.x.numel())

    def _survey(self, *, rank: int = 0, sample: int = 0) -> None:
        self._launch("survey", sample, *self._chunks, self.x.numel(), rank)

    @property
    def _chunks(self) -> tuple[int, int, int, int, int]:
        return self.counts, self.equals, self.list, self.listed, self.room

    def _launch(self, name: str, *arguments: int, blocks: int | None = None) -> None:
        addresses = (self.x.data_ptr(), self.selection.data_ptr())
        _launch(name, self.x, None, blocks or self.blocks, *addresses, *arguments, int(self.relu))


def _scans(n: int) -> int:
    """Return the number of blocks that scan the chunks of `n` elements, and of the parts that they take."""
    return -(-n // (CHUNK * CHUNKS_PER_BLOCK))


def _blocks(x: Tensor) -> int:
    """Return the number of blocks for all elements of `x`, at most as many as fill the device."""
    return min(-(-x.numel() // (CHUNK * WARPS_PER_BLOCK)), _most_blocks(x.get_device()))


def _launch(name: str, like: Tensor, bits: int | None, blocks: int, *arguments: int) -> None:
    """Run a kernel for the dtype of `like` on its device; `bits` of kernels with codes."""
    _kernel(name, name_of(like.dtype), bits, like.get_device()).launch(blocks, *arguments)


@cache
def _most_blocks(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count * _BLOCKS_PER_MULTIPROCESSOR


@cache
def _kernel(name: str, dtype: str, bits: int | None, device: int) -> Loaded:
    source = selection_source(dtype) if bits is None else codes_source(dtype, bits)
    return replace(loaded(source, name, device), most_blocks=_most_blocks(device))
