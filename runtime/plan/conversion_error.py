"""Measures what converting modules does to the gradient, each time by a forward and a backward pass of the step.

    tables       codes of its derivative's table in place of what an activation saves
    gated MLPs   parts of the product in place of its inputs and itself
    outputs      the output of a normalization or GELU in place of its input

Modules of the first layers, those in the middle and the last ones are converted together; for outputs, all of a class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.api import convert, undo_conversion
from ..convert.find import Form, form_of
from ..convert.gated_mlps import GatedMLPs
from ..convert.method import Activations
from ..convert.normalizations import Normalizations
from ..convert.report import Report
from ..layers import KeepOutput
from ..tensors.philox import draw_seed
from .gradient_error import (
    BITS,
    PROBE,
    TABLE_BITS,
    TABLE_PROBE,
    Errors,
    difference,
    noise_and_bias,
    product,
    relative_variance,
    together,
)
from .step import Step

# What saves its output in place of its input.
BY_OUTPUT = (Normalizations(), Activations(keep="output"))


@dataclass(frozen=True)
class ConversionErrors:
    """What conversions do to the gradient, by name of the module.

    Attributes:
        tables: squared relative error of the gradient with codes of a table, by bits.
        gated: of saving the parts of a gated MLP, by bits of the copies.
        outputs: squared relative error with the output in place of the input.
    """

    tables: Mapping[str, Mapping[int, float]]
    gated: Mapping[str, Errors]
    outputs: Mapping[str, float]


def measure_conversions(
    step: Step, tables: Mapping[str, nn.Module], gated: Sequence[str], outputs: Sequence[str]
) -> ConversionErrors:
    """Return the errors of conversions.

    Args:
        step: on real tensors.
        tables: activations that have tables, by name.
        gated: names of gated MLPs, as `gated_mlps_of` returns them.
        outputs: names of what can save its output, as `outputs_of` returns them.
    """
    with step.apart():
        trial = _Trial(step)
        return ConversionErrors(_of_tables(trial, tables), _of_gated_mlps(trial, gated), _of_outputs(trial, outputs))


class _Trial:
    """A step that runs with some of its modules converted, always with the same dropout."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._state = torch.random.get_rng_state()

    @cached_property
    def exact(self) -> list[Tensor]:
        """The gradient without conversions."""
        return self._gradient(0)

    @cached_property
    def scale(self) -> float:
        """The squared norm of the gradient."""
        return product(self.exact, self.exact) or 1.0

    def wrong(self, *methods: Any, include: Sequence[str], draws: int = 1) -> tuple[Report, list[list[Tensor]]]:
        """Return the report of a conversion, and the error of the gradient in each of several draws."""
        exact = self.exact
        report = convert(self.step.model, *methods, include=include)
        found = [difference(self._gradient(draw), exact) for draw in range(draws)]
        undo_conversion(self.step.model)
        return report, found

    def _gradient(self, draw: int) -> list[Tensor]:
        torch.random.set_rng_state(self._state)
        for _ in range(draw):  # copies are rounded by a stream of their own, which begins anew with torch's
            draw_seed()
        loss, _ = self.step.forward()
        parameters = self.step.parameters
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


# ---- tables ----------------------------------------------------------------------------------------------------------


def _of_tables(trial: _Trial, activations: Mapping[str, nn.Module]) -> dict[str, dict[int, float]]:
    """Return the errors with codes of tables of `TABLE_PROBE` bits; other tables err as their own errors say."""
    result: dict[str, dict[int, float]] = {}
    for segment in together(activations, lambda name: type(activations[name]).__name__):
        report, (wrong,) = trial.wrong(Activations(TABLE_PROBE), include=segment)
        names = dict.fromkeys(row.name for row in report.replaced)
        for name in names:
            error = product(wrong, wrong) / trial.scale / len(names)
            result[name] = _by_bits(trial.step.model, name, error)
    return result


def _by_bits(model: nn.Module, name: str, error: float) -> dict[int, float]:
    """Return the errors with tables of other numbers of bits than `TABLE_PROBE`, whose error is given."""
    form = form_of(model.get_submodule(name))
    assert isinstance(form, Form)
    tables = {bits: form.make(bits=bits).table for bits in TABLE_BITS}
    of_probe = tables[TABLE_PROBE].error
    return {
        table.bits: error * (table.error / of_probe if of_probe else 0.0)
        for bits, table in tables.items()
        if table.bits == bits
    }


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


def gated_mlps_of(model: nn.Module) -> list[str]:
    """Return the names of the gated MLPs whose parts can be saved."""
    report = convert(model, GatedMLPs())
    undo_conversion(model)
    return [row.name for row in report.replaced if row.name]


def _of_gated_mlps(trial: _Trial, names: Sequence[str]) -> dict[str, Errors]:
    """Return the errors of saving parts: two draws tell the copies' noise from the table's bias, which the copies' bits
    do not change."""
    result: dict[str, Errors] = {}
    for segment in together(names, lambda _: ""):
        _, (one, two) = trial.wrong(GatedMLPs(copy_bits=PROBE), include=segment, draws=2)
        noise, bias = (part / trial.scale / len(segment) for part in noise_and_bias(one, two))
        probe = relative_variance(PROBE)
        errors = Errors({b: noise * relative_variance(b) / probe for b in BITS}, dict.fromkeys(BITS, bias))
        result.update(dict.fromkeys(segment, errors))
    return result


# ---- outputs ---------------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module) -> list[str]:
    """Return the names of the normalizations and GELUs that can save their output in place of their input."""
    report = convert(model, *BY_OUTPUT)
    names = [row.name for row in report.replaced if row.name and _keeps_output(model.get_submodule(row.name))]
    undo_conversion(model)
    return names


def _keeps_output(module: nn.Module) -> bool:
    saver = getattr(module, "saver", None)
    return isinstance(saver, KeepOutput) or getattr(module, "keep", None) == "output"


def _of_outputs(trial: _Trial, names: Sequence[str]) -> dict[str, float]:
    """Return the errors of a dtype's rounding, and of GELU's interpolation, which differ by class."""
    result: dict[str, float] = {}
    model = trial.step.model
    class_of = {name: type(model.get_submodule(name)) for name in names}
    for each in dict.fromkeys(class_of.values()):
        alike = [name for name in names if class_of[name] is each]
        _, (wrong,) = trial.wrong(*BY_OUTPUT, include=alike)
        result.update(dict.fromkeys(alike, product(wrong, wrong) / trial.scale / len(alike)))
    return result
