"""The packed code of A₂ that a pre-activation layer saves, and the backward pass computed from it.

    packed = compress(A₂, …)                   A₂ becomes A₃ in place; only the packed code is saved
    codes.activated()                          Ã₃, for the gradient of the linear part's weights (equation 5)
    codes.through_normalisation(∇A₃, …)        the gradients of x, γ and β (equations 6 to 8)

Equations (6) to (8) need only the sign of A₂, which is exact, and Ã₁.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....tables import FewbitError
from ...backends.cpu import preact as cpu
from ...backends.cuda import preact as cuda
from ...backends.reference import fixed_point as reference
from ...backends.reference.preact import PreActQuantParams, for_coding, preact_quant_params
from ...tensors.abstract import is_abstract, scratch
from ...tensors.dtypes import KINDS, as_kind
from ...tensors.layout import flat, with_stride
from ...tensors.packing import packed_size, unpack
from ...tensors.plain import has_kernels
from ...tensors.spec import TensorSpec
from ...tensors.validation import check_channels, check_form, check_packed, check_part, shown_part, text_of

CHANNEL_DIM = 1


def compress(
    A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int, slope: float
) -> Tensor:
    """Return the packed code of A₂ and turn it into A₃ = max(A₂, slope·A₂), in place.

    Args:
        A: A₂ = γ∘A₁ + β, dense, channels in dimension 1; overwritten.
        x: the layer's input: where γ is 0, A₂ does not determine A₁, so A₁ = (x − μ)(σ² + ε)^{−1/2} is coded instead.
        γ, β, mean, inverse_deviation: (C,).
        bits: K.
        slope: of the leaky ReLU; 0 is ReLU.
    """
    if A.dtype in KINDS and cuda.serves(A):
        return cuda.encode(A, with_stride(x, A.stride()), γ, β, mean, inverse_deviation, bits, slope)
    # Only the CPU kernels need to know whether a γ is 0; other devices do not wait for the answer.
    if has_kernels(A) and A.dtype in KINDS and int(γ.count_nonzero()) == γ.numel():
        return cpu.encode(A, γ, β, bits, slope)
    with scratch() if is_abstract(A) else nullcontext():
        packed = _compress_reference(A, x, γ, β, mean, inverse_deviation, bits)
    activate_(A, slope)
    return packed


def _compress_reference(
    A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int
) -> Tensor:
    shape = [1, -1] + [1] * (A.dim() - 2)
    normalised = ((x - mean.view(shape)) * inverse_deviation.view(shape)).to(A.dtype)
    coded = with_stride(torch.where((γ == 0).view(shape), normalised, A), A.stride())
    channels = preact_quant_params(*for_coding(γ, β), bits).channels
    return reference.quantize_by(as_kind(coded, keep_positive=True), channels, A.stride(CHANNEL_DIM), bits)


def activate_(A: Tensor, slope: float) -> Tensor:
    """Return A₃ in the memory of A₂."""
    return torch.nn.functional.leaky_relu_(A, slope) if slope else A.relu_()


@dataclass(frozen=True, eq=False)
class PreActCodes:
    """The packed code of A₂ with the parameters to decode it.

    Attributes:
        packed: codes in memory order, uint8 (⌈n/8⌉·K,).
        form: of A₂.
        γ, β: (C,), with which it was encoded.
        bits: K.
        slope: of the leaky ReLU.
    """

    packed: Tensor
    form: TensorSpec
    γ: Tensor
    β: Tensor
    bits: int
    slope: float

    def check(self) -> None:
        """Raise FewbitError if the code does not fit the form: foreign saved-tensor hooks may have changed it."""
        form, packed, C = self.form, self.packed, (self.form.shape[CHANNEL_DIM],)
        fits = packed.dtype is torch.uint8 and packed.shape == (packed_size(form.numel, self.bits),)
        if fits and packed.is_contiguous() and packed.device == form.device and self.γ.shape == self.β.shape == C:
            return  # the form is the layer's own: only what hooks may change is looked at in every pass
        n = check_form("PreActivation", self.form)
        check_packed("PreActivation", self.packed, n, self.bits, self.form.device)
        check_channels("PreActivation", self.form, self.γ, self.β, CHANNEL_DIM)

    def activated(self) -> Tensor:
        """Return Ã₃, in the form of A₂."""
        self.check()
        out = self.form.empty()
        if (kernels := self._kernels) is not None:
            kernels.decode(self.packed, self.γ, self.β, self.bits, self.slope, out)
            return out
        if is_abstract(out):
            return out
        meaning = self._meaning()
        reference.dequantize_by(self.packed, meaning.channels, self._inner, self.bits, out)
        return torch.where(self._in_form(self._positive(meaning)), out, self.slope * out if self.slope else 0)

    def through_normalisation(
        self, gradient: Tensor, inverse_deviation: Tensor, by_batch: bool, into_input: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the gradients of the layer's input (None unless `into_input`), of γ and of β.

        Args:
            gradient: ∇A₃, of the shape and dtype of A₂; its memory may be used for the result.
            inverse_deviation: (σ² + ε)^{−1/2}, (C,).
            by_batch: whether mean and variance are those of the batch. If not, all gradients are exact.
            into_input: whether the input needs a gradient.
        """
        self.check()
        form, C = self.form, self.γ.shape
        if gradient.shape != form.shape or gradient.dtype != form.dtype or gradient.device != form.device:
            raise FewbitError(
                f"PreActivation: the gradient is {text_of(form.dtype)} {tuple(form.shape)} on {form.device}, not "
                f"{shown_part(gradient)}"
            )
        check_part("PreActivation", "inverse_deviation", inverse_deviation, inverse_deviation.dtype, C, form.device)
        gradient = with_stride(gradient, form.stride)
        if (kernels := self._kernels) is None:
            with scratch() if is_abstract(gradient) else nullcontext():
                return self._reference(gradient, inverse_deviation, by_batch, into_input)
        code = (self.packed, self.γ, self.β, self.bits, self.slope)
        dβ, dγ = kernels.through_normalisation(*code, gradient, inverse_deviation, by_batch, into_input)
        return gradient if into_input else None, dγ, dβ

    def _reference(
        self, gradient: Tensor, inverse_deviation: Tensor, by_batch: bool, into_input: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        meaning = self._meaning()
        g, positive = flat(gradient).to(wide), self._positive(meaning)
        g = torch.where(positive, g, g * self.slope if self.slope else 0)
        channel = self._channel(g)
        middle = unpack(self.packed, self.bits, g.numel()).to(wide) + (0.5 - (1 << (self.bits - 1)))
        normal = meaning.offset[channel] + middle * meaning.slope[channel]
        totals = torch.zeros(2, meaning.count, dtype=torch.float64, device=g.device)
        totals[0].index_add_(0, channel, g.double())
        totals[1].index_add_(0, channel, (g * normal).double())
        dβ, dγ = totals
        if not into_input:
            return None, dγ, dβ
        # The input's gradient is s∘(∇A₂ − p − q∘Ã₁).
        s = (self.γ.double() * inverse_deviation.double()).to(wide)
        p, q = (totals / (g.numel() // meaning.count) if by_batch else torch.zeros_like(totals)).to(wide)
        values = (g - p[channel] - q[channel] * normal) * s[channel]
        if is_abstract(gradient):
            return gradient, dγ, dβ  # kernels write to its memory
        return self.form.filled(values), dγ, dβ

    def _meaning(self) -> PreActQuantParams:
        return preact_quant_params(self.γ, self.β, self.bits)

    @property
    def _kernels(self) -> Any:
        """The module whose kernels read these codes, or None."""
        if self.form.dtype not in KINDS:
            return None
        return cpu if has_kernels(self.packed) else cuda if cuda.serves(self.packed) else None

    @property
    def _inner(self) -> int:
        return self.form.stride[CHANNEL_DIM]

    def _channel(self, like: Tensor) -> Tensor:
        index = torch.arange(self.form.numel, device=like.device)
        return index // max(self._inner, 1) % max(self.γ.numel(), 1)

    def _positive(self, meaning: PreActQuantParams) -> Tensor:
        """Return whether A₂ > 0, bool (n,), in memory order."""
        code = unpack(self.packed, self.bits, self.form.numel).int()
        return code >= meaning.channels.zero[self._channel(code)]

    def _in_form(self, values: Tensor) -> Tensor:
        out = self.form.empty(values.dtype)
        flat(out).copy_(values)
        return out
