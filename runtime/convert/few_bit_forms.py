"""The few-bit forms of a model's activations: the table of each, its rounding, and its row of the report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...tables import FewbitError, Table
from ..activations.arguments import DEFAULT_BITS, key_for_activation, key_for_module, names_activation, read_tables
from ..activations.modules import GELU, FewBitActivation
from ..backends.forwards import CALLABLE
from ..layers.activation import Activation as RoundedActivation
from ..layers.offload import SwappingSaver
from ..layers.saver import Saver
from .find import ORIGINAL, Activation, Form, Found, form_of, inventory
from .method import Activations
from .options import Options
from .report import Left, Replaced, one_line

__all__ = ["FewBitForms", "Replacement"]

Replacement = FewBitActivation | RoundedActivation


@dataclass(frozen=True)
class FewBitForms:
    """What `convert` knows of the activations of one model.

    Attributes:
        config: bits, rounding and what GELUs save.
        tables: by the user's keys.
        forms: of each activation, or the reason that it has none.
        new: the module that is to replace each.
    """

    config: Activations
    tables: Mapping[str, Table]
    forms: dict[Found, Form | str]
    new: dict[Found, Replacement] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Sequence[Found], config: Activations, options: Options) -> "FewBitForms":
        """Return the forms of the activations `found`, none of them replaced yet.

        Raises:
            FewbitError: a key of `tables` names none of them, or a table cannot be read.
        """
        tables = read_tables(options.tables)
        forms = {activation: form_of(activation.original, options.fused) for activation in found}
        for key in tables:
            by_name = any(key_for_module({key: tables[key]}, activation.names) for activation in forms)
            known = [form.activation for form in forms.values() if isinstance(form, Form)]
            if not by_name and not any(names_activation(key, name) for name in known):
                raise FewbitError(f"tables: no module or activation is called {key!r}; {inventory(list(forms))}")
        return cls(config, tables, forms)

    def choose(self, skipped: Mapping[Found, str]) -> None:
        """Make the replacements, with the table of least error; nothing of the model changes."""
        for activation, form in self.forms.items() if self.config.bits else ():
            if isinstance(form, Form) and activation not in skipped:
                self._note(activation, self.make(activation, form))

    def make(self, activation: Found, form: Form) -> FewBitActivation | str:
        """Return the few-bit module, or the reason there is none for the activation's parameters."""
        key = key_for_module(self.tables, activation.names) or key_for_activation(self.tables, form.activation)
        try:
            new = form.make(bits=self.config.bits or DEFAULT_BITS) if key is None else form.make(table=self.tables[key])
        except FewbitError as error:
            if key is not None:
                raise
            return str(error)
        if self.config.keep == "output" and type(new) is GELU:
            new = GELU(new.approximate, keep="output")
        vars(new)[ORIGINAL] = activation.original
        return new

    def make_part(self, activation: Found, form: Form) -> FewBitActivation | str:
        """Return the form of an activation whose table a gated MLP takes."""
        new = self.make(activation, form)
        if self.config.rounding == "stochastic" and not isinstance(new, str) and self._is_biased(activation, new):
            at_random = self._at_random(activation, form, new, None)
            new = at_random if isinstance(at_random, FewBitActivation) else new  # SquaredReLU has no such table
        return new

    def keep_only(self, wanted: Sequence[Found]) -> None:
        """Drop the replacements of all other activations."""
        for activation in self.new.keys() - set(wanted):
            del self.new[activation]

    def by_activation(self) -> dict[Found, Form]:
        """Return the forms of the activations to replace whose table is not the user's by name."""
        forms = {activation: self.forms[activation] for activation in self.new}
        return {a: f for a, f in forms.items() if isinstance(f, Form) and not key_for_module(self.tables, a.names)}

    def round_at_random(self, saver: Saver | None) -> bool:
        """Exchange inexact tables for those of kind ``stochastic``, if the config asks for it; return whether any was.

        Args:
            saver: compresses a derivative for which there is no such table.
        """
        if self.config.rounding != "stochastic":
            return False
        biased = [activation for activation, new in self.new.items() if self._is_biased(activation, new)]
        for activation in biased:
            self._note(activation, self._at_random(activation, self.forms[activation], self.new[activation], saver))
        return any(activation in self.new for activation in biased)

    def following(self) -> dict[str, FewBitActivation]:
        """Return the replacements whose table can follow the training: inexact, of a named function, not the user's."""
        return {
            activation.name: new
            for activation, new in self.new.items()
            if isinstance(new, FewBitActivation)
            and self._is_biased(activation, new)
            and not new.activation.startswith(CALLABLE)
        }

    def replaced(self) -> list[Replaced]:
        """Return the rows of the replacements."""
        rows = []
        for activation, new in self.new.items():
            is_ours = isinstance(new, RoundedActivation)
            now = f"layers.{_text(new)}" if is_ours else _text(new)
            error = math.nan if is_ours else 0.0 if _keeps_output(new) else new.table.error
            rows.append(Replaced(activation.name, _text(activation.original), now, _bits_of(new), error))
        return rows

    def left(self, found: Sequence[Found], skipped: Mapping[Found, str]) -> list[Left]:
        """Return the rows of those of `found` that are not replaced."""
        rows = []
        for each in (each for each in found if each not in self.new):
            why = self.forms[each]
            if not isinstance(why, str):
                why = skipped[each]
                if isinstance(each.current, FewBitActivation | RoundedActivation):
                    why += f"; it stays at {_bits_of(each.current)} bits"
            rows.append(Left(each.name, _text(each.original), why))
        return rows

    def _note(self, activation: Found, new: Replacement | str) -> None:
        if isinstance(new, str):
            self.forms[activation] = new
            self.new.pop(activation, None)
        else:
            self.new[activation] = new

    def _is_biased(self, activation: Found, new: Replacement) -> bool:
        """Return whether `new` has an inexact table that the user did not give."""
        if not isinstance(new, FewBitActivation) or new.table.error == 0 or _keeps_output(new):
            return False
        return not (key_for_module(self.tables, activation.names) or key_for_activation(self.tables, new.activation))

    def _at_random(self, activation: Found, form: Any, biased: Any, saver: Saver | None) -> Replacement | str:
        """Return the form of an activation whose derivative is rounded at random, or the reason there is none.

        Args:
            activation, form: the activation; its `Form`.
            biased: its deterministic few-bit module, whose bits it takes.
            saver: compresses the derivative where there is no table; if it swaps, codes go to host memory too.
        """
        try:
            new: Any = form.make(bits=biased.bits, rounding="stochastic")
            new.swapper = saver.swapper if isinstance(saver, SwappingSaver) else None
        except FewbitError as error:
            if saver is None:
                return str(error)
            new = RoundedActivation(form.function, saver=saver, inplace=biased.inplace)
        vars(new)[ORIGINAL] = activation.original
        return new


def _keeps_output(new: object) -> bool:
    """Return whether an activation saves its output and no codes."""
    return isinstance(new, GELU) and new.keep == "output"


def _bits_of(activation: FewBitActivation | RoundedActivation) -> int:
    """Return the bits saved for each element."""
    if isinstance(activation, FewBitActivation):
        return activation.bits
    saver: Any = getattr(activation.saver, "saver", activation.saver)  # swapped or not
    return saver.quantizer.bits


def _text(activation: Activation) -> str:
    """Return the repr of a module on one line, or the name of a function."""
    name = None if isinstance(activation, nn.Module) else getattr(activation, "__name__", None)
    return name or one_line(activation)
