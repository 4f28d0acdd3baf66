"""The keywords of `fewbit.convert`, in one place: what they are, the methods that they stand for, and how these run.

Each method runs on the modules that the earlier ones left.

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
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from ..activations.arguments import Rounding, TableOrPath
from .actnn import ActNN
from .attention import Attention
from .blpa import BLPA
from .chunked_loss import ChunkedLoss, read_loss
from .find import Found, Selectors
from .gated_mlps import GatedMLPs, read_glu
from .method import Activations, Applied, Make, Method, Task
from .normalizations import Normalizations
from .swap import was_changed
from .vquant import VQuant

METHODS: tuple[type[Method], ...] = (ChunkedLoss, GatedMLPs, BLPA, Attention, ActNN, Normalizations, VQuant)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `convert` but for the model and the batch, whose docstring describes them.

    Attributes:
        methods: configs, or one number, which is `bits`.
        bits, level, outliers, fuse_preact, glu, attention, loss, rounding: sugar for configs.
        include, exclude, tables, fused, adapt: which modules are replaced, and by what.

    Raises:
        FewbitError: an argument is wrong, there are both configs and keywords, or two configs exclude each other.
    """

    methods: tuple[Any, ...] = ()
    bits: float | None = None
    include: Selectors | None = None
    exclude: Selectors = ()
    tables: Mapping[str, TableOrPath] | None = None
    fused: bool = False
    outliers: float | None = None
    level: str | None = None
    fuse_preact: int | None = None
    glu: str | Mapping[str, Any] | None = None
    attention: int | None = None
    loss: str | None = None
    rounding: Rounding | None = None
    adapt: int | None = None

    def __post_init__(self) -> None:
        if self.adapt is not None:
            check_integer("adapt", self.adapt, 2)
        _ = self.configs  # which checks the others

    @property
    def configs(self) -> tuple[Any, ...]:
        """The configs that the arguments stand for, in the order in which they run."""
        sugar = (
            self.bits,
            self.level,
            self.outliers,
            self.fuse_preact,
            self.glu,
            self.rounding,
            self.attention,
            self.loss,
        )
        return tuple(configs_of(self.methods, *sugar))


NAMES = tuple(each.name for each in fields(Options))


def configs_of(
    methods: Sequence[Any],
    bits: Any,
    level: Any,
    outliers: Any,
    fuse_preact: Any,
    glu: Any,
    rounding: Any,
    attention: Any,
    loss: Any = None,
) -> list[Any]:
    """Return the configs that the arguments of `convert` stand for.

    Raises:
        FewbitError: an argument is wrong, there are both configs and keywords, or two configs exclude each other.
    """
    if len(methods) == 1 and not _is_config(methods[0]):  # convert(model, 3)
        if bits is not None:
            raise FewbitError("bits is given twice")
        methods, bits = (), methods[0]
    if methods:
        given = {"bits": bits, "level": level, "outliers": outliers, "fuse_preact": fuse_preact, "glu": glu}
        given |= {"attention": attention, "loss": loss, "rounding": rounding}
        _check_methods(methods, [name for name, value in given.items() if value is not None])
        return list(methods)
    if level is not None and outliers is not None:
        raise FewbitError(
            "level and outliers exclude each other: both want every layer, which saves its input in one way; give one"
        )
    if loss is not None and all(x is None for x in (bits, level, outliers, fuse_preact, glu, rounding, attention)):
        return [read_loss(loss)]  # exact, and nothing else is asked for
    configs: list[Any] = [] if loss is None else [read_loss(loss)]
    if glu is not None:
        configs.append(read_glu(glu))
    if fuse_preact is not None:
        configs.append(BLPA(fuse_preact))
    if attention is not None:
        configs.append(Attention(attention))
    rounded = {} if rounding is None else {"rounding": rounding}
    if level is not None:
        return [*configs, ActNN(level, bits, **rounded)]
    activations = Activations(**rounded) if bits is None else Activations(bits, **rounded)
    if outliers is not None:
        configs.append(VQuant(activations.bits or 0, outliers))
    return [*configs, activations]


def _check_methods(methods: Sequence[Any], keywords: Sequence[str]) -> None:
    for config in methods:
        if not _is_config(config):
            accepted = ", ".join(kind.__name__ for kind in (*METHODS, Activations))
            raise FewbitError(f"a method is one of {accepted}, not {shown(config)}")
    if keywords:
        raise FewbitError(
            f"give methods, as {methods[0]!r}, or {keywords[0]}=, not both: bits of activations are Activations(bits)"
        )
    kinds = [type(config) for config in methods]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise FewbitError(f"{twice.__name__} is given twice")


def _is_config(value: object) -> bool:
    return isinstance(value, Method | Activations)


# ---- running the methods ---------------------------------------------------------------------------------------------


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
