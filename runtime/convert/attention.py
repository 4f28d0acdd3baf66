"""`fewbit.convert(model, level="L2", attention=6)`: attention saves query, key and value in few bits.

torch's attention saves query, key, value, its output and the log-sum-exp. Here the output and the log-sum-exp are not
saved, and attention is computed once more in the backward pass, from the decompressed query, key and value
(layers/attention.py). What the next projection saves of the output is its own.
"""

import math
from dataclasses import dataclass

from torch import nn

from ...tables.errors import check_integer
from ..layers.attention_calls import calls_attention, form_of_calls
from ..layers.saver import QuantizerSaver
from ..quantizers import PerGroup
from ..tensors.levels import FITTED
from .find import Found, modules_of
from .method import Applied, Method, Task
from .report import Replaced
from .swap import restore, swap_class, swapped_by, torch_class, was_changed

DEFAULT_BITS = 6  # scores are a product of two rounded tensors, under an exponential


@dataclass(frozen=True)
class Attention(Method):
    """Modules whose forward calls `scaled_dot_product_attention`, of any package, or transformers' interface to it.

    Nothing of the forward pass changes. With a mask transformers repeats the keys and values that several queries
    share before it calls torch; ``attn_implementation="fewbit"`` saves them once.

    Attributes:
        bits: 1 to 8, of query, key and value.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8.

    Example:
        fewbit.convert(model, fewbit.ActNN("L2"), fewbit.Attention())
    """

    wants = "module that calls scaled_dot_product_attention"
    asks = "attention={bits}"
    by = "attention"
    bits: int = DEFAULT_BITS

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, 1, 8)

    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the modules that call attention."""
        return modules_of(model, lambda module: calls_attention(torch_class(module)))

    def apply(self, task: Task) -> Applied:
        """Change the classes of the modules; the layers in them stay open to other methods."""
        saver = QuantizerSaver(PerGroup(self.bits, levels=FITTED))
        wanted, left = task.sorted(_why_not, lambda module: torch_class(module).__name__)
        replaced = []
        for each, module in wanted:
            name = torch_class(restore(module)).__name__
            swap_class(module, form_of_calls(type(module)), "attention")
            vars(module)["saver"] = saver
            replaced.append(Replaced(each.name, name, f"{name}(attention in {self.bits} bits)", self.bits, math.nan))
        return Applied(task.model, tuple(replaced), left)


def _why_not(module: nn.Module) -> str | None:
    if was_changed(module):
        return "its class was changed since it was converted"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    own = "saver" in vars(module) and swapped_by(module) is None
    return "it has an attribute saver of its own" if own else None
