"""Outlier quantization on the CPU: the threshold is bracketed by a sample, instead of selecting among all elements.

    bracket   a sample gives a bound that is almost surely a little below the threshold
    survey    one pass over x, 64 elements to a word of bits, records the elements above the bound, the candidates,
              and the range of the others; all threads
    choose    selects the exact threshold among the few candidates; those below it belong to the rest, whose levels
              are now known
    keep      a second pass over x: codes, and the candidates that are outliers; all threads

If the sample was misleading, the reference compresses instead. The four kernels, in outlier_quantizer.py, share one
`State` (outlier_state.py): between the layers of a network, when caches hold other data, a call of NumPy or torch takes
as long as computing with 10,000 elements. outlier_dequantizer.py has the kernels of the way back.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from ...tensors import host_memory
from ...tensors.packing import packed_size
from ...tensors.traits import KINDS
from ..reference import outlier as reference
from ..reference.outlier import POSITION_BLOCK, count_of, steps_of
from .outlier_dequantizer import dequantizer, masker
from .outlier_quantizer import bracketer, chooser, keeper, surveyor
from .outlier_state import CROWDED, DONE, LANES, SPAN, State
from .threads import parts_of, run

_SAMPLE = (
    1 << 13
)  # elements that give the bound: at a ratio of 3 %, 246 above it, so 4σ add a quarter to the candidates


def quantize(
    x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return packed, counts, offsets, values and levels of `x` (n,), equal to the reference's."""
    parts = _quantize(x, bits, ratio, relu, value_dtype, sample_every) if x.numel() else None
    return parts or reference.quantize(x, bits, ratio, relu, value_dtype, sample_every)


def _quantize(
    x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """Return the results of `quantize`, or None if the sample was misleading."""
    n = x.numel()
    stride, rank, below, k, expected = _bracket(n, ratio, sample_every)
    blocks = -(-n // SPAN)
    parts = parts_of(blocks)
    # Twice the average for each part, because parts differ.
    room = min(n, expected if parts == 1 else 2 * expected // parts) + SPAN
    levels = torch.empty(2, dtype=torch.float32, device="cpu")
    state = State(
        *(x.data_ptr(), KINDS[x.dtype], n, int(relu), bits, steps_of(bits, relu)),
        *(stride, rank, below, k, parts, blocks, room),
        levels=levels.data_ptr(),
    )
    memory = _workspace(state, -(-n // stride), parts * room)
    address = ctypes.addressof(state)
    run(bracketer(), 1, address)
    for _ in range(2):
        run(surveyor(), blocks, address)
        run(chooser(), 1, address)
        if state.result != CROWDED:
            break
        used = np.concatenate([[0], _view(memory, state.used, parts).cumsum()])
        memory = _workspace(state, int(used[-1]), int(used[-1]))
        _view(memory, state.starts, parts + 1)[:] = used
    if state.result != DONE:
        return None
    kept = state.kept
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8, device="cpu")
    counts = torch.empty(-(-n // POSITION_BLOCK), dtype=torch.uint8, device="cpu")
    offsets = torch.empty(kept, dtype=torch.uint8, device="cpu")
    values = torch.empty(kept, dtype=value_dtype or x.dtype, device="cpu")
    state.packed, state.counts, state.offsets = packed.data_ptr(), counts.data_ptr(), offsets.data_ptr()
    state.values, state.value_kind = values.data_ptr(), KINDS[values.dtype]
    run(keeper(), blocks, address)
    return packed, counts, offsets, values, levels


def _bracket(n: int, ratio: float, sample_every: int) -> tuple[int, int, int, int, int]:
    """Return the parameters of the bound, and the expected number of candidates.

    Returns:
        stride: sampling stride.
        rank: the rank-th largest sample is the bound; with 0 nothing is above it.
        below: offset below it, 1 to include its equals among the candidates.
        k: number of outliers; −1 if all candidates are.
        expected: usual upper limit of the number of candidates.
    """
    k = count_of(n, ratio)
    stride = sample_every
    if stride > 1:
        size = -(-n // stride)
        return stride, max(1, count_of(size, ratio)) if ratio else 0, 0, -1, 2 * k
    stride = max(1, n // _SAMPLE) | 1  # odd: an even stride may sample the same column of every image, at its edge
    size = -(-n // stride)
    if stride == 1 or k == 0:
        return stride, k, 1, k, k
    share = k / n * size
    rank = min(size, int(share + 4 * share**0.5 + 8))  # four standard deviations above its share
    return stride, rank, 1, k, int((rank + 4 * rank**0.5) / size * n)


def _workspace(state: State, keys: int, candidates: int) -> np.ndarray:
    """Allocate memory for `keys` keys of a sample and `candidates`, and write the addresses into the state."""
    parts = state.parts
    sizes = {
        "keys": 4 * max(keys, candidates),
        "found": 4 * state.blocks,
        "ends": 12 * LANES * parts,
        "starts": 8 * (parts + 1),
        **dict.fromkeys(("used", "firsts", "quotas"), 8 * parts),
        "places": 2 * candidates,
        "picked": 4 * candidates,
    }
    size = sum(-(-size // 64) * 64 for size in sizes.values())
    memory = np.empty(size, np.uint8)
    address = memory.ctypes.data
    for name, size in sizes.items():
        setattr(state, name, address)
        address += -(-size // 64) * 64  # a line of the processor's caches: threads write to neighbours
    return memory


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
    if out.dtype not in KINDS:
        single = torch.empty(n, dtype=torch.float32, device="cpu")
        dequantize(packed, counts, offsets, values, levels, bits, relu, single)
        out.copy_(single)
        return
    codes = (packed.data_ptr(), n, bits, levels.data_ptr(), int(relu))
    outliers = (counts.data_ptr(), offsets.data_ptr(), values.data_ptr(), values.numel(), KINDS[values.dtype])
    run(dequantizer(), -(-n // SPAN), *codes, *outliers, out.data_ptr(), KINDS[out.dtype])


def masked(grad: Tensor, packed: Tensor, bits: int) -> Tensor:
    """Return the dense tensor `grad` where the codes, in its memory order, are not 0, else 0."""
    out = host_memory.empty_like(grad)
    n = grad.numel()
    run(masker(), -(-n // SPAN), packed.data_ptr(), n, bits, grad.data_ptr(), out.data_ptr(), grad.element_size())
    return out


def _view(memory: np.ndarray, address: int, n: int) -> np.ndarray:
    """Return the `n` int64 numbers at an address in `memory`."""
    start = int(address) - memory.ctypes.data
    return memory[start : start + 8 * n].view(np.int64)
