"""Per-group quantization with stochastic rounding (ActNN, Section 4.1).

A sample's D elements are cut into groups of G. With B = 2^b − 1, a group h of minimum Z and range R is quantized to

    u = B (h − Z) / R,      code = ⌈u⌉ with probability u − ⌊u⌋, else ⌊u⌋,      ĥ = code · R / B + Z,      E[ĥ] = h

Z and R are the *saved* parameters, in bfloat16: Z is the minimum rounded down, R is max h − Z rounded up, so [Z, Z + R]
covers the group, and their rounding introduces no bias.

The levels h may be rounded to need not be equally far apart: `levels` puts them where values lie (tensors/levels.py),
which lowers the variance at no cost in bytes. Then u is the position between them.

Arithmetic is float32 without fused multiply-add, so that every device computes the same codes:
y = (h − Z) · (2^16·B / R) + ½ is truncated to an integer v, and code = min(B, ⌊(v + ξ) / 2^16⌋) with ξ of 16 random
bits (philox.py). So E[code] = v / 2^16, and |E[ĥ] − h| stays below R/B · 2^-15, that is 1/32,000 of the distance of two
levels; a value that is a level comes back unchanged.

The 32 bits of Z and R also encode three special kinds of groups:

    constant    exact. The sign of R is set; the 32 bits of the value are Z's 16, the lowest bit of any code, and the
                lower 15 of R's.
    not finite  NaN throughout, so that a NaN or an infinity cannot be overlooked: Z is NaN. Only its own group is
                affected. Numbers and ranges above bfloat16's largest, 3.39·10^38, count as infinite.
    tiny        R is at least 2^-64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import check_integer, shown
from .. import ops
from ..backends.cpu import per_group as cpu
from ..backends.cuda import per_group as cuda
from ..ops.declare import keys_of
from ..tensors.levels import UNIFORM, check_levels, register_table
from ..tensors.packing import GROUP, SampleBits, check_sample_bits, packed_bytes, packed_size, sample_bits_list
from ..tensors.philox import draw_seed, seed_beside
from ..tensors.spec import TensorSpec, as_dense, flat, with_stride
from ..tensors.traits import as_kind, is_abstract, total_bytes
from ..tensors.validation import Unpickled, check_form, check_groups
from .base import check_tensor, kernels_of, seeds_beside

LEAST_ROW = 64  # elements; shorter rows share a group


@dataclass(frozen=True)
class PerGroup(Unpickled):
    """ActNN's quantizer: b-bit codes relative to the minimum and range of each group, rounded stochastically.

    A sample is x[n], its elements in memory order; a tensor of zero or one dimensions is one sample. The last group of
    a sample may be shorter; groups never span two samples. Compressed size: N·⌈D/8⌉·b bytes of codes and 4 bytes a
    group, b + 0.125 bits per element at G = 256 where D is a multiple of 256.

    Unbiased: E[decompress()] = x, up to float32 arithmetic and the rounding of the result to the dtype of x.
    |decompress() − x| < R/B in a group of saved range R, where max − min ≤ R ≤ (1 + 2^-7)·(max − min + 2^-7·|min|)
    unless the group is tiny; with other levels than uniform ones, less than the distance of the two beside x.

    Attributes:
        bits: b, 1 to 8.
        group_size: G, number of elements in a group.
        levels: where the levels of a group lie between its minimum and maximum. ``uniform``, equally far apart;
            ``normal``, the best for groups of 256 normal numbers: 0.86, 0.80 and 0.79 of the variance at 2, 3 and 4
            bits; ``skewed``, the best for values after ReLU and the like; ``fitted``, one of the three for each group,
            by where its values lie; or a table of kind ``stochastic`` of `bits` bits, whose first level is the minimum
            and whose last is the maximum.

    Raises:
        FewbitError: an attribute is not one of the values above.

    Example:
        PerGroup(bits=2, levels="fitted").compress(x).decompress()
    """

    bits: int = 2
    group_size: int = 256
    levels: str | Table = UNIFORM

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, 1, 8)
        check_integer("group_size", self.group_size, 1, 2**31)
        check_levels(self.levels_key, self.bits)

    @property
    def levels_key(self) -> str:
        """The name of the levels, or the key of their table, as ops take them."""
        return register_table(self.levels) if isinstance(self.levels, Table) else self.levels

    def within(self, features: int) -> "PerGroup":
        """Return this quantizer with groups that do not span rows of `features` elements.

        Samples consist of whole consecutive rows, such as the tokens of a text. A row of large numbers then does not
        spoil its neighbours, and a row of zeros comes back as zeros. Rows of fewer than 64 elements share a group, with
        as few rows as fill it. See `group_within` for the size, and so the cost, 32 bits a group: 0.125 bits an element
        where 256 divides `features`, and at most 0.5.

        Example:
            PerGroup(bits=4).within(96).group_size == 96  # 256 within 768, and 64 within 32
        """
        if torch.compiler.is_compiling():
            return replace(self, group_size=constant_group_within(int(features), self.group_size))
        return _within(self, features)

    def compress(
        self,
        x: Tensor,
        *,
        sample_bits: Tensor | Sequence[int] | SampleBits | None = None,
        generator: torch.Generator | None = None,
    ) -> "PerGroupCompressed":
        """Return `x` compressed.

        Args:
            x: float16, bfloat16, float32 or float64 (which is rounded to float32 first), of any shape and layout.
            sample_bits: bits of each sample, N integers from 1 to 8, in place of `bits`; or bits allocated on the
                device of `x`, which are not looked at. A sample's codes are those that a quantizer of that many bits
                gives it from the same seed.
            generator: source of the one number that seeds the rounding; by default fewbit's own stream, which
                `torch.manual_seed` restarts (key_stream.py). The same seed gives the same codes on every device.

        Raises:
            FewbitError: `x` is not such a tensor, `sample_bits` is not N integers from 1 to 8, or the levels are those
                of a table, which has one number of bits.
        """
        check_tensor("PerGroup", x)
        levels = self.levels_key
        if sample_bits is not None:
            check_levels(levels, None)
        x = as_dense(x.detach())
        in_order = x if _samples_first(x.shape, x.stride()) else x.contiguous()
        rows = flat(in_order).view(_sizes(x.shape))  # each sample in memory order
        if is_abstract(x):
            return PerGroupCompressed(self, TensorSpec.of(x), *_abstract(rows, self, sample_bits))
        given = sample_bits if isinstance(sample_bits, SampleBits) else None
        if sample_bits is not None and given is None:
            checked = check_sample_bits(sample_bits, rows.shape[0])
            given = SampleBits(checked.to(rows.device), packed_bytes(checked.tolist(), rows.shape[1]))
        bits = self.bits if given is None else given.bits
        rows = as_kind(rows, keep_positive=False)
        kernels = kernels_of(x, cpu, cuda)
        if kernels is cpu:
            room = 0 if given is None else int(given.room)
            kept = cpu.quantize(rows, bits, self.group_size, draw_seed(generator), room, levels)
        elif kernels is cuda and given is None:  # bits of samples are checked by the op
            (key,) = keys_of(seeds_beside(rows, generator))
            kept = cuda.quantize(rows, self.bits, self.group_size, key, levels=levels)
        else:
            seed = ops.draw_seeds(rows, 1) if generator is None else seed_beside(rows, generator)
            if given is None:
                kept = ops.per_group_quantize(rows, self.bits, self.group_size, seed, levels)
            else:
                room = given.room if isinstance(given.room, Tensor) else torch.tensor([given.room], device="cpu")
                kept = ops.per_group_quantize_samples(rows, given.bits, self.group_size, seed, room, levels)
        return PerGroupCompressed(self, TensorSpec.of(x), bits, *kept)


@cache
def group_within(features: int, most: int) -> int:
    """Return the group size that does not span rows of `features` elements.

    The largest divisor of `features` from 64 (or half of `most`) to `most`, preferably one that ends on a byte of
    codes; if there is none, the least divisor above. Shorter rows are joined: the fewest that fill 64 elements, and end
    on a byte if `most` allows it.
    """
    shared = min(LEAST_ROW, most)
    if features < shared:
        few = range(-(-shared // features) * features, most + 1, features)
        return next((g for g in few if g % GROUP == 0), few[0] if few else max(1, most // features) * features)
    divisors = [g for g in range(min(LEAST_ROW, -(-most // 2)), min(most, features) + 1) if features % g == 0]
    if not divisors:
        return next(g for g in range(most + 1, features + 1) if features % g == 0)
    return max([g for g in divisors if g % GROUP == 0] or divisors)


@torch.compiler.assume_constant_result
def constant_group_within(features: int, most: int) -> int:
    """Return `group_within` as a constant of a compiled graph."""
    return group_within(max(features, 1), most)


@cache
def _within(quantizer: PerGroup, features: int) -> PerGroup:
    return replace(quantizer, group_size=group_within(max(features, 1), quantizer.group_size))


@dataclass(frozen=True, eq=False)
class PerGroupCompressed(Unpickled):
    """A tensor of N samples of D elements compressed by `PerGroup`.

    Attributes:
        quantizer: the quantizer that compressed it.
        form: shape, layout and dtype of the tensor.
        bits: of all samples, or of each: uint8 (N,) on the device of the codes.
        packed: codes, uint8 (N, ⌈D/8⌉·b), each sample packed by itself (packing.py); one row for all samples if each
            has bits of its own (rows.py).
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
        """Bytes saved: codes, minima and ranges, and the bits of each sample where they differ."""
        of_samples = () if isinstance(self.bits, int) else (self.bits,)
        return total_bytes((self.packed, self.minimum, self.range, *of_samples))

    def check_contents(self) -> None:
        """Raise FewbitError if the parts do not match `form`."""
        check_form("PerGroup", self.form)
        parts = (self.packed, self.minimum, self.range)
        if not isinstance(self.quantizer, PerGroup):
            raise FewbitError(f"PerGroup: the quantizer is a PerGroup, not {shown(self.quantizer)}")
        check_levels(self.quantizer.levels_key, self.bits)
        check_groups("PerGroup", _sizes(self.form.shape), self.bits, parts, self.quantizer.group_size, self.form.device)

    def decompress(self) -> Tensor:
        """Return the tensor in its shape, dtype and layout; non-dense inputs come back with the strides of `x.clone()`.

        Raises:
            FewbitError: the parts do not match `form`.
        """
        if not torch.compiler.is_compiling():  # a compiled graph has its own codes, and ops check sizes
            self.check_contents()
        form = self.form
        sizes = _sizes(form.shape)
        in_order = _samples_first(form.shape, form.stride)
        parts = (self.packed, self.minimum, self.range, self.bits, self.quantizer.group_size)
        levels = self.quantizer.levels_key
        kernels = kernels_of(self.packed, cpu, cuda)
        if kernels is cpu or (kernels is cuda and isinstance(self.bits, int)):
            out = form.empty() if in_order else torch.empty(form.shape, dtype=form.dtype, device=form.device)
            kernels.dequantize(*parts, flat(out).view(sizes), levels)
        else:
            fixed = isinstance(self.bits, int)
            dequantize = ops.per_group_dequantize if fixed else ops.per_group_dequantize_samples
            rows = dequantize(*parts, sizes[1], form.dtype, levels)
            out = rows.view(-1).as_strided(form.shape, form.stride) if in_order else rows.view(form.shape)
        return with_stride(out, form.stride)


def _sizes(shape: torch.Size) -> tuple[int, int]:
    """Return the number of samples and of elements in a sample."""
    if len(shape) < 2:
        return 1, shape.numel()
    return shape[0], shape[1:].numel()


def _samples_first(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether the samples of a dense tensor are consecutive in memory."""
    return len(shape) < 2 or shape.numel() == 0 or shape[0] == 1 or stride[0] == shape[1:].numel()


def _abstract(
    rows: Tensor, quantizer: PerGroup, sample_bits: Tensor | Sequence[int] | SampleBits | None
) -> tuple[int | Tensor, Tensor, Tensor, Tensor]:
    """Return bits and empty codes, minima and ranges of the sizes that `rows` (N, D), without values, would have."""
    (N, D), bits = rows.shape, quantizer.bits
    groups = -(-D // max(1, min(quantizer.group_size, D)))
    minimum, range_ = (rows.new_empty(N, groups, dtype=torch.bfloat16) for _ in range(2))
    if sample_bits is None:
        return bits, rows.new_empty(N, packed_size(D, bits), dtype=torch.uint8), minimum, range_
    given = isinstance(sample_bits, SampleBits)
    size = int(sample_bits.room) if given else packed_bytes(sample_bits_list(sample_bits, N), D)
    return rows.new_empty(N, dtype=torch.uint8), rows.new_empty(size, dtype=torch.uint8), minimum, range_
