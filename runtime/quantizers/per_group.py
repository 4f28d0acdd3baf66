"""Per-group quantization with stochastic rounding (ActNN, Section 4.1).

A sample's D elements are cut into groups of G. With B = 2^b − 1, a group h of minimum Z and range R is kept as

    u = B (h − Z) / R,      code = ⌈u⌉ with probability u − ⌊u⌋, else ⌊u⌋,      ĥ = code · R / B + Z,      E[ĥ] = h

Z and R are those that are *kept*, in bfloat16: Z is the minimum rounded down, R is max h − Z rounded up, so [Z, Z + R]
covers the group, and nothing is biased by their rounding.

Arithmetic is float32, and one of its steps never merges with the next (no fused multiply-add), so that every device
finds the same codes: y = (h − Z) · (2^16·B / R) + ½ is cut to an integer v, and code = min(B, ⌊(v + ξ) / 2^16⌋) with ξ
of 16 random bits (philox.py). So E[code] = v / 2^16, and |E[ĥ] − h| stays below R/B · 2^-15, that is 1/32,000 of the
distance of two levels; a value that is a level comes back as it is.

Three kinds of groups are told apart by the 32 bits that the others use for Z and R:

    constant    exact. The sign of R is set; the 32 bits of the value are Z's 16, the lowest bit of any code, and the
                lower 15 of R's.
    not finite  NaN throughout, so that a NaN or an infinity cannot be overlooked: Z is NaN. It spoils its own group
                alone. Numbers and ranges above bfloat16's largest, 3.39·10^38, count as infinite.
    tiny        R is at least 2^-100.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..backends.cpu import per_group as cpu
from ..backends.cuda import per_group as cuda
from ..backends.reference import per_group as reference
from ..tensors.abstract import is_abstract, scratch
from ..tensors.checks import check_integer
from ..tensors.dtypes import as_kind, total_bytes
from ..tensors.layout import as_dense, flat, with_stride
from ..tensors.packing import GROUP
from ..tensors.philox import draw_seed
from ..tensors.plain import has_kernels
from ..tensors.rows import check_sample_bits, packed_bytes, sample_bits_list
from ..tensors.spec import TensorSpec
from .base import check_tensor
from .validation import Unpickled, check_form, check_groups

LEAST_ROW = 64  # elements; shorter rows share a group


@dataclass(frozen=True)
class PerGroup(Unpickled):
    """ActNN's quantizer: b-bit codes against the minimum and range of each group, rounded stochastically.

    A sample is x[n], its elements in memory order; a tensor of one dimension, or none, is one sample. The last group of
    a sample may be shorter; none reaches into the next. Compressed are N·⌈D/8⌉·b bytes of codes and 4 bytes a group:
    b + 0.125 bits per element at G = 256 where D is a multiple of 256.

    Unbiased: E[decompress()] = x, up to float32 arithmetic and the rounding of the result to the dtype of x.
    |decompress() − x| < R/B in a group of kept range R, where max − min ≤ R ≤ (1 + 2^-7)·(max − min + 2^-7·|min|)
    unless the group is tiny.

    Attributes:
        bits: b, 1 to 8.
        group_size: G, elements in a group.

    Raises:
        FewbitError: an attribute is none of these.
    """

    bits: int = 2
    group_size: int = 256

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, 1, 8)
        check_integer("group_size", self.group_size, 1, 2**31)

    def within(self, features: int) -> "PerGroup":
        """Return this quantizer with groups that do not reach over rows of `features` elements.

        Samples are whole rows that lie one after another, such as the tokens of a text. A row of large numbers then
        does not spoil its neighbours, and a row of zeros comes back as zeros. Rows of fewer than 64 elements share a
        group, as few as fill it. See `group_within` for the size, and so the cost, 32 bits a group: 0.125 bits an
        element where 256 divides `features`, and at most 0.5.

        Example:
            PerGroup(bits=4).within(768).group_size == 256, .within(96) == 96, .within(32) == 64
        """
        return _within(self, features)

    def compress(
        self, x: Tensor, *, sample_bits: Tensor | Sequence[int] | None = None, generator: torch.Generator | None = None
    ) -> "PerGroupCompressed":
        """Return `x` in few bits.

        Args:
            x: float16, bfloat16, float32 or float64 (which is rounded to float32 first), of any shape and layout.
            sample_bits: bits of each sample, N integers from 1 to 8, in place of `bits`. The codes of a sample are
                those that a quantizer of so many bits gives it from the same seed.
            generator: the rounding is seeded by one number from it, by default from a stream of fewbit's own, which
                `torch.manual_seed` restarts (key_stream.py). The same seed gives the same codes on every device.

        Raises:
            FewbitError: `x` is no such tensor, or `sample_bits` are not its.
        """
        check_tensor("PerGroup", x)
        x = as_dense(x.detach())
        rows = _samples(x)
        if is_abstract(x):
            return PerGroupCompressed(self, TensorSpec.of(x), *_abstract(rows, self, sample_bits))
        bits = self.bits if sample_bits is None else check_sample_bits(sample_bits, rows.shape[0])
        seed = draw_seed(generator)
        if has_kernels(x):
            quantize = cpu.quantize
        else:
            quantize = cuda.quantize if cuda.serves(rows, self.group_size) else reference.quantize
        kept = quantize(as_kind(rows, keep_positive=False), bits, self.group_size, seed)
        return PerGroupCompressed(self, TensorSpec.of(x), bits, *kept)


@cache
def group_within(features: int, most: int) -> int:
    """Return the elements of a group that does not reach over rows of `features` elements.

    The largest divisor of `features` from 64 (or half of `most`) to `most`, of those that end where bytes of codes do
    if there are any; else the least divisor above. Of shorter rows the fewest that fill 64 elements, and end so if
    `most` allows it.
    """
    shared = min(LEAST_ROW, most)
    if features < shared:
        few = range(-(-shared // features) * features, most + 1, features)
        return next((g for g in few if g % GROUP == 0), few[0] if few else max(1, most // features) * features)
    divisors = [g for g in range(min(LEAST_ROW, -(-most // 2)), min(most, features) + 1) if features % g == 0]
    if not divisors:
        return next(g for g in range(most + 1, features + 1) if features % g == 0)
    return max([g for g in divisors if g % GROUP == 0] or divisors)


@cache
def _within(quantizer: PerGroup, features: int) -> PerGroup:
    return replace(quantizer, group_size=group_within(max(features, 1), quantizer.group_size))


@dataclass(frozen=True, eq=False)
class PerGroupCompressed(Unpickled):
    """What `PerGroup` keeps of a tensor of N samples of D elements.

    Attributes:
        quantizer: what compressed it.
        form: of the tensor.
        bits: of all samples, or of each: uint8 (N,) on the CPU.
        packed: codes, uint8 (N, ⌈D/8⌉·b), each sample packed by itself (packing.py); where each sample has bits of its
            own one row of them, as rows.py tells.
        minimum: Z, bfloat16 (N, ⌈D/G⌉).
        range: R, bfloat16 (N, ⌈D/G⌉).
    """

    quantizer: PerGroup
    form: TensorSpec
    bits: int | Tensor
    packed: Tensor
    minimum: Tensor
    range: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes kept: codes, minima and ranges, and the bits of each sample where they differ."""
        of_samples = () if isinstance(self.bits, int) else (self.bits,)
        return total_bytes((self.packed, self.minimum, self.range, *of_samples))

    def check_contents(self) -> None:
        """Raise FewbitError if the parts are not those of a tensor of the form."""
        check_form("PerGroup", self.form)
        parts = (self.packed, self.minimum, self.range)
        group_size = getattr(self.quantizer, "group_size", None)
        check_groups("PerGroup", _sizes(self.form.shape), self.bits, parts, group_size, self.form.device)

    def decompress(self) -> Tensor:
        """Return the tensor, in its shape, dtype and layout. What had gaps or repeats lies as its clone would.

        Raises:
            FewbitError: the parts are not those of a tensor of the form.
        """
        self.check_contents()
        form = self.form
        sizes = _sizes(form.shape)
        in_order = _samples_first(form.shape, form.stride)
        out = form.empty() if in_order else torch.empty(form.shape, dtype=form.dtype, device=form.device)
        if is_abstract(out):
            return with_stride(out, form.stride)
        rows = flat(out).view(sizes)
        if has_kernels(out):
            dequantize = cpu.dequantize
        else:
            dequantize = cuda.dequantize if cuda.serves(rows, GROUP) else reference.dequantize
        dequantize(self.packed, self.minimum, self.range, self.bits, self.quantizer.group_size, rows)
        return with_stride(out, form.stride)


def _sizes(shape: torch.Size) -> tuple[int, int]:
    """Return samples and elements in a sample."""
    if len(shape) < 2:
        return 1, shape.numel()
    return shape[0], shape[1:].numel()


def _samples_first(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Tell whether the samples of a dense tensor lie one after another."""
    return len(shape) < 2 or shape.numel() == 0 or shape[0] == 1 or stride[0] == shape[1:].numel()


def _samples(x: Tensor) -> Tensor:
    """Return the dense tensor `x` as (N, D), each sample in memory order: a view, unless samples lie interleaved."""
    x = x if _samples_first(x.shape, x.stride()) else x.contiguous()
    return flat(x).view(_sizes(x.shape))


def _abstract(
    rows: Tensor, quantizer: PerGroup, sample_bits: Tensor | Sequence[int] | None
) -> tuple[int | Tensor, Tensor, Tensor, Tensor]:
    """Return bits, codes, minima and ranges of the sizes of those of `rows` (N, D), which have no values."""
    bits = quantizer.bits
    with scratch():
        packed, minimum, range_ = reference.quantize(rows, bits, quantizer.group_size, seed=0)
    if sample_bits is None:
        return bits, packed, minimum, range_
    size = packed_bytes(sample_bits_list(sample_bits, len(rows)), rows.shape[1])
    return rows.new_empty(len(rows), dtype=torch.uint8), rows.new_empty(size, dtype=torch.uint8), minimum, range_
