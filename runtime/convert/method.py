"""What a method of `convert` is: a config, a frozen dataclass of its options, that finds, replaces and puts back.

    config = ActNN("L3", bits=2)       checks its fields
    config.candidates(model)           the modules that it can replace, from which include and exclude select
    config.apply(task)                 replaces them and returns an `Applied`
    ActNN.undo(model)                  puts back the modules that the method replaced

To add a method, derive its config from `Method` in a new module, and list it in options.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ...tables.table import check_bits
from ..activations.arguments import DEFAULT_BITS, Rounding, check_rounding
from ..activations.inverted import Keep, check_keep
from ..activations.modules import FewBitActivation
from ..layers.saver import Saver
from .find import Form, Found
from .report import Left, Replaced, one_line
from .swap import By, restore_all

# Returns the few-bit form of an activation, or the reason there is none.
Make = Callable[[Found, Form], FewBitActivation | str]


@dataclass(frozen=True)
class Task:
    """What a method is to convert.

    Attributes:
        model: the model, whose parts are replaced in place.
        found: the candidates that no earlier method has taken.
        skipped: the reasons, by candidate, for those that the user leaves out.
        make: makes the few-bit form of an activation, whose table a method may take.
        fused: as for `convert`.
    """

    model: nn.Module
    found: Sequence[Found]
    skipped: Mapping[Found, str]
    make: Make
    fused: bool

    def sorted(
        self, why_not: Callable[[nn.Module], str | None], text: Callable[[nn.Module], str] = one_line
    ) -> tuple[list[tuple[Found, nn.Module]], tuple[Left, ...]]:
        """Return the candidates to convert, each with its module, and the rows of those to leave.

        Args:
            why_not: the reason to leave a module, None to convert it.
            text: of a module, for its row.
        """
        wanted, left = [], []
        for each in self.found:
            module = each.current
            assert isinstance(module, nn.Module)
            why = why_not(module) or self.skipped.get(each)
            if why is None:
                wanted.append((each, module))
            else:
                left.append(Left(each.name, text(module), why))
        return wanted, tuple(left)


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


class Method(ABC):
    """Base of the configs of methods.

    Attributes:
        wants: the kinds of modules that it converts, for the report.
        asks: how the report calls the config, with its fields in braces.
        by: its name among those that swap the classes of modules.
        compresses_layers: whether it changes how layers save their inputs; only one such method can apply to a model.
    """

    wants: ClassVar[str]
    asks: ClassVar[str]
    by: ClassVar[By]
    compresses_layers: ClassVar[bool] = False

    @property
    def asked(self) -> str:
        """The config as the report calls it."""
        return self.asks.format(**vars(self))

    @property
    def activations(self) -> Activations | None:
        """The config of activations that no method replaces; None: the method does not set it."""
        return None

    @abstractmethod
    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the modules of `model` that it can replace, from which include and exclude select."""

    @abstractmethod
    def apply(self, task: Task) -> Applied:
        """Replace the candidates in place; report each skipped one with its reason."""

    @classmethod
    def undo(cls, model: nn.Module) -> nn.Module:
        """Put back, in place, the modules that the method replaced; by default their classes.

        Returns:
            The model, or its original if the model itself is a replacement.
        """
        return restore_all(model, cls.by)

    @staticmethod
    def parts(model: nn.Module, again: bool) -> set[int]:
        """Return the ids of the modules inside converted ones, which no other method may replace.

        Args:
            model: the model.
            again: whether the method itself is applied anew.
        """
        return set()
