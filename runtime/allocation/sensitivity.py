"""Sensitivities: the variance that a sample's compression at 1 bit adds to gradients (ActNN, Equation 9, Appendix B).

    w_n = V_n · t_n,      V_n = Σ_i |h_ni| R_ni² / 6

V_n is the variance of the compressed sample at 1 bit, summed over its elements: its groups i have |h_ni| elements (G,
or fewer) of range R_ni. t_n is the factor by which the layer's backward pass multiplies it; it depends on the gradient
∇_n of the layer's output for the sample, and is approximated as in the paper, Σ_i a_i b_i ≈ Σ_i a_i · mean_i b_i:

    linear              ‖∇_n‖² / T            of T positions (tokens); Equation 9 has T = 1
    convolution         ‖∇_n‖² K / (I A)      I input positions, A groups, K kernel positions that meet no padding
    transposed          ‖∇_n‖² K / (I A)      I output positions: a convolution of the inverse stride
    batch norm          mean_c [∇²_nc (1 + P w_c² r_c²) + w_c⁴ r_c² / M · (∇²_nc + mean_n ∇²_nc)]
    other norms         ∇²_n (1 + P mean_c w_c² · r_n²) + mean_c w_c⁴ · r_n² / M · 2 ∇²_n
    anything else       mean of ∇_n²          as for a product with the saved tensor

∇²_nc is the mean over the positions of a channel, r = 1/deviation the factor of the layer, M the number of elements
that the deviation is taken over. A normalization compresses x̄, not x as in the paper, so there is one factor r² less.
The term ∇² is the variance of ∇w, required by Equation 8, and the last term that of ∇X, from B.2, where d_c² is
replaced by its average if y and ∇y do not correlate, w_c² Σ_n ∇²_nc.

A row or channel of zeros has the largest possible r, 1/√ε, but x̄ = 0, which has no rounding error. So r² denotes
r² (1 − ε r²): the second factor is the mean of x̄², normally 1 and 0 in that case.

The factor 1 + P w_c² r_c² is not in the paper. Equation 8 omits the effect of a layer's compression on the gradients of
earlier weights. There is none for linear layers, whose ∇X does not depend on their saved input. But the noise of
Σ_n x̄_nc ∇_nc, the same for all samples, moves all of ∇X along x̄, and an earlier weight accumulates it: to w_c² r_c² of
the variance of ∇w_c, if its inputs are white and of variance 1. P is the number of such weights. Without the factor
normalizations get 1 bit each, and the variance of all gradients at 2 bits on average is three times that of uniform
bits.

Of rotated codes (`Rotated`) V_n is .571 |x_n|², and what b bits leave of it is another curve (rotation.py).

Tests compare linear layers, convolutions and batch normalization with measured variances. The last two rows are
accurate enough to compare samples of one layer, not layers: a small transformer at 2 bits on average trained worse than
with uniform bits when they were included, and better when they were not (`is_comparable`).
"""

from functools import cache
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..layers.huggingface import Conv1D
from ..layers.huggingface import RMSNorm as RMSNormOfTransformers
from ..tensors.rotation import relative_variance
from ..tensors.traits import widest_dtype

_LINEAR = (nn.Linear, Conv1D)
_WITH_WEIGHTS = (*_LINEAR, _ConvNd)  # tuples: compilers before torch 2.11 trace no unions


def quantization_variance(x: Tensor, group_size: int) -> Tensor:
    """Return V, float64 (N,): the variance that `PerGroup(1, group_size)` adds to each sample, summed over elements.

    Non-finite groups count as 0: no number of bits represents them.

    Args:
        x: (N, ...), floating-point.
        group_size: G.
    """
    N = x.shape[0]
    rows = x.detach().reshape(N, -1)
    D = rows.shape[1]
    if rows.numel() == 0:
        return torch.zeros(N, dtype=widest_dtype(x.device), device=x.device)
    G = min(group_size, D)
    whole = D // G * G
    square = _squared_ranges(rows[:, :whole].unflatten(1, (-1, G))).sum(1) * G
    if whole < D:
        square += _squared_ranges(rows[:, whole:].unsqueeze(1)).sum(1) * (D - whole)
    return square / 6


def rotated_variance(x: Tensor) -> Tensor:
    """Return V, float64 (N,): the variance that `Rotated(1)` adds to each sample, .571 of its square.

    Numbers that are not finite count as 0, as by `quantization_variance`.
    """
    rows = x.detach().reshape(len(x), -1).nan_to_num(0, 0, 0)
    norm = torch.linalg.vector_norm(rows, dim=1, dtype=widest_dtype(x.device))
    return norm.square() * relative_variance(1)


def _squared_ranges(groups: Tensor) -> Tensor:
    # On the CPU torch's aminmax along a dimension takes nine times as long as amin and amax.
    low, high = (groups.amin(2), groups.amax(2)) if groups.device.type == "cpu" else groups.aminmax(dim=2)
    widest = widest_dtype(groups.device)
    return (high.to(widest) - low.to(widest)).square().nan_to_num(0, 0, 0)


def has_weights(layer: nn.Module) -> bool:
    """Return whether a layer multiplies its input by a learned matrix."""
    return isinstance(layer, _WITH_WEIGHTS)


def is_comparable(layer: nn.Module) -> bool:
    """Return whether a layer's sensitivities can be compared with those of other layers."""
    return has_weights(layer) or _by_channel(layer)


def _by_channel(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, _InstanceNorm)


def gradient_factor(
    layer: nn.Module, gradient: Tensor, shape: torch.Size, rstd: Tensor | None, before: int = 0
) -> Tensor:
    """Return t, float32 (N,).

    Args:
        layer: the layer whose input is compressed.
        gradient: ∇, of the layer's output, (N, ...).
        shape: of the input.
        rstd: r, of a normalization: (C,) by channel, or by sample.
        before: P, layers with weights (`has_weights`) between the model's input and this one.
    """
    N = gradient.shape[0]
    if N == 0 or gradient.numel() == 0:
        return gradient.new_zeros(N, dtype=torch.float32)
    norm = _norm(gradient.flatten(1), 1).square()
    if isinstance(layer, _LINEAR):
        return norm / max(1, prod(shape[1:-1]))
    if isinstance(layer, _ConvNd):
        transposed = isinstance(layer, _ConvTransposeNd)
        larger, smaller = (gradient.shape, shape) if transposed else (shape, gradient.shape)
        K = prod(map(_taps, larger[2:], smaller[2:], layer.kernel_size, layer.stride, _padding(layer), layer.dilation))
        return norm * (K / (prod(larger[2:]) * layer.groups))
    mean = norm / (gradient.numel() // N)
    if rstd is None:
        return mean
    r2 = rstd.detach().float().square()
    r2 = r2 * (1 - _epsilon(layer, rstd.dtype) * r2).clamp(min=0)
    weight = getattr(layer, "weight", None)
    w4 = weight.detach().float() ** 4 if isinstance(weight, Tensor) else mean.new_ones(1)
    if _by_channel(layer):
        by_channel = gradient.flatten(2) if gradient.dim() > 2 else gradient.unsqueeze(2)
        g = _norm(by_channel, 2).square() / by_channel.shape[2]
        M = N * by_channel.shape[2]
        passed = 1 + before * w4.sqrt() * r2
        return (g * passed + w4 * r2 / M * (g + g.mean(0))).mean(1)
    M = max(1, _normalized(layer, shape))
    return mean * (1 + (before * w4.sqrt().mean() + 2 * w4.mean() / M) * r2.reshape(N, -1).mean(1))


def _norm(x: Tensor, dim: int) -> Tensor:
    """Return the norms along a dimension, float32; of float64 numbers, whose norms torch does not narrow, too."""
    return torch.linalg.vector_norm(x, dim=dim, dtype=torch.promote_types(x.dtype, torch.float32)).float()


def _padding(layer: _ConvNd) -> tuple[int, ...]:
    """Return the zeros before the input, by dimension."""
    if isinstance(layer.padding, str):
        same = layer.padding == "same"
        return tuple(d * (k - 1) // 2 if same else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    return tuple(layer.padding) if layer.padding_mode == "zeros" else (0,) * len(layer.kernel_size)


@cache
def _taps(size: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> float:
    """Return the average number of kernel positions of an output that meet one of `size` elements, not padding."""
    inside = sum(0 <= o * stride + k * dilation - padding < size for o in range(outputs) for k in range(kernel))
    return inside / max(1, outputs)


def _epsilon(layer: nn.Module, dtype: torch.dtype) -> float:
    """Return ε, which a normalization adds to the variance."""
    if isinstance(layer, RMSNormOfTransformers):
        return layer.epsilon
    epsilon = getattr(layer, "eps", None)
    return torch.finfo(dtype).eps if epsilon is None else epsilon


def _normalized(layer: nn.Module, shape: torch.Size) -> int:
    """Return the number of elements over which a normalization takes its mean."""
    if isinstance(layer, RMSNormOfTransformers):
        return layer.weight.numel()
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return prod(layer.normalized_shape)
    if isinstance(layer, nn.GroupNorm):
        return prod(shape[1:]) // layer.num_groups
    return prod(shape[2:])
