"""`fewbit.convert(model, loss="chunked")`: cross-entropy over chunks of tokens, exact, without saving any logits.

The logits of a language model and their gradient are often the largest tensors of a step. Here the head's output holds
no memory, and `torch.nn.functional.cross_entropy` of it, wherever it is called, forms loss and gradients chunk by chunk
(layers/chunked_loss.py). The model's forward pass and its output stay what they are: logits are computed when they are
read (layers/deferred_logits.py).
"""

import math
from dataclasses import dataclass

from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from ..layers.deferred_logits import ChunkedHead
from ..layers.loss_over_chunks import LossOptions
from .find import Found, modules_of
from .method import Activations, Applied, Method, Task
from .report import Replaced, one_line
from .swap import restore, swap_class, torch_class, was_changed

__all__ = ["ChunkedLoss"]


@dataclass(frozen=True)
class ChunkedLoss(Method):
    """Heads of language models whose logits and cross-entropy are computed over chunks of tokens.

    Heads are those that models of transformers name (`get_output_embeddings`), causal and masked, with adapters of peft
    around them too; of any other model those named here. Labels may be shifted or not, ignored or smoothed; logits may
    be scaled or capped before the loss. A loss other than torch's `cross_entropy`, or with weights of classes or
    without reduction, is computed as before, and so it is where no gradients are recorded. In compiled code a loss is
    in chunks by `torch.compile(model, backend="fewbit")`; for other backends it is torch's.

    Attributes:
        heads: names of Linear layers as in `named_modules()`, or one; by default the model's own.
        chunk_size: tokens of a chunk; by default so many that its logits are as large as the hidden states, and at
            least 256.

    Raises:
        FewbitError: `chunk_size` is not a positive integer, or (by `convert`) the model has no module of that name.

    Example:
        fewbit.convert(model, fewbit.ChunkedLoss(chunk_size=512), fewbit.ActNN("L2"))
    """

    wants = 'head that fewbit knows: name it, as ChunkedLoss(heads="lm_head")'
    asks = 'loss="chunked"'
    by = "loss"
    heads: str | tuple[str, ...] = ()
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        _ = LossOptions(chunk_size=self.chunk_size)  # which checks it
        names = (self.heads,) if isinstance(self.heads, str) else self.heads
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise FewbitError(f"heads are names of modules, as 'lm_head', not {shown(self.heads)}")

    @property
    def activations(self) -> Activations:
        """Activations stay as they are."""
        return Activations(None)

    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the heads; in place of one with adapters the Linear layers of which its logits are the sum."""
        modules = dict(model.named_modules(remove_duplicate=False))
        heads: list[nn.Module] = []
        for name in [self.heads] if isinstance(self.heads, str) else self.heads:
            if name not in modules:
                raise FewbitError(f"heads names {shown(name)}, and the model has no module of that name")
            heads.append(modules[name])
        if not self.heads:  # those that models of transformers name as theirs
            finders = (getattr(module, "get_output_embeddings", None) for module in model.modules())
            own = [find() for find in finders if callable(find)]
            heads = [head for head in own if isinstance(head, nn.Module)]
        wanted = set[int]()
        for head in heads:  # the layers in it that give one number for each word, or the head itself
            linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
            words = max((module.out_features for module in linear), default=0)
            wanted |= {id(part) for part in [m for m in linear if m.out_features == words] or [head]}
        return modules_of(model, lambda module: id(module) in wanted)

    def apply(self, task: Task) -> Applied:
        """Change the classes of the heads."""
        wanted, left = task.sorted(why_not)
        replaced = []
        for each, module in wanted:
            was = one_line(restore(module))
            swap_class(module, ChunkedHead, "loss")
            vars(module)["loss_chunk_size"] = self.chunk_size
            replaced.append(Replaced(each.name, was, f"layers.{one_line(module)}", math.nan, math.nan))
        return Applied(task.model, tuple(replaced), left, frozenset(id(module) for _, module in wanted))


def read_loss(loss: object) -> ChunkedLoss:
    """Return the config that `loss` stands for; raise `FewbitError` if it is not ``chunked``."""
    if loss != "chunked":
        raise FewbitError(f"loss is 'chunked', not {shown(loss)}")
    return ChunkedLoss()


def why_not(module: nn.Module) -> str | None:
    """Return why a head's logits cannot be computed in chunks; None if they can."""
    if was_changed(module):
        return "its class was changed since it was converted"
    if torch_class(module) is not nn.Linear:
        return f"{type(module).__name__} may compute something else than torch's Linear, of which chunks are made"
    return "its forward was replaced on the instance" if "forward" in vars(module) else None
