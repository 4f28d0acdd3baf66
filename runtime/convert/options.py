"""The keywords of `fewbit.convert`, in one place: what they are, and the methods that they stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...tables import FewbitError
from ...tables.errors import shown
from ..activations.overrides import TableOrPath
from ..activations.table_lookup import Rounding
from ..tensors.checks import check_integer
from .actnn import ActNN
from .attention import Attention
from .blpa import BLPA
from .chunked_loss import ChunkedLoss, read_loss
from .filters import Selectors
from .gated_mlps import GatedMLPs, read_glu
from .method import Activations, Method
from .normalizations import Normalizations
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

    @property
    def asks_for_activations(self) -> bool:
        """Whether few-bit activations were asked for, so that the report notes if there are none."""
        return self.bits is not None or bool(self.methods)


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
