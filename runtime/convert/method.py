"""A method of `convert`: its config, which says what the user wants, and its handler, which does it to a model.

    ActNN("L3", bits=2)                     a config: a frozen dataclass that checks its fields
    HANDLER.make(config, model, fused)      a `Method`: the config and what it finds in the model
    method.candidates()                     parts of the model, for the user to choose from
    method.apply(found, skipped, make)      replaces them, and returns what it did as `Applied`
    HANDLER.undo(model)                     puts back whatever the method has replaced

To add a method, write its config and handler in a module of their own and list the handler in pipeline.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ...tables.table import check_bits
from ..activations.modules import FewBitActivation
from ..activations.table_lookup import DEFAULT_BITS
from ..layers.saver import Saver
from .find import Form, Found
from .report import Left, Replaced

# Makes the few-bit form of an activation, or says why there is none.
Make = Callable[[Found, Form], FewBitActivation | str]


@dataclass(frozen=True)
class Applied:
    """What a method did, or several.

    Attributes:
        model: the very object given, or what stands for it now.
        replaced, left: rows of the report.
        taken: identities of modules that are the method's, with all in them.
        notes: what else was done.
        derivatives: what the derivatives of activations are saved through where a table would bias them; None: tables
            are taken.
        derivatives_by: the method that asked for that, as the report calls it.
    """

    model: nn.Module
    replaced: tuple[Replaced, ...] = ()
    left: tuple[Left, ...] = ()
    taken: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    derivatives: Saver | None = None
    derivatives_by: str = ""

    def takes(self, found: Found) -> bool:
        """Tell whether a part of the model is the method's, or within what is."""
        return any(id(module) in self.taken for module in (found.current, *found.around))

    def then(self, later: "Applied") -> "Applied":
        """Return this and what was done to the same model after it; of what was left the later one tells."""
        told = {row.name for row in (*later.replaced, *later.left)}
        return Applied(
            self.model if self.replaced else later.model,  # a model that is itself replaced has no other parts
            (*self.replaced, *later.replaced),
            (*(row for row in self.left if row.name not in told), *later.left),
            self.taken | later.taken,
            (*self.notes, *later.notes),
            later.derivatives or self.derivatives,
            later.derivatives_by or self.derivatives_by,
        )


@dataclass(frozen=True)
class Activations:
    """Activation functions that no other method takes, by a table of their derivative (Few-bit Backward).

    Attributes:
        bits: 1 to 8 for each element; None leaves them as they are.

    Raises:
        FewbitError: `bits` is none of these.
    """

    bits: int | None = DEFAULT_BITS

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_bits(self.bits)


class Method(Protocol):
    """A config together with the model that it is for."""

    @property
    def asked(self) -> str:
        """The config as the report calls it."""
        ...

    @property
    def wants(self) -> str:
        """What a model needs to have for it."""
        ...

    @property
    def activations(self) -> Activations | None:
        """What becomes of activations that no method takes; None: the method has no say."""
        ...

    @property
    def compresses_layers(self) -> bool:
        """Whether layers save their inputs by it; a layer does so in one way, so a model takes one such method."""
        ...

    def candidates(self) -> list[Found]:
        """Return the parts that it may replace, for the user to choose from."""
        ...

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Replace every unclaimed candidate in place; report each skipped one with its reason."""
        ...


def _no_parts(model: nn.Module, again: bool) -> set[int]:
    return set()


@dataclass(frozen=True)
class Handler:
    """What `convert` and `revert` know of a method.

    Attributes:
        config: the class of its configs.
        make: (config, model, fused) -> the method for a model; `fused` as of `convert`.
        undo: puts back, in place, what the method replaced; returns the model, or what it itself was in place of.
        parts: (model, again) -> identities of modules that converted ones compute with, which no other method may
            take; `again` if the method itself is to be applied anew.
    """

    config: type
    make: Callable[[Any, nn.Module, bool], Method]
    undo: Callable[[nn.Module], nn.Module]
    parts: Callable[[nn.Module, bool], set[int]] = _no_parts
