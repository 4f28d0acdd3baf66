"""`fewbit.convert(model, level="L2", attention=6)`: attention saves query, key and value in few bits.

torch's attention saves query, key, value, its output and the log-sum-exp. Here the output and the log-sum-exp are not
saved, and attention is computed once more in the backward pass, from the decompressed query, key and value
(layers/attention.py). What the next projection saves of the output is its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..layers.attention_calls import CallsAttention, calls_attention, form_of_calls
from ..layers.saver import QuantizerSaver
from ..quantizers import PerGroup
from ..tensors.checks import check_integer
from ..tensors.levels import FITTED
from .find import Found, modules_of
from .method import Applied, Handler, Make
from .report import Left, Replaced
from .swap import restore, swap_class, swapped_by, torch_class, was_changed

DEFAULT_BITS = 6  # scores are a product of two rounded tensors, under an exponential


@dataclass(frozen=True)
class Attention:
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

    bits: int = DEFAULT_BITS

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, 1, 8)


@dataclass(frozen=True)
class ByCalls:
    """`Attention` applied to a model.

    Attributes:
        model: the model to convert.
        bits: of the config.
    """

    model: nn.Module
    bits: int
    compresses_layers = False
    activations = None
    wants = "module that calls scaled_dot_product_attention"

    @classmethod
    def of(cls, config: Attention, model: nn.Module, fused: bool) -> "ByCalls":
        """Return the method for `config`."""
        return cls(model, config.bits)

    @property
    def asked(self) -> str:
        """The config as the report calls it."""
        return f"attention={self.bits}"

    def candidates(self) -> list[Found]:
        """Return the modules that call attention."""
        return modules_of(self.model, lambda module: calls_attention(torch_class(module)))

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Change the classes of the modules; the layers in them stay open to other methods."""
        replaced, left = [], []
        saver = QuantizerSaver(PerGroup(self.bits, levels=FITTED))
        for each in found:
            module = each.current
            assert isinstance(module, nn.Module)
            name = torch_class(module).__name__
            why = skipped.get(each) or _why_not(module)
            if why is not None:
                left.append(Left(each.name, name, why))
                continue
            restore(module)
            swap_class(module, form_of_calls(type(module)), "attention")
            vars(module)["saver"] = saver
            replaced.append(Replaced(each.name, name, f"{name}(attention in {self.bits} bits)", self.bits, math.nan))
        return Applied(self.model, tuple(replaced), tuple(left))


def _why_not(module: nn.Module) -> str | None:
    if was_changed(module):
        return "its class was changed since it was converted"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return "it has an attribute saver of its own" if "saver" in vars(restore(module)) else None


def undo(model: nn.Module) -> nn.Module:
    """Restore the classes of the modules."""
    for module in model.modules():
        if isinstance(module, CallsAttention) and swapped_by(module) == "attention":
            restore(module)
    return model


HANDLER = Handler(Attention, ByCalls.of, undo)
