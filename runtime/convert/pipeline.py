"""Runs the methods of `convert` on a model, each on the modules that the earlier ones left.

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
from ...tables.errors import shown
from .actnn import HANDLER as ACTNN
from .actnn import ActNN
from .attention import HANDLER as CALLS
from .attention import Attention
from .blpa import BLPA
from .blpa import HANDLER as PREACT_CHAINS
from .find import Found
from .gated_mlps import HANDLER as GATED_MLPS
from .gated_mlps import read_glu
from .method import Activations, Applied, Handler, Make, Method
from .normalizations import HANDLER as BY_OUTPUTS
from .swap import was_changed
from .vquant import HANDLER as VALUE_AWARE
from .vquant import VQuant

HANDLERS: dict[type, Handler] = {
    h.config: h for h in (GATED_MLPS, PREACT_CHAINS, CALLS, ACTNN, BY_OUTPUTS, VALUE_AWARE)
}


@dataclass(frozen=True)
class Methods:
    """The methods chosen for a model.

    Attributes:
        model: the model to convert.
        chosen: each method with its candidates, in the order in which they run.
        parts: ids of modules that are claimed, because a converted module computes with them as one unit.
        activations: the config of activations that no method replaces; without bits they stay unchanged and unreported.
    """

    model: nn.Module
    chosen: tuple[tuple[Method, list[Found]], ...]
    parts: frozenset[int]
    activations: Activations

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
            applied = method.apply(free, skipped, make)
            if not applied.replaced:
                note = nothing_to_do(method.asked, method.wants, bool(applied.left))
                applied = replace(applied, notes=(*applied.notes, note))
            done = done.then(applied)
        return done


def nothing_to_do(asked: str, wants: str, any_left: bool) -> str:
    """Return the report's note that a requested method replaced nothing."""
    why = "all that it could take is left, with the reasons above" if any_left else f"the model has no {wants}"
    return f"{asked}: nothing to do here: {why}"


def configs_of(
    methods: Sequence[Any],
    bits: Any,
    level: Any,
    outliers: Any,
    fuse_preact: Any,
    glu: Any,
    rounding: Any,
    attention: Any,
) -> list[Any]:
    """Return the configs that the arguments of `convert` stand for.

    Raises:
        FewbitError: an argument is wrong, there are both configs and keywords, or two configs exclude each other.
    """
    if len(methods) == 1 and not _is_config(methods[0]):  # convert(model, 3)
        if bits is not None:
            raise FewbitError("bits is given twice")
        methods, bits = (), methods[0]
    keywords = {"bits": bits, "level": level, "outliers": outliers, "fuse_preact": fuse_preact, "glu": glu}
    keywords["attention"] = attention
    rounded = {} if rounding is None else {"rounding": rounding}
    keywords |= rounded
    given = [name for name, value in keywords.items() if value is not None]
    for config in methods:
        if not _is_config(config):
            accepted = ", ".join(kind.__name__ for kind in (*HANDLERS, Activations))
            raise FewbitError(f"a method is one of {accepted}, not {shown(config)}")
    if methods and given:
        raise FewbitError(
            f"give methods, as {shown(methods[0])}, or {given[0]}=, not both: bits of activations are Activations(bits)"
        )
    if methods:
        kinds = [type(config) for config in methods]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise FewbitError(f"{twice.__name__} is given twice")
        return list(methods)
    if level is not None and outliers is not None:
        raise FewbitError(
            "level and outliers exclude each other: both want every layer, which saves its input in one way; give one"
        )
    configs: list[Any] = []
    if glu is not None:
        configs.append(read_glu(glu))
    if fuse_preact is not None:
        configs.append(BLPA(fuse_preact))
    if attention is not None:
        configs.append(Attention(attention))
    if level is not None:
        return [*configs, ActNN(level, bits, **rounded)]
    activations = Activations(**rounded) if bits is None else Activations(bits, **rounded)
    if outliers is not None:
        configs.append(VQuant(activations.bits or 0, outliers))
    return [*configs, activations]


def _is_config(value: object) -> bool:
    return type(value) in HANDLERS or isinstance(value, Activations)


def choose_methods(model: nn.Module, configs: Sequence[Any], fused: bool) -> Methods:
    """Return the methods of the configs for `model`.

    Raises:
        FewbitError: two of them convert the same layers.
    """
    chosen = [HANDLERS[type(c)].make(c, model, fused) for c in configs if not isinstance(c, Activations)]
    layers = [method.asked for method in chosen if method.compresses_layers]
    if len(layers) > 1:
        raise FewbitError(
            f"{layers[0]} and {layers[1]} exclude each other: both want every layer, which saves its input in one way"
        )
    says = [method.activations for method in chosen] + [c for c in configs if isinstance(c, Activations)]
    activations = next((said for said in reversed(says) if said is not None), Activations())
    kinds = {type(c) for c in configs}
    parts = {part for kind, handler in HANDLERS.items() for part in handler.parts(model, kind in kinds)}
    free = tuple((method, method.candidates()) for method in chosen)
    return Methods(model, free, frozenset(parts), activations)


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
    for handler in reversed(HANDLERS.values()):
        model = handler.undo(model)
    return model
