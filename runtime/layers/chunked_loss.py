"""Cross-entropy of a linear head over chunks of tokens: no logits are saved, and none are computed twice.

    X = F W ᵀ + b,   P = softmax X,   ∂loss/∂X = (P − Y) / n

The gradient of a cross-entropy follows from the logits alone, so each chunk of tokens forms it in the forward pass,
turns it into the gradients of the hidden states and of the head at once, and frees its logits. What waits for the
backward pass is as large as the hidden states and the trained parameters of the head. The idea is that of Liger-Kernel
and of torchtune's chunked losses; this is plain torch, for any device.

At 4,096 tokens and a vocabulary of 128,256 the logits of Llama 3 and their gradient are 2 and 4 bytes each of half a
billion elements; a chunk of 256 tokens has a sixteenth of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.plain import is_autocast, without_autocast
from .base import CompressedFunction, apply, check_first_derivative
from .liger_loss import loss_by_liger
from .loss_of_chunk import AS_IT_IS, LossOptions, Squash, loss_of_chunk

__all__ = ["chunked_cross_entropy"]

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


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    num_items_in_batch: Tensor | float | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the cross-entropy of ``linear(hidden, weight, bias)``, over chunks of tokens, without saving any logits.

    Loss and gradients are those of `torch.nn.functional.linear` and `cross_entropy`, but for the order of sums. The
    gradients are formed in the forward pass, of what requires one: a frozen head costs nothing but those of `hidden`.
    On the CPU tokens whose label is ignored are not computed at all. The loss of a frozen head is Liger-Kernel's where
    that is installed, on NVIDIA GPUs (liger_loss.py).

    Args:
        hidden: (*, features), in float16, bfloat16, float32 or float64; under autocast in any of them.
        weight: (vocabulary, features), of the same dtype.
        labels: (*), int64, from 0 to vocabulary - 1, or `ignore_index`. They are not shifted: for a causal model give
            ``hidden[:, :-1]`` and ``labels[:, 1:]``.
        bias: (vocabulary,), or None.
        ignore_index: the label of tokens that do not count.
        reduction: ``mean`` over the tokens that count, NaN if there are none, or ``sum``.
        label_smoothing: 0 to 1, as in torch.
        num_items_in_batch: divides the sum instead, as the Trainer of transformers asks where it accumulates gradients.
        z_loss: adds this multiple of the squared log-sum-exp of each token (PaLM, Section 5).
        softcap: a number c lets the logits be c · tanh(logits / c), as Gemma 2's.
        scale: multiplies the logits, before `softcap`.
        chunk_size: tokens of a chunk. By default so many that its logits are as large as `hidden`, and at least 256;
            for a head that is trained, a quarter of its features.

    Returns:
        A number, in float32 if the head multiplies in 16 bits, else in its dtype. Sums over logits are in that dtype.

    Raises:
        FewbitError: shapes, dtypes or an option do not fit, or a label on the CPU is out of range.
        RuntimeError: in a backward pass with create_graph=True: there is no second derivative.

    Example:
        head = torch.nn.Linear(64, 1000)
        hidden, labels = torch.randn(2, 32, 64, requires_grad=True), torch.randint(1000, (2, 32))
        loss = fewbit.layers.chunked_cross_entropy(hidden, head.weight, labels, head.bias)
        loss.backward()
    """
    _check(hidden, weight, labels, bias)
    if softcap is not None and not softcap > 0:
        raise FewbitError(f"softcap is a positive number or None, not {shown(softcap)}")
    squash = Squash(scale) if softcap is None else Squash(scale / softcap, True, softcap)
    reduced = reduction if num_items_in_batch is None else "sum"
    options = LossOptions(ignore_index, reduced, label_smoothing, z_loss, squash, chunk_size)
    loss = loss_of([Head(hidden, weight, bias, product_dtype(hidden))], labels, options)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


def loss_of(heads: Sequence[Head], labels: Tensor, options: LossOptions) -> Tensor:
    """Return the loss of logits that are the sum of `heads`, of tokens of any shape."""
    tokens = heads[0].hidden
    _check_labels(labels, options.ignore_index, heads[0].weight.shape[0])
    head, *others = heads
    if not others and (head.dtype, head.factor, options.squash) == (head.hidden.dtype, 1, AS_IT_IS):
        how = {name: getattr(options, name) for name in ("ignore_index", "reduction", "label_smoothing", "z_loss")}
        loss = None if options.chunk_size else loss_by_liger(head.hidden, head.weight, head.bias, labels, **how)
        if loss is not None:
            return loss
    flat = [t for h in heads for t in (h.hidden.reshape(-1, h.hidden.shape[-1]), h.weight, h.bias)]
    products = tuple((head.dtype, head.factor) for head in heads)
    with without_autocast(tokens):
        return apply(ChunkedCrossEntropy, labels.reshape(-1), options, products, *flat)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which torch's linear layer multiplies here: autocast's, if it is on, and else that of x."""
    if not is_autocast(hidden) or hidden.dtype == torch.float64:
        return hidden.dtype
    return torch.get_autocast_dtype(hidden.device.type)


def sum_dtype(*products: torch.dtype) -> torch.dtype:
    """Return the dtype of logits after the heads, and of all sums over them: float32 for those of 16 bits."""
    dtype = products[0]
    for other in products[1:]:
        dtype = torch.promote_types(dtype, other)
    return torch.float32 if dtype in _HALVES else dtype


# ---- the function of autograd ----------------------------------------------------------------------------------------


class ChunkedCrossEntropy(CompressedFunction):
    """labels, options, dtype and factor of each head, and its F, W, b -> the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        labels: Tensor,
        options: LossOptions,
        products: tuple[tuple[torch.dtype, float], ...],
        *tensors: Tensor | None,
    ) -> Tensor:
        """Return the loss; save the gradients of what requires one."""
        loss, divisor, grads = loss_and_gradients(labels, options, products, ctx.needs_input_grad[3:], tensors)
        save_gradients(ctx, [None if t is None else t.dtype for t in tensors], divisor, grads)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients times that of the loss."""
        check_first_derivative()
        return None, None, None, *saved_gradients(ctx, *grads)


def loss_and_gradients(
    labels: Tensor,
    options: LossOptions,
    products: Sequence[tuple[torch.dtype, float]],
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
    grads = [grad for head in heads for grad in head.gradients(rows, labels.shape[0], later)]
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

    def gradients(self, rows: Tensor | None, tokens: int, unscaled: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias; rows that do not count have zeros.

        Args:
            rows: those that count; None: all.
            tokens: that there are.
            unscaled: whether they are sums that float16 may not hold.
        """
        of_hidden = self.of_hidden
        if of_hidden is not None and rows is not None:
            of_hidden = of_hidden.new_zeros(tokens, of_hidden.shape[1]).index_copy_(0, rows, of_hidden)
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


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    for name, t in (("hidden", hidden), ("weight", weight)):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise FewbitError(f"{name} is a tensor of floating-point numbers, not {shown(getattr(t, 'dtype', t))}")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise FewbitError(
            f"hidden is (*, features) and weight (vocabulary, features), not {(*hidden.shape,)} and {(*weight.shape,)}"
        )
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != hidden.shape[:-1]:
        given = f"{labels.dtype} of {(*labels.shape,)}" if isinstance(labels, Tensor) else shown(labels)
        raise FewbitError(f"labels are int64, one for each token, {(*hidden.shape[:-1],)}, not {given}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise FewbitError(f"bias is ({weight.shape[0]},), one for each row of weight, not {(*bias.shape,)}")
    others = {t.dtype for t in (weight, bias) if t is not None} - {hidden.dtype}
    if others and not is_autocast(hidden):
        raise FewbitError(f"hidden, weight and bias have one dtype, not {hidden.dtype} and {others.pop()}")


def _check_labels(labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Raise FewbitError if a label is out of range; on other devices than the CPU the kernels find that."""
    if labels.device.type != "cpu" or type(labels) is not Tensor or is_compiling():
        return
    wrong = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if wrong.any():
        raise FewbitError(
            f"labels are from 0 to {vocabulary - 1}, or {ignore_index} to be ignored, not {int(labels[wrong][0])}"
        )
