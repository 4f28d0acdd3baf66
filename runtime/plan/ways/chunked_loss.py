"""The loss in chunks of tokens: exact, for language models whose head and cross-entropy can be computed so."""

from collections.abc import Iterator, Sequence
from math import prod

from torch import nn

from ...convert.api import convert_beside
from ...convert.chunked_loss import ChunkedLoss, why_not
from ..document import Choice
from ..known import WORTH, Known, Way
from ..problem import CHUNKED
from ..step import Step
from ..trace import Given, Trace


class ChunkedLossWay(Way):
    """Heads whose logits and loss are computed over chunks of tokens."""

    method = CHUNKED
    in_graphs = True

    def targets(self, known: Known, step: Step) -> Sequence[str]:
        """Return the Linear layers that make logits worth the while: the model's own heads, or else the last layer."""
        model, traced = step.model, known.trace
        found = [each for each in ChunkedLoss().candidates(model) if isinstance(each.current, nn.Module)]
        names = [each.name for each in found if each.name in traced.calls]
        if not found:
            modules = dict(model.named_modules())
            layers = [name for name in traced.calls if name and type(modules.get(name)) is nn.Linear]
            names = [max(layers, key=lambda name: traced.calls[name][-1].start)] if layers else []
        modules = [model.get_submodule(name) for name in names]
        usable = all(name and len(traced.calls[name]) == 1 for name in names) and not any(map(why_not, modules))
        largest = 0  # of the logits, in float32
        for name, module in zip(names, modules, strict=True):
            for x in traced.inputs.get(name, ()):
                largest = max(largest, 4 * prod(x.shape[:-1]) * getattr(module, "out_features", 0))
        return tuple(names) if usable and largest > WORTH * int(traced.base.max()) else ()

    def carry_out(self, model: nn.Module, targets: Sequence[str]) -> None:
        """Compute the loss of the logits of these Linear layers in chunks."""
        convert_beside(model, ChunkedLoss(heads=tuple(targets)), include=targets)

    def choices(
        self, model: nn.Module, targets: Sequence[str], before: Trace, after: Trace, seconds: float
    ) -> Iterator[Choice]:
        """Yield a choice for each head, of which the first says what all of them save."""
        now = sum(_gradients(model.get_submodule(name), after.inputs.get(name, ())) for name in targets)
        exact = now + max(0, int(before.base[before.backward] - after.base[after.backward]))
        sizes = [(exact, now, seconds), *[(0, 0, 0.0)] * (len(targets) - 1)]
        for head, (a, b, s) in zip(targets, sizes, strict=True):
            yield Choice(head, CHUNKED, None, a, b, 0.0, 0.0, s)


def _gradients(head: nn.Module, inputs: Sequence[Given]) -> int:
    """Return the bytes of the gradients that wait for the backward pass, of hidden states and what learns of a head."""
    hidden = sum(prod(x.shape) * x.dtype.itemsize for x in inputs if x.requires_grad)
    return hidden + sum(p.nbytes for p in head.parameters() if p.requires_grad)
