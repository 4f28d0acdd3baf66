"""`fewbit.convert(model, fewbit.Normalizations())`: normalizations keep their output (Approx-BP, arXiv 2406.16282).

A normalization saves its input, and the layer behind it, if it trains its weight, the normalization's output. The input
follows from the output, so the normalization saves nothing of its own (layers/normalization.py). Llama's, written in
single steps, save two tensors in float32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..layers import KeepOutput, LayerNorm, RMSNorm
from ..layers.base import CompressedLayer
from ..layers.huggingface import like
from .find import Found, modules_of
from .method import Activations, Applied, Handler, Make
from .neighbours import written_over
from .report import Left, Replaced, one_line
from .swap import restore, swap_to_form, swapped_by, torch_class, why_not

_FORMS: dict[type, type] = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
_IN_PLACE = "Normalizations(): an output that is changed in place is refused in the backward pass: exclude that one"


@dataclass(frozen=True)
class Normalizations:
    """Layer and RMS normalizations, of torch.nn and of transformers, that save their output in place of their input.

    The forward pass is torch's, bit for bit; the gradient differs by the rounding of the output. It is for layers that
    save their inputs as they are: where levels or hooks save them in few bits, the exact output would add to them.

    Example:
        fewbit.convert(model, fewbit.Normalizations(), fewbit.Activations(keep="output"))
    """


@dataclass(frozen=True)
class ByOutputs:
    """`Normalizations` applied to a model.

    Attributes:
        model: the model to convert.
    """

    model: nn.Module
    compresses_layers = False
    activations = Activations(None)
    asked = "Normalizations()"
    wants = "layer or RMS normalization"

    @classmethod
    def of(cls, config: Normalizations, model: nn.Module, fused: bool) -> "ByOutputs":
        """Return the method for `config`."""
        return cls(model)

    def candidates(self) -> list[Found]:
        """Return the normalizations."""
        return modules_of(self.model, _is_norm)

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Change the classes of the normalizations."""
        replaced, left = [], []
        for norm in found:
            module = norm.current
            assert isinstance(module, nn.Module)
            why = why_not(module, _FORMS) or skipped.get(norm) or written_over(norm)
            if why is not None:
                left.append(Left(norm.name, one_line(module), why))
                continue
            was = one_line(restore(module))
            swap_to_form(module, _FORMS, "normalizations", KeepOutput())
            replaced.append(Replaced(norm.name, was, f"layers.{one_line(module)}", math.nan, 0.0))
        taken = frozenset(id(norm.current) for norm in found)
        return Applied(self.model, tuple(replaced), tuple(left), taken, (_IN_PLACE,) if replaced else ())


def _is_norm(module: nn.Module) -> bool:
    return torch_class(module) in _FORMS or like(torch_class(module)) in _FORMS


def undo(model: nn.Module) -> nn.Module:
    """Restore the classes of the normalizations."""
    for module in model.modules():
        if isinstance(module, CompressedLayer) and swapped_by(module) == "normalizations":
            restore(module)
    return model


HANDLER = Handler(Normalizations, ByOutputs.of, undo)
