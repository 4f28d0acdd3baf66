"""The loss of a chunk of tokens from its logits, and the gradient of these: what chunked_loss.py sums.

P = softmax x,   loss = (1 - s)·(lse - x_y) + s·(lse - mean x) + z·lse²,   ∂loss/∂x = (1 + 2·z·lse)·P - (1 - s)·Y - s/V
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer, shown

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

    def apply_(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the squashed logits, and tanh(before · x), which `backward_` needs, if there is one; overwrite x."""
        if not self.tanh:
            factor = self.before * self.after
            return x if factor == 1 else x.mul_(factor), None
        t = x.mul_(self.before).tanh_()
        return t * self.after, t

    def backward_(self, grad: Tensor, t: Tensor | None) -> Tensor:
        """Return the gradient of the logits before; overwrite both arguments."""
        factor = self.before * self.after
        if t is not None:
            return grad.mul_(t.square_().neg_().add_(1).mul_(factor))
        return grad if factor == 1 else grad.mul_(factor)


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
    x, t = options.squash.apply_(x)
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
    return losses, options.squash.backward_(grad, t)
