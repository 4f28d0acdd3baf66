"""Value-aware quantization in plain torch: see quantizers/outlier.py for the mathematics."""

import torch
from torch import Tensor

from ...tensors.packing import pack, unpack
from ...tensors.spec import flat
from ...tensors.traits import largest, smallest

POSITION_BLOCK = 240  # a full block's count fits 8 bits, and 16 divides it
LEAST_SPAN = 2.0**-100  # of what is no outlier: the step's inverse is to be finite
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000  # in the bits of float32: all but the sign; infinity


def magnitudes(x: Tensor, relu: bool) -> Tensor:
    """Return int32 in the order of the magnitudes of `x` (with `relu`, of max(0, x)), every NaN above all."""
    pattern = x.float().view(torch.int32)
    magnitude = (pattern & _MAGNITUDE).clamp(max=_INFINITY + 1)
    return torch.where((pattern < 0) & (magnitude <= _INFINITY), 0, magnitude) if relu else magnitude


def count_of(n: int, ratio: float) -> int:
    """Return k, the number of outliers among `n` elements at an exact threshold."""
    return round(ratio * n)


def quantize(
    x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return packed, counts, offsets, values and levels of `x` (n,), as `OutlierCompressed` saves them."""
    keys = magnitudes(x, relu)
    if sample_every > 1:
        keep = keys > sampled_threshold(keys[::sample_every], ratio)
    else:
        keep = _largest_of(keys, count_of(x.numel(), ratio))
    rest = x[~keep].float() if x.numel() else x.new_zeros(1, dtype=torch.float32)
    rest = rest if rest.numel() else rest.new_zeros(1)
    levels = levels_of(rest.amin(), rest.amax(), (rest == 0).any(), bits, relu)
    positions = keep.nonzero().squeeze(1)
    counts = torch.bincount(positions // POSITION_BLOCK, minlength=-(-x.numel() // POSITION_BLOCK))
    return (
        codes_of(x, levels, bits, relu),
        counts.to(torch.uint8),
        (positions % POSITION_BLOCK).to(torch.uint8),
        kept_values(x[keep].float(), value_dtype or x.dtype),
        levels,
    )


def levels_of(low: Tensor, high: Tensor, has_zeros: Tensor, bits: int, relu: bool) -> Tensor:
    """Return the lowest level and the step, float32 (2,), for a rest from `low` to `high`, float32 ().

    With `has_zeros`, bool (), one of the levels is 0.
    """
    low = torch.zeros_like(low) if relu else low + 0  # no −0
    span = high - low
    steps = span.new_full((), steps_of(bits, relu))
    step = span.clamp(min=LEAST_SPAN) / steps
    below, step_with_zero = _zero_level(low, high, steps)
    step_with_zero = torch.maximum(step_with_zero, span.new_full((), LEAST_SPAN) / steps)
    has_zero_level = has_zeros & (low < 0) & (high >= 0)
    levels = torch.where(
        has_zero_level, torch.stack([0 - below * step_with_zero, step_with_zero]), torch.stack([low, step])
    )
    return torch.where(span.isfinite(), levels, torch.nan)


def _zero_level(low: Tensor, high: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of levels below 0, and the least step that then reaches `low` and `high`.

    Of the two numbers of levels next to the share of the range below 0, the one with the smaller step. All are float32
    ().
    """
    most = steps - (high > 0).float()
    first = (-low / (high - low) * steps).floor().clamp(min=1).minimum(most)
    second = (first + 1).minimum(most)
    distances = [torch.maximum(-low / z, torch.where(z < steps, high / (steps - z), 0)) for z in (first, second)]
    closer = distances[1] < distances[0]
    below, step = torch.where(closer, second, first), torch.where(closer, distances[1], distances[0])
    one_alone = most == 0  # one bit: of two levels only one is not 0
    return torch.where(one_alone, (high < -low).float(), below), torch.where(one_alone, torch.maximum(high, -low), step)


def steps_of(bits: int, relu: bool) -> int:
    """Return the number of steps that the range of the rest spans."""
    return (1 << bits) - (2 if relu else 1)


def kept_values(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of outliers, float32, as saved in `dtype`."""
    limit = largest(dtype)
    values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    kept = values.to(dtype)
    return torch.where((values > 0) & (kept == 0), smallest(dtype), kept)  # positive numbers stay positive, for ReLU


def sampled_threshold(sample: Tensor, ratio: float) -> int:
    """Return the magnitude above which outliers begin, from a `sample` of all; 2^31 − 1 to have none."""
    if not ratio or not sample.numel():
        return _MAGNITUDE
    return int(_kth_largest(sample, max(1, count_of(sample.numel(), ratio))))


def _kth_largest(keys: Tensor, k: int) -> Tensor:
    if torch.are_deterministic_algorithms_enabled():  # GPUs then refuse to select, for the sake of indices
        return keys.sort().values[keys.numel() - k]
    return keys.kthvalue(keys.numel() - k + 1).values  # selection, not sorting


def _largest_of(keys: Tensor, k: int) -> Tensor:
    """Return a mask of the `k` largest, among equals the first: bool (n,)."""
    if k == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    threshold = _kth_largest(keys, k)
    above, equal = keys > threshold, keys == threshold
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))


def codes_of(x: Tensor, levels: Tensor, bits: int, relu: bool) -> Tensor:
    """Return the packed codes of `x` (n,)."""
    least, step = levels
    top = (1 << bits) - 1
    y = (x.float() - least) * (1 / step) + (1.5 if relu else 0.5)
    codes = y.nan_to_num(0).clamp(int(relu), top)  # with relu code 0 is for x ≤ 0 only, not for NaN
    return pack((torch.where(x <= 0, 0, codes) if relu else codes).to(torch.uint8), bits)


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
    out.copy_(level_values(levels, bits, relu, out.dtype)[unpack(packed, bits, n).int()])
    out[positions_of(counts, offsets, n)] = values.to(out.dtype)


def positions_of(counts: Tensor, offsets: Tensor, n: int) -> Tensor:
    """Return the positions of outliers in memory order: int64 (k,), increasing, all below `n` for any `counts`."""
    ends = counts.cumsum(0, dtype=torch.int64)
    order = torch.arange(offsets.numel(), device=offsets.device)
    block = torch.searchsorted(ends, order, right=True)
    return (block * POSITION_BLOCK + offsets).clamp(max=n - 1)


def level_values(levels: Tensor, bits: int, relu: bool, dtype: torch.dtype) -> Tensor:
    """Return the value of each code in a tensor of `dtype`: float32 (2^b,)."""
    codes = torch.arange(1 << bits, dtype=torch.float32, device=levels.device)
    least, step = levels
    limit = largest(dtype)
    if not relu:
        return (least + codes * step).clamp(-limit, limit)
    values = ((codes - 1) * step).clamp(smallest(dtype), limit)
    return torch.where(codes == 0, 0 * step, values)


def masked(grad: Tensor, packed: Tensor, bits: int) -> Tensor:
    """Return the dense tensor `grad` where the codes, in its memory order, are not 0, else 0."""
    positive = torch.empty_like(grad, dtype=torch.bool)
    flat(positive).copy_(unpack(packed, bits, grad.numel()) != 0)
    return torch.where(positive, grad, 0)
