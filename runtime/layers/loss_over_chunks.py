"""The loss of all tokens and its gradients, chunk by chunk: what chunked_loss.py saves, and what graphs call as one op.

P = softmax x,   loss = (1 - s)·(lse - x_y) + s·(lse - mean x) + z·lse²,   ∂x = (1 + 2·z·lse)·P - (1 - s)·Y - s/V
∂F = ∂X W,   ∂W = Σ ∂Xᵀ F,   ∂b = Σ ∂X        of the logits X of a chunk, in the forward pass
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from ..ops.declare import ONCE, PURE, Call, declare
from ..tensors.traits import is_autocast, name_of, without_autocast

# ---- a chunk ---------------------------------------------------------------------------------------------------------

# Below that many tokens the products of a chunk are bound by reading the head: a product with 256 rows does 128
# multiplications for each number of the weight that it reads, which is where CPUs and GPUs start to be bound by them.
_FEWEST = 256
# A chunk adds to the gradient of a trained head, and moves 12 bytes for each of its numbers, product in 16 bits and sum
# in 32, or 8 where the sum is of the product; a logit moves about 50, between operations. On an H100 (4,096 tokens of
# 2,048, 128,256 words) 16 chunks of 256 moved 50 GB for the one and 26 for the other, and a step of 76 ms took 99; a
# quarter of the features makes both about equal.
_FEATURES_A_TOKEN = 4


@dataclass(frozen=True)
class Squash:
    """What is done to each logit before the loss: x to after · tanh(before · x), or to after · before · x.

    Attributes:
        before, after: factors.
        tanh: whether there is a tanh between them.
    """

    before: float = 1.0
    tanh: bool = False
    after: float = 1.0

    def times(self, factor: float) -> "Squash":
        """Return this, and a product after it."""
        return replace(self, after=self.after * factor) if self.tanh else replace(self, before=self.before * factor)


AS_IT_IS = Squash()


@dataclass(frozen=True)
class LossOptions:
    """The options of a loss, as for `chunked_cross_entropy`.

    Attributes:
        squash: of the logits.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    squash: Squash = AS_IT_IS
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise FewbitError(
                f"reduction is mean or sum, not {shown(self.reduction)}: each token's loss needs its logits"
            )
        if not 0 <= self.label_smoothing <= 1:
            raise FewbitError(f"label_smoothing is from 0 to 1, not {shown(self.label_smoothing)}")
        if self.chunk_size is not None:
            check_integer("chunk_size", self.chunk_size, 1)

    def chunks(self, hidden: Tensor, vocabulary: int, trains: bool) -> Iterator[slice]:
        """Yield the tokens of each chunk: as many as make its logits as large as all hidden states, and no fewer than
        its products, and the sums of a head that is trained, are worth."""
        tokens, features = hidden.shape
        fewest = max(_FEWEST, features // _FEATURES_A_TOKEN if trains else 0)
        size = self.chunk_size or max(fewest, -(-tokens * features // max(vocabulary, 1)))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))


def loss_of_chunk(
    x: Tensor, labels: Tensor, share: Tensor, options: LossOptions, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each token of a chunk, and the gradient of its logits; overwrite the logits.

    Args:
        x: (tokens, vocabulary), the logits as the head gives them.
        labels: (tokens,), none of them ignored.
        share: (tokens,), by which the gradients of their losses are multiplied.
        options: of the loss.
        wanted: whether to return the gradient.
    """
    smoothing, vocabulary = options.label_smoothing, x.shape[1]
    squash, tanh = options.squash, None
    factor = squash.before * squash.after
    if squash.tanh:
        tanh = x.mul_(squash.before).tanh_()
        x = tanh * squash.after
    elif factor != 1:
        x.mul_(factor)
    most = x.amax(1, keepdim=True) if vocabulary else x.new_zeros(x.shape[0], 1)
    picked = x.gather(1, labels[:, None]).squeeze(1)
    mean = x.mean(1) if smoothing else None
    exponentials = x.sub_(most).exp_()
    sums = exponentials.sum(1)
    log_sums = sums.log() + most.squeeze(1)
    losses = (1 - smoothing) * (log_sums - picked)
    if mean is not None:
        losses = losses + smoothing * (log_sums - mean)
    if options.z_loss:
        losses = losses + options.z_loss * log_sums.square()
    if not wanted:
        return losses, None
    slope = share * (1 + 2 * options.z_loss * log_sums) if options.z_loss else share
    grad = exponentials.mul_((slope / sums)[:, None])
    grad.scatter_add_(1, labels[:, None], (share * (smoothing - 1))[:, None])
    if smoothing:
        grad.sub_((share * (smoothing / vocabulary))[:, None])
    if tanh is not None:
        grad.mul_(tanh.square_().neg_().add_(1).mul_(factor))
    elif factor != 1:
        grad.mul_(factor)
    return losses, grad


# ---- all chunks ------------------------------------------------------------------------------------------------------

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


def saved_gradients(ctx: Any, grad: Tensor) -> Iterator[Tensor | None]:
    """Yield the gradients that a context has saved, after a divisor, times that of the loss."""
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


# ---- in compiled graphs ----------------------------------------------------------------------------------------------
#
# Traced, the loop over chunks would be unrolled, and the backend fewbit would round the gradients that it saves. As one
# operator it is called, and its gradients are saved.


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
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.save_for_backward(later, *own)
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
