"""The layers of a model that a guard tells apart, and those of them that are exact whatever a plan says."""

from dataclasses import dataclass

from torch import nn

from ..saved.checkpoint import outermost_blocks
from .places import within

OUTSIDE = ""  # stands for what is saved outside of all layers


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of the trained layers of a model, in order: its blocks, and what has parameters besides."""
    blocks = outermost_blocks(model)
    found = []
    for name, module in model.named_modules():
        inside = any(within(name, block) for block in blocks)
        own = module.parameters() if name in blocks else () if inside else module.parameters(recurse=False)
        if any(p.requires_grad for p in own):
            found.append(name)
    return found


@dataclass(frozen=True)
class ExactLayers:
    """Layers that are exact.

    Attributes:
        names: of layers, or `OUTSIDE`.
        layers: all that there are.
    """

    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    def __contains__(self, target: str) -> bool:
        """Return whether a place, an attention or a module is in one of them."""
        module = target.partition(":")[0]
        around = [layer for layer in self.layers if within(module, layer)]
        return any(layer in self.names for layer in around) or (OUTSIDE in self.names and not around)
