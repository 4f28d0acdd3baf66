"""The interface of a method of `convert`: its config, which holds the options, and its handler, which applies it.

    ActNN("L3", bits=2)                     a config: a frozen dataclass that checks its fields
    HANDLER.make(config, model, fused)      a `Method`: the config applied to a model
    method.candidates()                     the modules that it can replace, filtered by include and exclude
    method.apply(found, skipped, make)      replaces them and returns an `Applied`
    HANDLER.undo(model)                     puts back the modules that the method replaced

To add a method, write its config and handler in a new module and list the handler in pipeline.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ...tables.table import check_bits
from ..activations.inverted import Keep, check_keep
from ..activations.modules import FewBitActivation
from ..activations.table_lookup import DEFAULT_BITS, Rounding, check_rounding
from ..layers.saver import Saver
from .find import Form, Found
from .report import Left, Replaced

# Returns the few-bit form of an activation, or the reason there is none.
Make = Callable[[Found, Form], FewBitActivation | str]


@dataclass(frozen=True)
class Applied:
    """The result of one or several methods.

    Attributes:
        model: the given object, or its replacement.
        replaced, left: rows of the report.
        taken: ids of the modules that the method claims, each with all its submodules.
        notes: further lines of the report.
        derivatives: the saver for derivatives that are to be rounded at random and that no table of kind ``stochastic``
            is for; None: such activations are left.
        open: ids of the submodules of claimed modules that other methods may replace.
    """

    model: nn.Module
    replaced: tuple[Replaced, ...] = ()
    left: tuple[Left, ...] = ()
    taken: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    derivatives: Saver | None = None
    open: frozenset[int] = frozenset()

    def takes(self, found: Found) -> bool:
        """Return whether `found` is claimed or inside a claimed module."""
        claimed = any(id(module) in self.taken for module in (found.current, *found.around))
        return claimed and id(found.current) not in self.open

    def then(self, later: "Applied") -> "Applied":
        """Return this result combined with a later one on the same model, whose rows replace those left here."""
        reported = {row.name for row in (*later.replaced, *later.left)}
        return Applied(
            self.model if self.replaced else later.model,  # a replaced model has no other parts to replace
            (*self.replaced, *later.replaced),
            (*(row for row in self.left if row.name not in reported), *later.left),
            self.taken | later.taken,
            (*self.notes, *later.notes),
            later.derivatives or self.derivatives,
            self.open - later.taken | later.open,
        )


@dataclass(frozen=True)
class Activations:
    """Activations that no other method replaces, by a table of their derivative (Few-bit Backward).

    Attributes:
        bits: 1 to 8 for each element; None leaves the activations unchanged.
        rounding: ``deterministic``, with the least error, or ``stochastic``, without bias.
        keep: ``output`` lets GELUs save their output and one bit (`fewbit.GELU`), others codes.

    Raises:
        FewbitError: `bits` is not None or an integer from 1 to 8, or `rounding` or `keep` is neither of these.

    Example:
        fewbit.convert(model, fewbit.Activations(keep="output"))
    """

    bits: int | None = DEFAULT_BITS
    rounding: Rounding = "deterministic"
    keep: Keep = "codes"

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_bits(self.bits)
        check_rounding(self.rounding)
        check_keep(self.keep)


class Method(Protocol):
    """A config applied to a model."""

    @property
    def asked(self) -> str:
        """The config as the report calls it."""
        ...

    @property
    def wants(self) -> str:
        """The kinds of modules that it converts, for the report."""
        ...

    @property
    def activations(self) -> Activations | None:
        """The config of activations that no method replaces; None: the method does not set it."""
        ...

    @property
    def compresses_layers(self) -> bool:
        """Whether it changes how layers save their inputs; only one such method can apply to a model."""
        ...

    def candidates(self) -> list[Found]:
        """Return the modules that it can replace, from which include and exclude select."""
        ...

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Replace every unclaimed candidate in place; report each skipped one with its reason."""
        ...


def _no_parts(model: nn.Module, again: bool) -> set[int]:
    return set()


@dataclass(frozen=True)
class Handler:
    """The entry points of a method for `convert` and `revert`.

    Attributes:
        config: the class of its configs.
        make: (config, model, fused) -> the `Method` for a model; `fused` as for `convert`.
        undo: puts back, in place, the modules that the method replaced; returns the model, or its original if the model
            itself is a replacement.
        parts: (model, again) -> ids of the modules inside converted ones, which no other method may replace; `again` if
            the method itself is applied anew.
    """

    config: type
    make: Callable[[Any, nn.Module, bool], Method]
    undo: Callable[[nn.Module], nn.Module]
    parts: Callable[[nn.Module, bool], set[int]] = _no_parts
