"""The packed code of A₂ that a pre-activation layer saves, and the backward pass computed from it.

    packed = compress(A₂, …)                   A₂ becomes A₃ in place; only the packed code is saved
    codes.activated()                          Ã₃, for the gradient of the linear part's weights (equation 5)
    codes.through_normalization(∇A₃, …)        the gradients of x, γ and β (equations 6 to 8)

Equations (6) to (8) need only the sign of A₂, which is exact, and Ã₁.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ....tables import FewbitError
from ... import ops
from ...backends.cpu import preact as cpu
from ...backends.cuda import preact as cuda
from ...backends.reference import preact as reference
from ...tensors.packing import packed_size
from ...tensors.spec import TensorSpec, with_stride
from ...tensors.traits import KINDS, has_kernels, is_abstract, name_of, scratch
from ...tensors.validation import check_channels, check_form, check_packed, check_part, shown_part

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
    if is_compiling():
        packed, activated = ops.preact_encode(A, x, γ, β, mean, inverse_deviation, bits, slope)
        A.copy_(activated)
        return packed
    if A.dtype in KINDS and cuda.serves(A):
        return cuda.encode(A, with_stride(x, A.stride()), γ, β, mean, inverse_deviation, bits, slope)
    backend = cpu if has_kernels(A) and A.dtype in KINDS else reference
    with scratch() if is_abstract(A) else nullcontext():
        return backend.encode(A, x, γ, β, mean, inverse_deviation, bits, slope)


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
        if is_compiling():
            form = self.form
            return ops.preact_decode(
                *(self.packed, self.γ, self.β, self.bits, self.slope, form.shape, form.stride, form.dtype)
            )
        self.check()
        out = self.form.empty()
        if (kernels := self._kernels) is not None:
            kernels.decode(self.packed, self.γ, self.β, self.bits, self.slope, out)
            return out
        if is_abstract(out):
            return out
        return reference.decode(self.packed, self.γ, self.β, self.bits, self.slope, out)

    def through_normalization(
        self, gradient: Tensor, inverse_deviation: Tensor, by_batch: bool, into_input: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the gradients of the layer's input (None unless `into_input`), of γ and of β.

        Args:
            gradient: ∇A₃, of the shape and dtype of A₂; its memory may be used for the result.
            inverse_deviation: (σ² + ε)^{−1/2}, (C,).
            by_batch: whether mean and variance are those of the batch. If not, all gradients are exact.
            into_input: whether the input needs a gradient.
        """
        if is_compiling():
            gradient = with_stride(gradient, self.form.stride)
            code = (self.packed, self.γ, self.β, self.bits, self.slope)
            dx, dβ, dγ = ops.preact_backward(*code, gradient, inverse_deviation, by_batch, into_input)
            return dx if into_input else None, dγ, dβ
        self.check()
        form, C = self.form, self.γ.shape
        if gradient.shape != form.shape or gradient.dtype != form.dtype or gradient.device != form.device:
            raise FewbitError(
                f"PreActivation: the gradient is {name_of(form.dtype)} {tuple(form.shape)} on {form.device}, not "
                f"{shown_part(gradient)}"
            )
        check_part("PreActivation", "inverse_deviation", inverse_deviation, inverse_deviation.dtype, C, form.device)
        gradient = with_stride(gradient, form.stride)
        code = (self.packed, self.γ, self.β, self.bits, self.slope)
        if (kernels := self._kernels) is None:
            with scratch() if is_abstract(gradient) else nullcontext():
                gradient, dβ, dγ = reference.through_normalization(
                    *(*code, gradient, inverse_deviation, by_batch, into_input)
                )
        else:
            dβ, dγ = kernels.through_normalization(*code, gradient, inverse_deviation, by_batch, into_input)
        return gradient if into_input else None, dγ, dβ

    @property
    def _kernels(self) -> Any:
        """The module whose kernels read these codes, or None."""
        if self.form.dtype not in KINDS:
            return None
        return cpu if has_kernels(self.packed) else cuda if cuda.serves(self.packed) else None
