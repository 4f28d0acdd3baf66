"""The ways of keeping less that `convert` knows beside few-bit activations, and the order in which a model takes them.

    1  glu           glu/conversion.py      gated MLPs in one
    2  fuse_preact   preact/conversion.py   BLPA: normalisation, ReLU and layer in one
    3  level         levels.py              ActNN: layers save their inputs by groups
       outliers      vquant/conversion.py   V-Quant: layers and ReLUs share few bits and the largest values

The larger pieces come first, and each takes what those before it have left; what activations are left then `convert`
replaces by itself. A level and V-Quant both want every layer, so a model takes one of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from ...tables import FewbitError
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
    """

    model: nn.Module
    replaced: tuple[Replaced, ...] = ()
    left: tuple[Left, ...] = ()
    taken: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    derivatives: Saver | None = None

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
        )


class Method(Protocol):
    """A way of keeping less, with its arguments and the model; made by what checks them and changes nothing."""

    @property
    def argument(self) -> str:
        """How the user asks for it: an argument of `convert`."""
        ...

    @property
    def wants(self) -> str:
        """What a model needs to have for it."""
        ...

    def candidates(self) -> list[Found]:
        """Return the parts that it may replace, for the user to choose from."""
        ...

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Replace, in place, those of its candidates that are free, but for the skipped, which are told with why."""
        ...


@dataclass(frozen=True)
class Methods:
    """What the user asked for.

    Attributes:
        model: what is converted.
        chosen: each method with the parts that it may replace, in the order in which they run.
        activation_bits: of activations that no method takes; None if they stay as they are, and untold.
    """

    model: nn.Module
    chosen: tuple[tuple[Method, list[Found]], ...]
    activation_bits: int | None

    @property
    def candidates(self) -> list[Found]:
        """What any of the methods may replace, for the user to choose from."""
        return [found for _, candidates in self.chosen for found in candidates]

    def apply(self, skipped: Mapping[Found, str], make: Make) -> Applied:
        """Run the methods, each on what those before it have left; return what they did together."""
        done = Applied(self.model, taken=frozenset(self._parts()))
        for method, candidates in self.chosen:
            free = [found for found in candidates if not done.takes(found)]
            applied = method.apply(free, skipped, make)
            if not applied.replaced:
                told = nothing_to_do(method.argument, method.wants, bool(applied.left))
                applied = replace(applied, notes=(*applied.notes, told))
            done = done.then(applied)
        return done

    def _parts(self) -> set[int]:
        """Return the identities of modules that others compute with as one, as they were found: they are not free."""
        from ..layers.gated_mlp import GatedMLP
        from ..layers.preact.layers import PreActLayer
        from .blpa import ByChains
        from .preact_chains import swallowed

        wholes = [module for module in self.model.modules() if isinstance(module, GatedMLP | PreActLayer)]
        parts = {id(part) for whole in wholes for part in whole.modules() if part is not whole}
        fused_anew = any(isinstance(method, ByChains) for method, _ in self.chosen)
        return parts if fused_anew else parts | swallowed(self.model)


def nothing_to_do(argument: str, wants: str, any_left: bool) -> str:
    """Return the note of the report that a method that was asked for has replaced nothing."""
    why = "all that it could take is left, with the reasons above" if any_left else f"the model has no {wants}"
    return f"{argument}: nothing to do here: {why}"


def choose_methods(model: nn.Module, bits: Any, fused: bool, **wanted: Any) -> Methods:
    """Return the methods that the user asked for, with their arguments checked.

    Args:
        model, bits, fused: as of `convert`.
        **wanted: its arguments level, outliers, fuse_preact and glu, None where not given.

    Raises:
        FewbitError: two of them want the same layers, or an argument is wrong.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    if "level" in given and "outliers" in given:
        raise FewbitError(
            "level and outliers exclude each other: both want every layer, which saves its input in one way; give one"
        )
    chosen: list[Method] = []
    if "glu" in given:
        from .gated_mlps import ByGates, read_options

        chosen.append(ByGates(model, read_options(given["glu"]), fused))
    if "fuse_preact" in given:
        from .blpa import ByChains

        chosen.append(ByChains.of(model, given["fuse_preact"]))
    if "level" in given:
        from .actnn import ByLevel

        by_level = ByLevel.of(model, given["level"], bits)
        chosen.append(by_level)
        activation_bits = by_level.activation_bits
    else:
        activation_bits = check_bits(DEFAULT_BITS if bits is None else bits)
        if "outliers" in given:
            from .vquant import ByValue

            chosen.append(ByValue.of(model, activation_bits, given["outliers"]))
    return Methods(model, tuple((method, method.candidates()) for method in chosen), activation_bits)


def undo_methods(model: nn.Module) -> nn.Module:
    """Put back, in place, what methods replaced in `model`; return it, or what it itself was in place of.

    Raises:
        FewbitError: a layer's class was changed since it was converted; the model is then as it was.
    """
    from ..layers.callers import forget_inputs
    from .gated_mlps import ungate
    from .preact_chains import unfuse
    from .swap import restore, was_changed
    from .vquant import relus_again

    for name, module in model.named_modules():
        if was_changed(module):
            raise FewbitError(
                f"{name or 'the model'} became a {type(module).__name__} after it was converted: take off what made it "
                "one, such as a parametrization or FSDP, before revert"
            )
    for module in model.modules():
        restore(module)
    forget_inputs(model)
    unfuse(model)
    return ungate(relus_again(model))
