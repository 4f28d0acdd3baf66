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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn import functional as F

from ... import ops
from ...tensors.spec import TensorSpec
from ..base import owned
from .codes import PreActCodes, activate_, compress
from .linear import Linear, backward

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

    def keeping_for(self, needs: Sequence[bool]) -> "Settings":
        """Return the settings with no more bits than the required gradients (x, γ, β, weight, bias) need.

        The gradient of ReLU needs only the sign, one bit: enough with frozen parameters and running statistics. The
        gradient of the bias alone needs 0 bits.
        """
        need_x, need_γ, need_β, need_weight, *_ = needs
        if self.naive or self.bits is None or need_weight or need_γ or (need_x and self.normalization.by_batch):
            return self
        return replace(self, bits=1 if need_x or need_β else 0)


class PreActivation(torch.autograd.Function):
    """out = linear(relu(γ ∘ normalized(x) + β)), which saves the packed code of the ReLU's input."""

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
        ctx.settings = s = settings.keeping_for(ctx.needs_input_grad)
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
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x, γ, β, weight and bias."""
        return _gradients(ctx, gradients[0])


class TracedPreActivation(PreActivation):
    """The same function for torch's compiler, which itself refuses second derivatives."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x, γ, β, weight and bias."""
        return _gradients(ctx, gradients[0])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (*(_exact if ctx.settings.bits is None else _approximate)(ctx, gradient), None)


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
        dA = _through_relu(dA, A, s.slope)
        del A
        statistics = (running_mean, running_variance, mean, inverse_deviation, n.by_batch, n.eps)
        needs = [need_x, need_γ, need_β]
        dx, dγ, dβ = torch.ops.aten.native_batch_norm_backward(dA, x, γ, *statistics, needs)
    return dx, dγ if need_γ else None, dβ if need_β else None, dw, db


def _through_relu(dA: Tensor, A: Tensor, slope: float) -> Tensor:
    """Return ∇A₂ of ∇A₃, in its memory. It depends only on the sign of A₂, which A₃ shares."""
    aten = torch.ops.aten
    if is_compiling():  # the compiler decides about memory
        return aten.leaky_relu_backward(dA, A, slope, False) if slope else aten.threshold_backward(dA, A, 0)
    if slope:
        return aten.leaky_relu_backward.grad_input(dA, A, slope, False, grad_input=dA)
    return aten.threshold_backward.grad_input(dA, A, 0, grad_input=dA)


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
