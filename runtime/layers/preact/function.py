"""One pre-activation layer as one autograd function (BLPA, equations 1 to 8).

    A₁ = (σ² + ε)^{−1/2} ∘ (x − μ)      batch normalization
    A₂ = γ ∘ A₁ + β                      scale and shift
    A₃ = max(A₂, slope·A₂)               (leaky) ReLU
    out = A₃ × W + b                     convolution or matrix product, after average pooling if any

The forward pass runs torch's own operations, so outputs are torch's bit for bit. Saved for backward are the packed code
of A₂ and vectors of one number per channel; A₁, A₂ and A₃ share memory that is freed when the forward pass returns.
The backward pass uses Ã₂ for A₂. Its sign is exact, so the gradient of the input is exact except for one of the three
terms of batch normalization, γ(σ² + ε)^{−1/2} ∘ Ã₁ ∘ Mean(Ã₁ ∘ ∇A₂), which running statistics do not have.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn import functional as F

from ....tables import FewbitError
from ... import ops
from ...backends.cpu import preact as cpu
from ...backends.cuda import preact as cuda
from ...backends.reference import preact as reference
from ...tensors.packing import packed_size
from ...tensors.spec import TensorSpec, with_stride
from ...tensors.traits import KINDS, has_kernels, is_abstract, name_of, scratch
from ...tensors.validation import check_channels, check_form, check_packed, check_part, shown_part
from ..base import owned
from .linear import Linear, backward

# ---- the packed code of A₂, and the backward pass computed from it ---------------------------------------------------
#
# Equations (6) to (8) need only the sign of A₂, which is exact, and Ã₁.

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


# ---- the function ----------------------------------------------------------------------------------------------------

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, eq=False)
class Normalization:
    """The parameters of one call of batch normalization.

    Attributes:
        mean, variance: the running statistics: updated if `by_batch`, else used; None if not tracked.
        by_batch: whether to normalize by the statistics of the batch.
        momentum: of the update.
        eps: ε.
    """

    mean: Tensor | None
    variance: Tensor | None
    by_batch: bool
    momentum: float
    eps: float

    def __call__(self, x: Tensor, γ: Tensor | None, β: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return A₂, by the function behind ``torch.nn.functional.batch_norm``, and μ and (σ² + ε)^{−1/2}."""
        arguments = (self.mean, self.variance, self.by_batch, self.momentum, self.eps, torch.backends.cudnn.enabled)
        A, mean, inverse_deviation, *_ = torch._batch_norm_impl_index(x, γ, β, *arguments)  # pyright: ignore[reportPrivateImportUsage]
        if self.by_batch:
            return A, mean, inverse_deviation
        assert self.mean is not None and self.variance is not None
        return A, self.mean.clone(), (self.variance + self.eps).rsqrt()


def normalization_of(norm: nn.modules.batchnorm._BatchNorm) -> Normalization:
    """Return the parameters of this call of `norm`, and count the call as torch's module does."""
    # Looking up an attribute of a module takes half a microsecond, so each is read once.
    training, mean, variance = norm.training, norm.running_mean, norm.running_var
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if training and norm.track_running_stats and (count := norm.num_batches_tracked) is not None:
        count.add_(1)
        if norm.momentum is None:
            momentum = 1.0 / float(count)
    by_batch = training or (mean is None and variance is None)
    if training and not norm.track_running_stats:
        mean = variance = None
    return Normalization(mean, variance, by_batch, momentum, norm.eps)


@dataclass(frozen=True, eq=False)
class Settings:
    """The settings of a layer besides its parameters.

    Attributes:
        normalization, linear: its parts.
        slope: of the leaky ReLU; 0 is ReLU.
        bits: of the code; 0 saves no code. None saves the layer's input as it is and recomputes the rest: exact.
        naive: the baseline of Section 4: the linear part gets Ã₃ in the forward pass too.
    """

    normalization: Normalization
    linear: Linear
    slope: float
    bits: int | None
    naive: bool


class TracedPreActivation(torch.autograd.Function):
    """out = linear(relu(γ ∘ normalized(x) + β)), which saves the packed code of the ReLU's input; for torch's compiler,
    which itself refuses second derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        γ: Tensor | None,
        β: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        """Return the output of the layer."""
        s, (need_x, need_γ, need_β, need_weight, *_) = settings, ctx.needs_input_grad
        # No more bits than the required gradients need: that of ReLU needs only the sign, one bit, enough with frozen
        # parameters and running statistics; that of the bias alone needs 0 bits.
        through = need_weight or need_γ or (need_x and s.normalization.by_batch)
        if not (s.naive or s.bits is None or through):
            s = replace(s, bits=1 if need_x or need_β else 0)
        ctx.settings = s
        A, mean, inverse_deviation = s.normalization(x, γ, β)
        if s.bits is None:
            n = s.normalization
            running = (None, None) if n.by_batch or n.variance is None else (mean, n.variance.clone())
            ctx.save_for_backward(x, γ, β, weight, mean, inverse_deviation, *running)
            activate_(A, s.slope)
        elif s.bits == 0:
            ctx.form = TensorSpec.of(A)
            ctx.save_for_backward(None, None, None, weight, None)
            activate_(A, s.slope)
        else:
            ctx.form = form = TensorSpec.of(A)
            scale, shift = _vectors(γ, β, inverse_deviation)
            packed = compress(A, x, scale, shift, mean, inverse_deviation, s.bits, s.slope)
            ctx.save_for_backward(packed, γ, β, weight, inverse_deviation)
            if s.naive:
                # The compiler would save Ã₃ if it were that of the backward pass.
                packed = ops.another(packed, packed) if is_compiling() else packed
                A = PreActCodes(packed, form, scale, shift, s.bits, s.slope).activated()
        return owned(s.linear(A, weight, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x, γ, β, weight and bias."""
        return (*(_exact if ctx.settings.bits is None else _approximate)(ctx, gradients[0]), None)


class PreActivation(TracedPreActivation):
    """The same function for eager torch, which refuses second derivatives by this decorator."""

    backward = staticmethod(once_differentiable(TracedPreActivation.backward))  # pyright: ignore[reportAssignmentType]


def _approximate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    s: Settings = ctx.settings
    packed, γ, β, weight, inverse_deviation = ctx.saved_tensors
    need_x, need_γ, need_β, need_weight, need_bias, _ = ctx.needs_input_grad
    assert s.bits is not None
    if s.bits == 0:
        return None, None, None, None, backward(s.linear, gradient, ctx.form.empty(), weight, (False, False, True))[2]
    scale, shift = _vectors(γ, β, inverse_deviation)
    codes = PreActCodes(packed, ctx.form, scale, shift, s.bits, s.slope)
    into_norm = need_x or need_γ or need_β
    A = codes.activated() if need_weight else ctx.form.empty()
    dA, dw, db = backward(s.linear, gradient, A, weight, (into_norm, need_weight, need_bias))
    dx = dγ = dβ = None
    if dA is not None:
        del A
        by_batch = s.normalization.by_batch
        dx, dγ, dβ = codes.through_normalization(dA, inverse_deviation, by_batch, need_x)
    return dx, _as(dγ, γ) if need_γ else None, _as(dβ, β) if need_β else None, dw, db


def _exact(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    s: Settings = ctx.settings
    x, γ, β, weight, mean, inverse_deviation, running_mean, running_variance = ctx.saved_tensors
    need_x, need_γ, need_β, need_weight, need_bias, _ = ctx.needs_input_grad
    n = s.normalization
    A, *_ = Normalization(running_mean, running_variance, n.by_batch, 0.0, n.eps)(x, γ, β)
    activate_(A, s.slope)
    into_norm = need_x or need_γ or need_β
    dA, dw, db = backward(s.linear, gradient, A, weight, (into_norm, need_weight, need_bias))
    dx = dγ = dβ = None
    if dA is not None:
        # ∇A₂ of ∇A₃, in its memory: it depends only on the sign of A₂, which A₃ shares.
        aten = torch.ops.aten
        if is_compiling():  # the compiler decides about memory
            dA = aten.leaky_relu_backward(dA, A, s.slope, False) if s.slope else aten.threshold_backward(dA, A, 0)
        elif s.slope:
            dA = aten.leaky_relu_backward.grad_input(dA, A, s.slope, False, grad_input=dA)
        else:
            dA = aten.threshold_backward.grad_input(dA, A, 0, grad_input=dA)
        del A
        statistics = (running_mean, running_variance, mean, inverse_deviation, n.by_batch, n.eps)
        needs = [need_x, need_γ, need_β]
        dx, dγ, dβ = torch.ops.aten.native_batch_norm_backward(dA, x, γ, *statistics, needs)
    return dx, dγ if need_γ else None, dβ if need_β else None, dw, db


def _vectors(γ: Tensor | None, β: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return γ and β; 1 and 0 for a normalization without them."""
    return torch.ones_like(like) if γ is None else γ, torch.zeros_like(like) if β is None else β


def _as(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype is parameter.dtype else gradient.to(parameter.dtype)


def plain(x: Tensor, γ: Tensor | None, β: Tensor | None, weight: Tensor, bias: Tensor | None, s: Settings) -> Tensor:
    """Return the output by torch's operations one by one: without a graph, or for an empty tensor."""
    n = s.normalization
    A = F.batch_norm(x, n.mean, n.variance, γ, β, n.by_batch, n.momentum, n.eps)
    return s.linear(F.leaky_relu(A, s.slope) if s.slope else F.relu(A), weight, bias)
