"""Fixed-point quantization by the parameters of a normalization (BLPA, equations 9 and 10).

The output of batch normalization has mean β and deviation γ in each channel, so its range is known and not stored: A is
clipped to about β ± 3γ, cut into 2^K intervals of length Δ = 6γ / 2^K that begin at multiples of Δ, and decoded to the
middle of its interval,

    code = Clip_K(⌊A/Δ⌋ + 2^{K−1} − ⌊β/Δ⌋),      Ã = Δ (code + ½ − 2^{K−1} + ⌊β/Δ⌋),      Δ = 6|γ| / 2^K.

Sign. The backward pass of ReLU and its variants needs only whether A > 0. 0 is a multiple of Δ, so it separates two
codes, and the codes from the zero point z = 2^{K−1} − ⌊β/Δ⌋ on are positive. That holds as long as both signs have a
code, which fails in the paper where the range ends at or before 0 (β < −3|γ| + Δ; at K = 1 any β < 0). There the lowest
interval, the farthest from β, gives its code to the missing sign, and its elements move to the next interval: code 0
means A ≤ 0 where β is large, and where −β is large the range moves up by Δ and its top code means A > 0. (If the
reserved code's interval does not have that sign, it decodes to a tiny number of that sign.) Rounding cannot change the
sign either: an element's code is clipped to the codes of its own sign, and its decoded value to the numbers of that
sign. So A > 0 exactly when Ã > 0: for 0 itself (a multiple of Δ, which ⌊ ⌋ would count as positive), for any γ, tiny,
zero (Ã = β where the signs agree) or negative (β ± 3γ is the same interval), and where Δ is too small for ⌊β/Δ⌋.

Arithmetic. With the origin o = ⌊β/Δ⌋·Δ, computed once per channel in float64, y = (A − o)/Δ + 2^{K−1} is truncated to
an integer: the same code, and no digits are lost where |β| is far above γ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from .. import ops
from ..backends.cpu import fixed_point as cpu
from ..backends.cuda import fixed_point as cuda
from ..tensors.spec import TensorSpec, as_dense, channel_run
from ..tensors.traits import as_kind
from ..tensors.validation import Unpickled, check_channels, check_form, check_packed
from .base import check_tensor, kernels_of


@dataclass(frozen=True)
class FixedPoint(Unpickled):
    """BLPA's quantizer: deterministic K-bit codes over β ± 3γ of each channel; the sign is always preserved.

    |decompress() − x| ≤ 3|γ| / 2^K, to rounding, for x in ⌊β/Δ⌋Δ ± 3γ, which is β ± 3γ moved down by less than Δ;
    except in the lowest interval if the range holds numbers of one sign only. Values outside are clipped, infinities
    too. NaN counts as not positive and becomes the lowest value: the forward pass has already propagated it.

    Attributes:
        bits: K, 1 to 8. One bit preserves the sign.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8.

    Example:
        quantizer = fewbit.quantizers.FixedPoint(bits=4)
        quantizer.compress(images, scale=torch.ones(3), shift=torch.zeros(3)).decompress()
    """

    bits: int = 4

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, 1, 8)

    def compress(self, x: Tensor, *, scale: Tensor, shift: Tensor, channel_dim: int = 1) -> "FixedPointCompressed":
        """Return `x` compressed.

        Args:
            x: output of the scale and shift: float16, bfloat16, float32 or float64, any layout.
            scale: γ, (C,), of any floating dtype and sign.
            shift: β, (C,).
            channel_dim: the dimension of `x` of size C.

        Raises:
            FewbitError: `x` is not such a tensor, or `scale` and `shift` do not match its channels.
        """
        check_tensor("FixedPoint", x)
        _check_vectors(x, scale, shift, channel_dim)
        x = as_dense(x.detach())
        γ, β = scale.detach(), shift.detach()
        run = channel_run(x.shape, x.stride(), channel_dim)
        kernels = kernels_of(x, cpu, cuda, γ, β)
        quantize = ops.fixed_point_quantize if kernels is None else kernels.quantize
        packed = quantize(as_kind(x, keep_positive=True), γ, β, run, self.bits)
        return FixedPointCompressed(self, TensorSpec.of(x), packed, γ, β, channel_dim, _versions(γ, β))


@dataclass(frozen=True, eq=False)
class FixedPointCompressed(Unpickled):
    """A tensor of n elements compressed by `FixedPoint`.

    Attributes:
        quantizer: the quantizer that compressed it.
        form: shape, layout and dtype of the tensor.
        packed: codes in memory order, uint8 (⌈n/8⌉·K,).
        scale: γ, (C,), the caller's tensor, not a copy.
        shift: β, (C,), the caller's tensor, not a copy.
        channel_dim: channel dimension of the tensor.
        versions: version counters of γ and β, to detect changes in place.
    """

    quantizer: FixedPoint
    form: TensorSpec
    packed: Tensor
    scale: Tensor
    shift: Tensor
    channel_dim: int
    versions: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes saved: the codes. γ and β belong to the layer."""
        return self.packed.numel()

    def check_contents(self) -> None:
        """Raise FewbitError if the parts do not match `form`."""
        n = check_form("FixedPoint", self.form)
        check_packed("FixedPoint", self.packed, n, getattr(self.quantizer, "bits", None), self.form.device)
        check_channels("FixedPoint", self.form, self.scale, self.shift, self.channel_dim)

    def decompress(self) -> Tensor:
        """Return the tensor in its shape, dtype and layout; non-dense inputs come back with the strides of `x.clone()`.

        Raises:
            FewbitError: the parts do not match `form`.
            RuntimeError: scale or shift was modified in place since `compress`.
        """
        if not torch.compiler.is_compiling():  # a compiled graph has its own codes, and ops check sizes
            self.check_contents()
        if _versions(self.scale, self.shift) != self.versions:
            raise RuntimeError("FixedPoint: scale or shift was modified in place between compress and decompress")
        form = self.form
        run = channel_run(form.shape, form.stride, self.channel_dim)
        codes = (self.packed, self.scale, self.shift, run, self.quantizer.bits)
        kernels = kernels_of(self.packed, cpu, cuda, self.scale, self.shift)
        if kernels is not None:
            out = form.empty()
            kernels.dequantize(*codes, out)
            return out
        return ops.fixed_point_dequantize(*codes, form.numel, form.dtype).as_strided(form.shape, form.stride)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    """Return the version counter of each tensor, which counts changes in place; inference tensors have none."""
    if torch.compiler.is_compiling():
        return ()  # a compiled graph has its inputs as they were
    return tuple(0 if t.is_inference() else t._version for t in tensors)


def _check_vectors(x: Tensor, scale: Tensor, shift: Tensor, channel_dim: int) -> None:
    if not isinstance(channel_dim, int) or not -x.dim() <= channel_dim < x.dim():
        raise FewbitError(
            f"FixedPoint: channel_dim is a dimension of a {x.dim()}-dimensional tensor, not {channel_dim!r}"
        )
    C = x.shape[channel_dim]
    for name, vector in (("scale", scale), ("shift", shift)):
        if not isinstance(vector, Tensor) or not vector.is_floating_point() or vector.device != x.device:
            given = f"{vector.dtype} on {vector.device}" if isinstance(vector, Tensor) else shown(vector)
            raise FewbitError(f"FixedPoint: {name} is a floating-point tensor on {x.device}, not {given}")
        if vector.shape != (C,):
            raise FewbitError(f"FixedPoint: {name} has shape ({C},), one number a channel, not {tuple(vector.shape)}")
