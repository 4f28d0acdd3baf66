"""Runs the methods of `convert` on a model, each on the modules that the earlier ones left.

    loss           ChunkedLoss  chunked_loss.py cross-entropy without logits
    glu            GatedMLPs    gated_mlps.py   gated MLPs in one
    fuse_preact    BLPA         blpa.py         normalization, ReLU and layer in one
    level          ActNN        actnn.py        layers save their inputs by groups
                   Normalizations    normalizations.py    normalizations save their output
    attention      Attention    attention.py    attention saves query, key and value alone
    outliers       VQuant       vquant.py       layers and ReLUs share few bits and the largest values

The keywords of `convert` stand for configs in this order, the larger units first; configs run in the order in which
they are given. `convert` replaces the remaining activations last, by `Activations`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...tables import FewbitError
from .find import Found
from .method import Activations, Applied, Make, Method, Task
from .options import METHODS
from .swap import was_changed


@dataclass(frozen=True)
class Methods:
    """The methods chosen for a model.

    Attributes:
        model: the model to convert.
        chosen: each method with its candidates, in the order in which they run.
        parts: ids of modules that are claimed, because a converted module computes with them as one unit.
        activations: the config of activations that no method replaces; without bits they stay unchanged and unreported.
        fused: as for `convert`.
    """

    model: nn.Module
    chosen: tuple[tuple[Method, list[Found]], ...]
    parts: frozenset[int]
    activations: Activations
    fused: bool

    @property
    def candidates(self) -> list[Found]:
        """All candidates of the methods, from which include and exclude select."""
        return [found for _, candidates in self.chosen for found in candidates]

    @property
    def compresses_layers(self) -> bool:
        """Whether one of the methods changes how layers save their inputs."""
        return any(method.compresses_layers for method, _ in self.chosen)

    def apply(self, skipped: Mapping[Found, str], make: Make) -> Applied:
        """Run the methods, each on the modules that the earlier ones left; return their combined result."""
        done = Applied(self.model, taken=self.parts)
        for method, candidates in self.chosen:
            free = [found for found in candidates if not done.takes(found)]
            applied = method.apply(Task(self.model, free, skipped, make, self.fused))
            if not applied.replaced:
                note = nothing_to_do(method.asked, method.wants, bool(applied.left))
                applied = replace(applied, notes=(*applied.notes, note))
            done = done.then(applied)
        return done


def nothing_to_do(asked: str, wants: str, any_left: bool) -> str:
    """Return the report's note that a requested method replaced nothing."""
    why = "all that it could take is left, with the reasons above" if any_left else f"the model has no {wants}"
    return f"{asked}: nothing to do here: {why}"


def choose_methods(model: nn.Module, configs: Sequence[Any], fused: bool) -> Methods:
    """Return the methods of the configs for `model`.

    Raises:
        FewbitError: two of them convert the same layers.
    """
    chosen = [config for config in configs if isinstance(config, Method)]
    layers = [method.asked for method in chosen if method.compresses_layers]
    if len(layers) > 1:
        raise FewbitError(
            f"{layers[0]} and {layers[1]} exclude each other: both want every layer, which saves its input in one way"
        )
    says = [method.activations for method in chosen] + [c for c in configs if isinstance(c, Activations)]
    activations = next((said for said in reversed(says) if said is not None), Activations())
    parts = {part for kind in METHODS for part in kind.parts(model, any(type(c) is kind for c in chosen))}
    free = tuple((method, method.candidates(model)) for method in chosen)
    return Methods(model, free, frozenset(parts), activations, fused)


def undo_methods(model: nn.Module) -> nn.Module:
    """Undo all methods on `model`, in place; return it, or its original if it is itself a replacement.

    Raises:
        FewbitError: a layer's class was changed since it was converted; the model is then unchanged.
    """
    for name, module in model.named_modules():
        if was_changed(module):
            raise FewbitError(
                f"{name or 'the model'} became a {type(module).__name__} after it was converted: take off what made it "
                "one, such as a parametrization or FSDP, before revert"
            )
    for kind in reversed(METHODS):
        model = kind.undo(model)
    return model
