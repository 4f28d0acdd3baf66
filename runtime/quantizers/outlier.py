"""Value-aware quantization: few large values exactly, the many small ones in few bits (V-Quant, Sections 4 and 4.5).

Of n elements the k = round(AR·n) of largest magnitude are saved exactly, with their positions; among equals at the
threshold the first in memory. The rest is rounded to the nearest of 2^b levels from its minimum to its maximum, a range
that the large values no longer stretch. If the rest holds zeros, 0 is one of the levels: a row of zeros, such as a
padding token, adds nothing to a gradient, whatever multiplies it.

RV-Quant (`relu=True`) is for outputs of ReLU. One code stands for true zeros, another for positive numbers that round
to zero; 2^b − 2 positive levels remain. The second zero decodes to a number just above 0, which adds nothing to a sum
and yet is positive: decompress() > 0 exactly where x > 0, so the ReLU's mask needs no bit of its own.

Positions. Memory is cut into blocks of 240; saved are the number of outliers in each block (8 bits) and the offset of
each outlier in its block (8 bits): 8 + 8/(240·AR) bits per outlier, 9.7 at AR = 2 %, where the paper's CSR doubles the
size of the value. 240 because a full block's count must still fit 8 bits, and 16 divides it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...tables import FewbitError, Table
from ...tables.errors import check_integer, shown
from .. import ops
from ..backends.cpu import outlier as cpu
from ..backends.cuda import outlier as cuda
from ..backends.reference.outlier import POSITION_BLOCK, count_of, positions_of
from ..tensors.levels import register_table
from ..tensors.spec import TensorSpec, as_dense, flat
from ..tensors.traits import as_kind, has_kernels, is_abstract, name_of, total_bytes
from ..tensors.validation import Unpickled, check_form, check_outlier_parts, check_outliers, check_packed
from .base import check_tensor, kernels_of

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Outlier(Unpickled):
    """V-Quant's quantizer: the largest magnitudes exactly, the rest in b bits over its narrowed range; deterministic.

    |decompress() − x| ≤ (max − min)/(2·(2^b − 1)) over the rest, with `relu` max/(2·(2^b − 2)); to rounding, and unless
    the span is below 2^-100. Zeros come back as zeros: if the rest holds some between numbers of both signs, its levels
    are multiples of the least step Δ that reaches both ends, and the error is at most Δ/2; with one bit they are 0 and
    the end of larger magnitude. NaN and infinities rank above all magnitudes, so they are outliers; if there are more
    of them than outliers, or the span of the rest is not a finite float32, the whole rest is NaN.

    Compressed size: ⌈n/8⌉·b bytes of codes, ⌈n/240⌉ of counts, k·(1 + size of a value) for the outliers, and 8.

    Attributes:
        bits: b, 1 to 8; with `relu` 2 to 8.
        ratio: AR, from 0 to 1.
        relu: whether to use RV-Quant, which compresses max(0, x).
        value_dtype: dtype of the saved outliers: float16, bfloat16 or float32; None is the dtype of x (float32 for
            float64). Finite values beyond its range become its largest.
        sample_every: 1 finds the threshold exactly. S > 1 estimates it from every S-th element in memory, so that about
            AR·n outliers lie above it; their number is known only once they are found (which synchronises with a GPU).
            Best an odd number, so that samples do not fall on the same columns of images.

    Raises:
        FewbitError: an attribute is not one of the values above.

    Example:
        fewbit.quantizers.Outlier(bits=3, ratio=0.02).compress(x).decompress()
    """

    bits: int = 3
    ratio: float = 0.02
    relu: bool = False
    value_dtype: torch.dtype | None = None
    sample_every: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.relu, bool):
            raise FewbitError(f"relu is True or False, not {shown(self.relu)}")
        check_integer("bits with relu" if self.relu else "bits", self.bits, 2 if self.relu else 1, 8)
        check_integer("sample_every", self.sample_every, 1)
        if not isinstance(self.ratio, int | float) or not 0 <= self.ratio <= 1:
            raise FewbitError(f"ratio is a number from 0 to 1, not {shown(self.ratio)}")
        if self.value_dtype not in (None, *VALUE_DTYPES):
            accepted = ", ".join(name_of(d) for d in VALUE_DTYPES)
            raise FewbitError(f"value_dtype is {accepted} of torch, or None, not {shown(self.value_dtype)}")

    def compress(self, x: Tensor) -> "OutlierCompressed":
        """Return `x` compressed.

        Args:
            x: float16, bfloat16, float32 or float64 (which is rounded to float32 first), of any shape and layout.

        Raises:
            FewbitError: `x` is not such a tensor.
        """
        check_tensor("Outlier", x)
        x = as_dense(x.detach())
        elements = flat(as_kind(x, keep_positive=self.relu))
        kernels = kernels_of(x, cpu, cuda)
        quantize = ops.outlier_quantize if kernels is None else kernels.quantize
        # Without values there are as many outliers as at an exact threshold; a sampled one finds about as many.
        sample_every = 1 if is_abstract(x) else self.sample_every
        settings = (self.bits, self.ratio, self.relu, self.value_dtype, sample_every)
        return OutlierCompressed(self, TensorSpec.of(x), *quantize(elements, *settings))

    def count(self, n: int) -> int:
        """Return k, the number of outliers among `n` elements at an exact threshold."""
        return count_of(n, self.ratio)


@dataclass(frozen=True, eq=False)
class OutlierCompressed(Unpickled):
    """A tensor of n elements, k of them outliers, compressed by `Outlier`.

    Attributes:
        quantizer: the quantizer that compressed it.
        form: shape, layout and dtype of the tensor.
        packed: codes in memory order, uint8 (⌈n/8⌉·b,); those of outliers are not used.
        counts: number of outliers in each block of 240, uint8 (⌈n/240⌉,).
        offsets: offset of each outlier in its block, uint8 (k,).
        values: values of the outliers, (k,).
        levels: lowest level and step, float32 (2,).
    """

    quantizer: Outlier
    form: TensorSpec
    packed: Tensor
    counts: Tensor
    offsets: Tensor
    values: Tensor
    levels: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes saved: codes, counts, offsets, values and levels."""
        return total_bytes((self.packed, self.counts, self.offsets, self.values, self.levels))

    @property
    def positions(self) -> Tensor:
        """Positions of the outliers in memory order: int64 (k,), increasing; in bounds for any `counts`."""
        return positions_of(self.counts, self.offsets, self.form.numel)

    def check_sizes(self) -> None:
        """Raise FewbitError if the sizes of the parts do not match `form`."""
        n = check_form("Outlier", self.form)
        if not isinstance(self.quantizer, Outlier):
            raise FewbitError(f"Outlier: the quantizer is an Outlier, not {shown(self.quantizer)}")
        self.quantizer.__post_init__()
        parts = (self.packed, self.counts, self.offsets, self.values, self.levels)
        check_outlier_parts("Outlier", n, POSITION_BLOCK, self.form, self.quantizer, parts)

    def check_contents(self) -> None:
        """Raise FewbitError if the parts do not match `form`, or positions lie outside of it."""
        self.check_sizes()
        check_outliers("Outlier", self.form.numel, POSITION_BLOCK, self.counts, self.offsets)

    def decompress(self) -> Tensor:
        """Return the tensor in its shape, dtype and layout; non-dense inputs come back with the strides of `x.clone()`.

        Raises:
            FewbitError: the sizes of the parts do not match `form`.
        """
        if not torch.compiler.is_compiling():  # a compiled graph has its own codes, and ops check sizes
            self.check_sizes()
        form, q = self.form, self.quantizer
        parts = (self.packed, self.counts, self.offsets, self.values, self.levels, q.bits, q.relu)
        kernels = kernels_of(self.packed, cpu, cuda)
        if kernels is not None:
            out = form.empty()
            kernels.dequantize(*parts, flat(out))
            return out
        return ops.outlier_dequantize(*parts, form.numel, form.dtype).as_strided(form.shape, form.stride)


def masked(grad: Tensor, packed: Tensor, bits: int) -> Tensor:
    """Return ReLU's gradient by RV-Quant's codes: `grad` where the code is not 0, else 0.

    Args:
        grad: floating-point, dense, in the layout of the compressed tensor.
        packed, bits: codes of `Outlier(bits, relu=True)`.

    Raises:
        FewbitError: `packed` does not hold one code for each element of `grad`.
    """
    if not torch.compiler.is_compiling():  # the op checks sizes
        check_packed("Outlier", packed, grad.numel(), bits, grad.device)
    if has_kernels(grad):
        return cpu.masked(grad, packed, bits)
    return ops.multiply(grad, packed, _relu_table(bits), grad.stride())


@torch.compiler.assume_constant_result
def _relu_table(bits: int) -> str:
    return _registered(bits)


@cache
def _registered(bits: int) -> str:
    """Return the key of ReLU's derivative as a table over RV-Quant's codes."""
    codes = np.arange(1 << bits, dtype=np.uint8)
    steps = (codes[1:].astype(np.float64) - 0.5, codes, (codes > 0).astype(np.float64))
    return register_table(Table(f"rv-quant(bits={bits})", "interval", "uniform:0,1", *steps, error=0.0))
