"""`fewbit.convert(model, fewbit.Normalizations())`: normalizations keep their output (Approx-BP, arXiv 2406.16282).

A normalization saves its input, and the layer behind it, if it trains its weight, the normalization's output. The input
follows from the output, so the normalization saves nothing of its own (layers/normalization.py). Llama's, written in
single steps, save two tensors in float32.
"""

import math
from dataclasses import dataclass

from torch import nn

from ..layers import KeepOutput, LayerNorm, RMSNorm
from .find import Found, modules_of
from .method import Activations, Applied, Method, Task
from .neighbours import written_over
from .report import Replaced, one_line
from .swap import form_of, restore, swap_to_form, why_not

_FORMS: dict[type, type] = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
_IN_PLACE = "Normalizations(): an output that is changed in place is refused in the backward pass: exclude that one"


@dataclass(frozen=True)
class Normalizations(Method):
    """Layer and RMS normalizations, of torch.nn and of transformers, that save their output in place of their input.

    The forward pass is torch's, bit for bit; the gradient differs by the rounding of the output. It is for layers that
    save their inputs as they are: where levels or hooks save them in few bits, the exact output would add to them.

    Example:
        fewbit.convert(model, fewbit.Normalizations(), fewbit.Activations(keep="output"))
    """

    wants = "layer or RMS normalization"
    asks = "Normalizations()"
    by = "normalizations"

    @property
    def activations(self) -> Activations:
        """Activations stay as they are."""
        return Activations(None)

    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the normalizations."""
        return modules_of(model, lambda module: form_of(module, _FORMS) is not None)

    def apply(self, task: Task) -> Applied:
        """Change the classes of the normalizations whose output stays what it is."""
        by_module = {id(norm.current): norm for norm in task.found}
        wanted, left = task.sorted(lambda module: why_not(module, _FORMS) or written_over(by_module[id(module)]))
        replaced = []
        for norm, module in wanted:
            was = one_line(restore(module))
            swap_to_form(module, _FORMS, "normalizations", KeepOutput())
            replaced.append(Replaced(norm.name, was, f"layers.{one_line(module)}", math.nan, 0.0))
        return Applied(task.model, tuple(replaced), left, frozenset(by_module), (_IN_PLACE,) if replaced else ())
