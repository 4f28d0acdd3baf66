"""The loss of all tokens and its gradients, summed over chunks: what chunked_loss.py saves, and graphs call.

∂F = ∂X W,   ∂W = Σ ∂Xᵀ F,   ∂b = Σ ∂X        of the logits X of a chunk (loss_of_chunk.py), in the forward pass
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from .loss_of_chunk import LossOptions, loss_of_chunk

Product = tuple[torch.dtype, float]  # in which a head multiplies, and the factor of its logits
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Head:
    """A linear layer and its input, of which the logits are made: factor · (F Wᵀ + b).

    Attributes:
        hidden: (*, features).
        weight: (vocabulary, features).
        bias: (vocabulary,), or None.
        dtype: in which it multiplies.
        factor: a number, as the scaling of an adapter.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    factor: float = 1.0


def sum_dtype(*products: torch.dtype) -> torch.dtype:
    """Return the dtype of logits after the heads, and of all sums over them: float32 for those of 16 bits."""
    dtype = products[0]
    for other in products[1:]:
        dtype = torch.promote_types(dtype, other)
    return torch.float32 if dtype in _HALVES else dtype


def loss_and_gradients(
    labels: Tensor,
    options: LossOptions,
    products: Sequence[Product],
    wanted: Sequence[bool],
    tensors: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Return the loss, what its gradients are still to be divided by, and those of hidden states, weights and biases.

    Args:
        labels: (tokens,), int64.
        options: of the loss.
        products: dtype and factor of each head.
        wanted: of each of `tensors`, whether its gradient is.
        tensors: hidden states (tokens, features), weight and bias of each head.
    """
    valid = labels != options.ignore_index
    count, rows = valid.sum(), None
    # Only tokens with a label count; on other devices and in graphs it would cost a wait to know how many.
    if labels.device.type == "cpu" and not is_compiling() and type(labels) is Tensor and not bool(valid.all()):
        rows = valid.nonzero().squeeze(1)
    heads = []
    for i, (dtype, factor) in enumerate(products):
        hidden, weight, bias = tensors[3 * i : 3 * i + 3]
        assert hidden is not None and weight is not None
        taken = hidden if rows is None else hidden[rows]
        heads.append(_Sums(Head(taken, weight, bias, dtype, factor), wanted[3 * i : 3 * i + 3]))
    # In float16 a probability divided by 4,096 tokens would be 0: divided later, with the scale of a GradScaler.
    later = any(dtype == torch.float16 for dtype, _ in products)
    divisor = count.clamp(min=1) if options.reduction == "mean" else None
    taken = labels if rows is None else labels[rows]
    total = _sum_over_chunks(heads, taken, options, None if later else divisor, any(wanted))
    grads: list[Tensor | None] = []
    for head, hidden in zip(heads, tensors[::3], strict=True):
        assert hidden is not None
        grads += head.gradients(rows, hidden, later)
    return total / count if options.reduction == "mean" else total, divisor if later else None, grads


def save_gradients(
    ctx: Any, dtypes: Sequence[torch.dtype | None], divisor: Tensor | None, grads: Sequence[Tensor | None]
) -> None:
    """Save what `loss_and_gradients` found, and the dtypes of its tensors."""
    ctx.dtypes = dtypes
    ctx.save_for_backward(divisor, *grads)


def saved_gradients(ctx: Any, grad: Tensor) -> Iterator[Tensor | None]:
    """Yield the saved gradients times that of the loss."""
    divisor, *saved = ctx.saved_tensors
    scale = grad if divisor is None else grad / divisor
    for own, dtype in zip(saved, ctx.dtypes, strict=True):
        # A GradScaler's 65,536 is no number of float16.
        yield None if own is None else ((own.float() if own.dtype == torch.float16 else own) * scale).to(dtype)


class _Sums:
    """One head, and the sums over chunks that its gradients are."""

    def __init__(self, head: Head, wanted: Sequence[bool]) -> None:
        self.hidden, self.factor = head.hidden, head.factor
        self.weight = head.weight.to(head.dtype)
        self.bias = None if head.bias is None else head.bias.to(head.dtype)
        self.of_hidden, self.of_weight, self.of_bias = None, None, None
        if wanted[0]:
            self.of_hidden = torch.zeros_like(head.hidden, dtype=head.dtype)
        if wanted[1]:
            self.of_weight = torch.zeros_like(head.weight, dtype=sum_dtype(head.dtype))
        if wanted[2] and head.bias is not None:
            self.of_bias = torch.zeros_like(head.bias, dtype=sum_dtype(head.dtype))
        self._given_dtype = head.weight.dtype

    def logits(self, chunk: slice) -> Tensor:
        """Return what the head adds to the logits of a chunk."""
        x = F.linear(self.hidden[chunk].to(self.weight.dtype), self.weight, self.bias)
        return x if self.factor == 1 else x.mul_(self.factor)

    def add(self, chunk: slice, grad: Tensor) -> None:
        """Add what the gradient of a chunk's logits gives."""
        grad = grad.to(self.weight.dtype)
        if self.factor != 1:
            grad = grad * self.factor
        if self.of_hidden is not None:
            torch.mm(grad, self.weight, out=self.of_hidden[chunk])
        if self.of_weight is not None:
            hidden = self.hidden[chunk].to(grad.dtype)
            if self.of_weight.dtype == grad.dtype:
                self.of_weight.addmm_(grad.t(), hidden)
            elif _adds_to_float32(self.of_weight):
                torch.addmm(self.of_weight, grad.t(), hidden, out_dtype=self.of_weight.dtype, out=self.of_weight)
            else:
                self.of_weight.add_(grad.t() @ hidden)
        if self.of_bias is not None:
            self.of_bias.add_(grad.sum(0, dtype=self.of_bias.dtype))

    def gradients(self, rows: Tensor | None, hidden: Tensor, unscaled: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias; rows that do not count have zeros.

        Args:
            rows: those that count; None: all.
            hidden: of all tokens, whose strides graphs expect of its gradient.
            unscaled: whether they are sums that float16 may not hold.
        """
        of_hidden = self.of_hidden
        if of_hidden is not None and rows is not None:
            of_hidden = torch.zeros_like(hidden, dtype=of_hidden.dtype).index_copy_(0, rows, of_hidden)
        of_weight = self.of_weight
        if of_weight is not None and not unscaled:
            of_weight = of_weight.to(self._given_dtype)
        return of_hidden, of_weight, self.of_bias


def _adds_to_float32(total: Tensor) -> bool:
    """Return whether a product of 16-bit matrices is added to `total` as it is made, without waiting in 16 bits."""
    if not total.is_cuda or torch.version.hip is not None or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    return torch.cuda.get_device_capability(total.device) >= (8, 0)


def _sum_over_chunks(
    heads: Sequence[_Sums], labels: Tensor, options: LossOptions, divisor: Tensor | None, wanted: bool
) -> Tensor:
    """Return the sum of the losses of all tokens; give the gradients, over `divisor`, to `heads` if they are wanted."""
    valid = labels != options.ignore_index
    safe = labels.where(valid, 0)
    dtype = sum_dtype(*(head.weight.dtype for head in heads))
    shares = valid.to(dtype) if divisor is None else valid.to(dtype) / divisor
    total = shares.new_zeros(())
    trains = any(head.of_weight is not None for head in heads)
    for chunk in options.chunks(heads[0].hidden, heads[0].weight.shape[0], trains):
        x = heads[0].logits(chunk).to(dtype)
        for head in heads[1:]:
            x.add_(head.logits(chunk))
        losses, grad = loss_of_chunk(x, safe[chunk], shares[chunk], options, wanted)
        total += losses.where(valid[chunk], 0).sum()
        if grad is not None:
            for head in heads:
                head.add(chunk, grad)
    return total
