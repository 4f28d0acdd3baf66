"""Cross-entropy of a linear head over chunks of tokens: no logits are saved, and none are computed twice.

    X = F W ᵀ + b,   P = softmax X,   ∂loss/∂X = (P − Y) / n

The gradient of a cross-entropy follows from the logits alone, so each chunk of tokens forms it in the forward pass,
turns it into the gradients of the hidden states and of the head at once, and frees its logits. What waits for the
backward pass is as large as the hidden states and the trained parameters of the head. The idea is that of Liger-Kernel
and of torchtune's chunked losses; this is plain torch, for any device.

At 4,096 tokens and a vocabulary of 128,256 the logits of Llama 3 and their gradient are 2 and 4 bytes each of half a
billion elements; a chunk of 256 tokens has a sixteenth of that.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.traits import is_autocast, without_autocast
from .base import CompressedFunction, apply, check_first_derivative
from .loss_over_chunks import (
    AS_IT_IS,
    ChunkedLossInGraph,
    Head,
    LossOptions,
    Product,
    Squash,
    loss_and_gradients,
    product_dtype,
    saved_gradients,
)

# ---- the loss of a frozen head by Liger-Kernel, where that is installed, on NVIDIA GPUs ------------------------------
#
# Its kernel reads a logit twice and writes its gradient once, in 10 bytes of 16-bit numbers where plain torch moves
# about 50, by count and not measured here. A head that is trained stays with plain torch: Liger's chunks are as small
# as make the logits as large as the hidden states, 128 of 4,096 tokens for the 128,256 words of Llama 3, and the head's
# gradient would be added 32 times. Liger scales gradients where they lie, so that a loss that is gone through twice
# (`retain_graph=True`) with another gradient than 1 has wrong ones the second time, as all of Liger's losses.

_DTYPES = (torch.bfloat16, torch.float32)  # of float16 the gradient of a token among thousands would be 0


def loss_by_liger(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> Tensor | None:
    """Return the loss of a head's logits, or None where plain torch computes it; arguments as for
    `chunked_cross_entropy`. Liger caps logits too, which its interpreted kernel could not show."""
    tensors = [t for t in (hidden, weight, bias) if t is not None]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype == hidden.dtype for t in tensors)
    frozen = hidden.requires_grad and not any(t.requires_grad for t in tensors[1:])
    if not (plain and frozen and hidden.dtype in _DTYPES and _serves(hidden)):
        return None
    function: Any = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    with saved_tensors_hooks(lambda x: x, lambda x: x):  # what it saves are gradients, no activations to round
        found = function.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            labels.reshape(-1),
            bias,
            None,
            ignore_index,
            z_loss,
            label_smoothing,
            reduction,
        )
    loss = found[0] if isinstance(found, tuple) else found
    if reduction == "sum":
        return loss
    count = (labels != ignore_index).sum()
    return loss * (count / count)  # of no token torch's mean is NaN, and Liger's 0


def _serves(hidden: Tensor) -> bool:
    """Return whether Liger's kernel can run: it waits for the device, which a CUDA graph cannot."""
    if not hidden.is_cuda or torch.version.hip is not None or is_compiling() or not torch.is_grad_enabled():
        return False
    return find_spec("liger_kernel") is not None and not torch.cuda.is_current_stream_capturing()


# ---- the loss --------------------------------------------------------------------------------------------------------


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
    that is installed, on NVIDIA GPUs (chunked_loss.py).

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
    vocabulary, ignored = heads[0].weight.shape[0], options.ignore_index
    if labels.device.type == "cpu" and type(labels) is Tensor and not is_compiling():  # on a GPU the kernels find it
        wrong = ((labels < 0) | (labels >= vocabulary)) & (labels != ignored)
        if wrong.any():
            given = int(labels[wrong][0])
            raise FewbitError(f"labels are from 0 to {vocabulary - 1}, or {ignored} to be ignored, not {given}")
    head, *others = heads
    if not others and (head.dtype, head.factor, options.squash) == (head.hidden.dtype, 1, AS_IT_IS):
        how = {name: getattr(options, name) for name in ("ignore_index", "reduction", "label_smoothing", "z_loss")}
        loss = None if options.chunk_size else loss_by_liger(head.hidden, head.weight, head.bias, labels, **how)
        if loss is not None:
            return loss
    flat = [t for h in heads for t in (h.hidden.reshape(-1, h.hidden.shape[-1]), h.weight, h.bias)]
    products = tuple((head.dtype, head.factor) for head in heads)
    with without_autocast(tokens):
        if is_compiling():
            return ChunkedLossInGraph.apply(labels.reshape(-1), options, products, *flat)  # pyright: ignore
        return apply(ChunkedCrossEntropy, labels.reshape(-1), options, products, *flat)


# ---- the function of autograd ----------------------------------------------------------------------------------------


class ChunkedCrossEntropy(CompressedFunction):
    """labels, options, dtype and factor of each head, and its F, W, b -> the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        labels: Tensor,
        options: LossOptions,
        products: tuple[Product, ...],
        *tensors: Tensor | None,
    ) -> Tensor:
        """Return the loss; save the gradients of what requires one."""
        loss, divisor, grads = loss_and_gradients(labels, options, products, ctx.needs_input_grad[3:], tensors)
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.save_for_backward(divisor, *grads)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients times that of the loss."""
        check_first_derivative()
        return None, None, None, *saved_gradients(ctx, *grads)


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
