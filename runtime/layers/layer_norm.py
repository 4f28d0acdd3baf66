"""Layer, group and RMS normalization: the normalized input is saved in few bits (ActNN, Appendix B.2).

Mean and 1/deviation of each group of elements are saved exactly, as by torch. The gradient of the input is that of
normalization.py, from one copy or two.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..tensors.traits import arithmetic_dtype, is_autocast
from .base import (
    CompressedFunction,
    apply,
    batched,
    check_first_derivative,
    compresses,
    keep,
    kept,
    observed,
    owned,
)
from .normalization import CompressedNorm, KeepOutput, copies_of, divided, input_gradient, restored, standardised
from .saver import Saver, Whole, as_saver, is_held

__all__ = ["CompressedNormalization", "GroupNorm", "LayerNorm", "RMSNorm", "RootMeanSquare"]

_CHANGED = (
    "the output of a normalization that saves it in place of its input was changed in place: use torch's own there, by "
    "fewbit.convert(model, fewbit.Normalizations(), exclude=its name)"
)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class LayerNorm(CompressedNorm, nn.LayerNorm):
    """`torch.nn.LayerNorm`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, *, *normalized_shape) to the same shape, samples in dimension 0; float16, bfloat16, float32 or float64; the
    output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.LayerNorm`.
        bits: of a saved element, 1 to 8; 4 unless given.
        saver: a `Saver` in place of `PerGroup(bits)`; `KeepOutput()` saves the output,
            which the next layer saves anyway.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.LayerNorm(64, bits=2)
        layer(torch.randn(8, 16, 64)).square().sum().backward()
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output."""
        if not compresses(input, self.weight, self.bias):
            return super().forward(input)
        norm = _OfLastDimensions(tuple(self.normalized_shape), self.eps)
        return apply(CompressedNormalization, input, self.weight, self.bias, norm, self.saver, self.copies)


class GroupNorm(CompressedNorm, nn.GroupNorm):
    """`torch.nn.GroupNorm`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, num_channels, *) to the same shape; float16, bfloat16, float32 or float64; the output is torch's, bit for
    bit.

    Args:
        args, kwargs: those of `torch.nn.GroupNorm`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.GroupNorm(2, 8, bits=2)
        layer(torch.randn(4, 8, 8, 8)).square().sum().backward()
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output."""
        if not compresses(input, self.weight, self.bias):
            return super().forward(input)
        F._verify_batch_size(  # pyright: ignore[reportAttributeAccessIssue]
            [input.shape[0] * input.shape[1] // self.num_groups, self.num_groups, *input.shape[2:]]
        )
        norm = _OfGroups(self.num_groups, self.eps)
        return apply(CompressedNormalization, input, self.weight, self.bias, norm, self.saver, self.copies)


class RMSNorm(CompressedNorm, nn.RMSNorm):
    """`torch.nn.RMSNorm`, which saves its normalized input in few bits (as ActNN, Appendix B.2).

    (N, *, *normalized_shape) to the same shape, samples in dimension 0; float16, bfloat16, float32 or float64; the
    output is torch's, bit for bit.

    Args:
        args, kwargs: those of `torch.nn.RMSNorm`.
        bits: of a saved element, 1 to 8; 4 unless given.
        saver: a `Saver` in place of `PerGroup(bits)`; `KeepOutput()` saves the output,
            which the next layer saves anyway.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.RMSNorm(64, bits=2)
        layer(torch.randn(8, 16, 64)).square().sum().backward()
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return torch's output."""
        if not compresses(x, self.weight):
            return super().forward(x)
        norm = RootMeanSquare(tuple(self.normalized_shape), self.eps)
        return apply(CompressedNormalization, x, self.weight, None, norm, self.saver, self.copies)


class Normalization(ABC):
    """The part in which the three normalizations differ.

    Attributes:
        by_rows: whether the last dimension holds features.
        offset: added to the weight.
    """

    by_rows: ClassVar[bool] = True
    offset: float = 0.0

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return y, m (None if it is 0) and r."""

    def grouped(self, x: Tensor) -> Tensor:
        """Return a view of `x` to which m and r broadcast."""
        return x

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        normed: list[Tensor],
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: list[bool],
    ) -> Gradients:
        """Return the wanted gradients of x, weight and bias, from one copy of x̄ or two."""


@dataclass(frozen=True)
class _OfLastDimensions(Normalization):
    shape: tuple[int, ...]
    eps: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def backward(
        self,
        grad: Tensor,
        normed: list[Tensor],
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: list[bool],
    ) -> Gradients:
        one_copy = [wanted[0] and len(normed) < 2, *wanted[1:]]
        x = restored(normed[0], mean, rstd)
        weight, bias = _as_wide(weight, x), _as_wide(bias, x)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, self.shape, mean, rstd, weight, bias, one_copy
        )
        if wanted[0] and len(normed) == 2:
            h = grad.to(rstd.dtype) if weight is None else grad.to(rstd.dtype) * weight.to(rstd.dtype)
            grad_x = input_gradient(h, normed, rstd, [*range(-len(self.shape), 0)])
        return grad_x, grad_weight, grad_bias


@dataclass(frozen=True)
class _OfGroups(Normalization):
    by_rows: ClassVar[bool] = False
    groups: int
    eps: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        if x.device.type != "cpu" and is_autocast(x):  # as it does with F.group_norm, though not with this
            half = (torch.float16, torch.bfloat16)
            x = x.float() if x.dtype in half else x
            weight, bias = (t.float() if t is not None and t.dtype in half else t for t in (weight, bias))
        y, mean, rstd = torch.native_group_norm(
            _regular(x), weight, bias, x.shape[0], x.shape[1], x.shape[2:].numel(), self.groups, self.eps
        )
        shape = (*mean.shape, *(1 for _ in x.shape[1:]))
        return y, mean.view(shape), rstd.view(shape)

    def grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1))

    def backward(
        self,
        grad: Tensor,
        normed: list[Tensor],
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: list[bool],
    ) -> Gradients:
        x = _regular(restored(self.grouped(normed[0]), mean, rstd).view(grad.shape))
        one_copy = [wanted[0] and len(normed) < 2, *wanted[1:]]
        layout = torch.channels_last if _is_channels_last(x) else torch.contiguous_format
        grad = grad.contiguous(memory_format=layout)
        assert mean is not None
        weight = _as_wide(weight, x)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
            grad,
            x,
            mean.flatten(1),
            rstd.flatten(1),
            weight,
            x.shape[0],
            x.shape[1],
            x.shape[2:].numel(),
            self.groups,
            one_copy,
        )
        if wanted[0] and len(normed) == 2:
            h = grad.to(rstd.dtype)
            if weight is not None:
                h = h * weight.to(rstd.dtype).view(1, -1, *(1 for _ in grad.shape[2:]))
            dims = list(range(2, grad.dim() + 1))
            grad_x = input_gradient(self.grouped(h), list(map(self.grouped, normed)), rstd, dims).reshape(grad.shape)
        return grad_x, grad_weight, grad_bias


@dataclass(frozen=True)
class RootMeanSquare(Normalization):
    """RMS normalization over the last dimensions, of shape `shape`."""

    shape: tuple[int, ...]
    eps: float | None

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return y, None and r."""
        return F.rms_norm(x, self.shape, weight, self.eps), None, self.rstd(x)

    def rstd(self, x: Tensor) -> Tensor:
        """Return r, of size 1 in each of the last dimensions."""
        single = x.to(arithmetic_dtype(x.dtype))
        eps = torch.finfo(single.dtype).eps if self.eps is None else self.eps  # of bfloat16 it would be .0078
        return (single.square().mean([*range(-len(self.shape), 0)], keepdim=True) + eps).rsqrt()

    def backward(
        self,
        grad: Tensor,
        normed: list[Tensor],
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: list[bool],
    ) -> Gradients:
        """Return the wanted gradients."""
        grad, dims = grad.to(rstd.dtype), [*range(-len(self.shape), 0)]
        grad_x = grad_weight = None
        if wanted[0]:
            h = grad if weight is None else grad * weight.to(rstd.dtype)
            grad_x = input_gradient(h, normed, rstd, dims, centred=False)
        if wanted[1]:
            leading = list(range(grad.dim() - len(dims)))
            grad_weight = (grad * normed[0]).sum(leading) if leading else grad * normed[0]
        return grad_x, grad_weight, None


def _as_wide(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a parameter as torch's op takes it beside `x`: under autocast it may have 16 bits beside float32."""
    return None if parameter is None else parameter.to(torch.promote_types(parameter.dtype, x.dtype))


def _regular(x: Tensor) -> Tensor:
    """Return `x` in a memory format that torch's group normalization accepts."""
    return x if _is_channels_last(x) and x.device.type == "cpu" else x.contiguous()


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


class CompressedNormalization(CompressedFunction):
    """x, w, b -> (x − m) r w + b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Normalization,
        saver: Saver,
        copies: int,
    ) -> Tensor:
        """Return torch's output; save x̄ compressed, or x itself if it is in memory anyway, or y if `saver` says so."""
        y, mean, rstd = norm.forward(x, weight, bias)
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        compressed = None
        keeps = isinstance(saver, KeepOutput)
        ctx.from_output = keeps and norm.by_rows and saver.divides_by(weight, norm.offset)
        ctx.exact = (as_saver(saver).sees_held and is_held(x)) or (keeps and not ctx.from_output)
        if ctx.from_output and (x_wanted or weight_wanted):
            y = owned(y)  # what is changed in place later is what was saved, and torch says so
            compressed = Whole(y)
        elif ctx.exact and (x_wanted or weight_wanted):
            compressed = Whole(x)
        elif x_wanted or weight_wanted:
            normed = standardised(norm.grouped(x), mean, rstd).reshape(x.shape)
            compressed = copies_of(batched(normed, 2), saver, copies if x_wanted else 1, rows=norm.by_rows)
        # From x itself 1/deviation can be recomputed; torch saves it, and the mean, too.
        keep(ctx, compressed, weight, bias, mean, None if ctx.exact and mean is None else rstd)
        ctx.norm, ctx.saver, ctx.shape = norm, saver, x.shape
        ctx.dtypes = [t if t is None else t.dtype for t in (x, weight, bias)]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, w and b."""
        check_first_derivative()
        grad = grads[0]
        try:
            compressed, weight, bias, mean, rstd = kept(ctx)
        except RuntimeError as error:
            if not ctx.from_output or "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(_CHANGED) from error
        wanted = list(ctx.needs_input_grad[:3])
        if compressed is None:  # the bias alone
            own = len(ctx.norm.shape) if isinstance(ctx.norm, _OfLastDimensions) else None  # its last dimensions
            of_bias = [1] if own is None else range(grad.dim() - own, grad.dim())
            dims = [d for d in range(grad.dim()) if d not in of_bias]
            return None, None, grad.sum(dims).to(ctx.dtypes[2]) if dims else grad, None, None, None
        if ctx.from_output:
            y = compressed.decompress().detach()
            normed = [divided(y, weight, bias, ctx.norm.offset, rstd.dtype).to(grad.dtype)]
        elif ctx.exact:
            x = ctx.norm.grouped(compressed.decompress())
            rstd = ctx.norm.rstd(x) if rstd is None else rstd
            normed = [standardised(x, mean, rstd).reshape(ctx.shape).to(grad.dtype)]
        else:
            compressed = observed(ctx.saver, compressed, batched(grad, 2), rstd)
            normed = [c.decompress().view(ctx.shape).to(grad.dtype) for c in compressed]
        found = ctx.norm.backward(grad, normed, mean, rstd, weight, bias, wanted)
        gradients = (
            g.to(d) if g is not None and w else None for g, w, d in zip(found, wanted, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None)
