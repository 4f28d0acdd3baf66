"""The ways of keeping less that `convert` knows beside few-bit activations; a model takes one of them at a time.

    level         levels.py              ActNN: layers save their inputs by groups
    outliers      vquant/conversion.py   V-Quant: layers and ReLUs share few bits and the largest values
    fuse_preact   preact/conversion.py   BLPA: normalisation, ReLU and layer in one
    glu           glu/conversion.py      gated MLPs in one

Each takes the parts of a model that are its own; what activations are left `convert` replaces by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ..tables import FewbitError
from ..tables.table import check_bits
from .conversion import Left, Replaced
from .modules import FewBitActivation
from .resolve import DEFAULT_BITS
from .search import Form, Found

# Makes the few-bit form of an activation, or says why there is none.
Make = Callable[[Found, Form], FewBitActivation | str]


@dataclass(frozen=True)
class Applied:
    """What a method did.

    Attributes:
        model: the very object given, or what stands for it now.
        replaced, left: rows of the report.
        taken: identities of modules that are the method's, with all in them.
        notes: what else was done.
    """

    model: nn.Module
    replaced: tuple[Replaced, ...] = ()
    left: tuple[Left, ...] = ()
    taken: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def takes(self, activation: Found) -> bool:
        """Tell whether an activation is the method's, or within what is."""
        return any(id(module) in self.taken for module in (activation.current, *activation.around))


class Method(Protocol):
    """A way of keeping less, with its arguments and the model; made by what checks them and changes nothing."""

    @property
    def activation_bits(self) -> int | None:
        """Bits of the activations that it does not take; None if they stay as they are, and untold."""
        ...

    def candidates(self) -> list[Found]:
        """Return the parts that it may replace, for the user to choose from."""
        ...

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Replace, in place, its candidates but those that are skipped, which are told with why.

        Raises:
            FewbitError: an argument does not go with the model, which is then as it was.
        """
        ...


@dataclass(frozen=True)
class ActivationsAlone:
    """No method: all activations are converted, and nothing else."""

    model: nn.Module
    activation_bits: int

    def candidates(self) -> list[Found]:
        """Return nothing."""
        return []

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Change nothing. What runs in chains that were fused before is theirs."""
        from .preact.fuse import swallowed

        return Applied(self.model, taken=frozenset(swallowed(self.model)))


def choose_method(model: nn.Module, bits: Any, fused: bool, **wanted: Any) -> Method:
    """Return the method that the user asked for.

    Args:
        model, bits, fused: as of `convert`.
        **wanted: its arguments level, outliers, fuse_preact and glu, None where not given.

    Raises:
        FewbitError: there are two, or an argument is wrong.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise FewbitError(f"{names} exclude each other: a layer saves its input in one way, so give one of them")
    if "level" in given:
        from .levels import ByLevel

        return ByLevel.of(model, given["level"], bits)
    whole = check_bits(DEFAULT_BITS if bits is None else bits)
    if "outliers" in given:
        from .vquant.conversion import ByValue

        return ByValue(model, whole, given["outliers"])
    if "fuse_preact" in given:
        from .preact.conversion import ByChains

        return ByChains.of(model, whole, given["fuse_preact"])
    if "glu" in given:
        from .glu.conversion import ByGates, read_options

        return ByGates(model, whole, read_options(given["glu"]), fused)
    return ActivationsAlone(model, whole)


def undo_methods(model: nn.Module) -> nn.Module:
    """Put back, in place, what methods replaced in `model`; return it, or what it itself was in place of."""
    from .glu.conversion import ungate
    from .levels import revert_layers
    from .preact.fuse import unfuse
    from .vquant.conversion import torch_again

    revert_layers(model)
    unfuse(model)
    return ungate(torch_again(model))
