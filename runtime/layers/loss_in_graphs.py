"""The loss in chunks as one operator, which compiled graphs call: they save its gradients, and see no chunks.

    loss_in_graph(labels, options, [(dtype, factor)], dtype, hidden, weight, bias)

Traced, the loop over chunks would be unrolled, and the backend fewbit would round the gradients that it saves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.declare import ONCE, PURE, Call, declare
from ..tensors.traits import name_of, without_autocast
from .loss_of_chunk import LossOptions, Squash
from .loss_over_chunks import Product, loss_and_gradients, save_gradients, saved_gradients, sum_dtype


@declare(
    "chunked_loss(Tensor labels, Tensor?[] tensors, bool[] wanted, str[] dtypes, float[] factors, float before,"
    " bool tanh, float after, int ignore_index, str reduction, float label_smoothing, float z_loss,"
    " SymInt? chunk_size) -> Tensor[]",
    tags=(*PURE, ONCE),
)
def chunked_loss(
    labels: Tensor,
    tensors: Sequence[Tensor | None],
    wanted: Sequence[bool],
    dtypes: Sequence[str],
    factors: Sequence[float],
    before: float,
    tanh: bool,
    after: float,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    chunk_size: int | None,
) -> Call:
    """Return the loss, a divisor of its gradients, and these; empty where a tensor is None or its own is not wanted.

    Args:
        tensors: hidden states (tokens, features), weight and bias of each head.
        wanted: of each of these.
        dtypes, factors: of each head; dtypes by name, for torch before 2.13 hands a list of them on as numbers.
    """
    options = LossOptions(ignore_index, reduction, label_smoothing, z_loss, Squash(before, tanh, after), chunk_size)
    products = [(getattr(torch, name), factor) for name, factor in zip(dtypes, factors, strict=True)]
    sums = sum_dtype(*(dtype for dtype, _ in products))
    weight = tensors[1]
    assert weight is not None

    def fake() -> list[Tensor]:
        grads = [weight.new_empty(0) for _ in tensors]
        for i, (t, want) in enumerate(zip(tensors, wanted, strict=True)):
            if t is not None and want:
                dtype, _ = products[i // 3]
                # What is summed over tokens: in float16 only after the division, which waits for a GradScaler's scale.
                of_weight = sum_dtype(dtype) if "float16" in dtypes else t.dtype
                grads[i] = torch.empty_like(t, dtype=(dtype, of_weight, sum_dtype(dtype))[i % 3])
        return [weight.new_empty((), dtype=sums), labels.new_empty(()), *grads]

    def run(_: Any) -> list[Tensor]:
        loss, divisor, grads = loss_and_gradients(labels, options, products, wanted, tensors)
        none = [weight.new_empty(0) for grad in grads if grad is None]
        divided_by = labels.new_ones(()) if divisor is None else divisor
        return [loss, divided_by, *(none.pop() if grad is None else grad for grad in grads)]

    return Call(fake, run)


class ChunkedLossInGraph(torch.autograd.Function):
    """labels, options, products, and hidden states, weight and bias of each head -> the loss."""

    @staticmethod
    def forward(
        ctx: Any, labels: Tensor, options: LossOptions, products: tuple[Product, ...], *tensors: Tensor | None
    ) -> Tensor:
        """Return the loss; save the gradients of what requires one."""
        wanted = [*ctx.needs_input_grad[3:]]
        dtypes, factors = ([*each] for each in zip(*products, strict=True))
        squash = options.squash
        numbers = (options.ignore_index, options.reduction, options.label_smoothing, options.z_loss)
        loss, divisor, *grads = chunked_loss(
            *(labels, tensors, wanted, [*map(name_of, dtypes)], factors, squash.before, squash.tanh, squash.after),
            *(*numbers, options.chunk_size),
        )
        own = [grad if want and t is not None else None for grad, want, t in zip(grads, wanted, tensors, strict=True)]
        later = divisor if torch.float16 in dtypes and options.reduction == "mean" else None
        save_gradients(ctx, [None if t is None else t.dtype for t in tensors], later, own)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients times that of the loss."""
        return None, None, None, *saved_gradients(ctx, *grads)


def loss_in_graph(
    labels: Tensor,
    options: tuple[Any, ...],
    products: tuple[Product, ...],
    dtype: torch.dtype,
    *tensors: Tensor | None,
) -> Tensor:
    """Return the loss in `dtype`: what a graph calls.

    Args:
        labels: (tokens,), int64.
        options: the fields of `LossOptions`, with those of `Squash` in place of it: what a graph holds is plain.
        products: dtype and factor of each head.
        dtype: of the loss.
        tensors: hidden states (tokens, features), weight and bias of each head.
    """
    ignored, reduction, smoothing, z_loss, squash, chunk_size = options
    with without_autocast(labels):
        chosen = LossOptions(ignored, reduction, smoothing, z_loss, Squash(*squash), chunk_size)
        return ChunkedLossInGraph.apply(labels, chosen, products, *tensors).to(dtype)  # pyright: ignore
