"""Codes of its derivative's table in place of what an activation saves, rounded to the nearest level or at random."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from ....tables import FewbitError
from ...activations.table_lookup import Rounding
from ...convert.find import Form, activations, form_of
from ...convert.formulas import COMPOSITES
from ...convert.method import Activations
from ...convert.recognize import recognize
from ...memory.peak import peak_of
from ...tensors.packing import packed_size
from ..document import Choice
from ..errors import LEAST_OF_TABLE, TABLE_BITS, TABLE_PROBE, TABLES, Errors, Trial, finite, together
from ..known import ErrorsOfMethods, Known, WayToSave, convert_chosen
from ..problem import STOCHASTIC, TABLE, Hold, Option
from ..step import Step
from ..structure import is_converted
from ..trace import Trace, Traced, backward_start

_ROUNDING: Mapping[str, Rounding] = {TABLE: "deterministic", STOCHASTIC: "stochastic"}


class Tables(WayToSave):
    """Replaces activations by those that save codes."""

    methods = (TABLE, STOCHASTIC)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors by name of the activation, of those of a class measured together."""
        tables = tables_of(step.model)
        return {method: finite(_of_tables(trial, tables, rounding)) for method, rounding in _ROUNDING.items()}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors with codes to the nearest level, shared equally."""
        names = [*tables_of(step.model)]
        noise = {bits: TABLES[bits] / max(1, len(names)) for bits in TABLE_BITS}
        return {TABLE: dict.fromkeys(names, Errors(noise, dict.fromkeys(TABLE_BITS, 0.0)))}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each activation that alone saves what it saves, in one call."""
        by_module = known.trace.by_module
        for method in self.methods:
            for name, errors in known.of(method).items():
                own = by_module.get(name, [])
                members = [i for i in own if known.trace.tensors[i].users == (name,)]
                if not members or len(known.trace.calls.get(name, ())) != 1 or len(members) < len(own):
                    continue
                tensors = [known.trace.tensors[i] for i in members]
                first, last = min(x.saved for x in tensors), max(x.freed for x in tensors)
                made = _made_by(step.model.get_submodule(name))
                elements, spared = tensors[0].elements, [*_spared(name, tensors, known.trace, made)]
                for bits, noise in errors.noise.items():
                    bias = errors.bias[bits]
                    if noise + bias and bits < LEAST_OF_TABLE:
                        continue
                    nbytes = packed_size(elements, bits)
                    seconds = known.speeds.codes(elements, bits, tensors[0].dtype.itemsize) / 2
                    held, costs = (Hold(first, last, nbytes), *spared), (noise, bias, seconds)
                    yield Option(method, name, bits, (*members,), held, nbytes, *costs)

    def carry_out(self, model: nn.Module, choices: Sequence[Choice]) -> None:
        """Replace the activations."""
        convert_chosen(model, choices, lambda choice: Activations(choice.bits, _ROUNDING[choice.method]))


def tables_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the activations that a table can stand for, by name."""
    return {
        found.name: found.current
        for found in activations(model)
        if isinstance(found.current, nn.Module) and len(found.names) == 1 and not is_converted(found.current)
        if isinstance(form_of(found.current), Form)
    }


def _made_by(activation: nn.Module) -> int:
    """Return how many tensors of its input's size an activation's torch calls make at once, when a table is saved.

    QuickGELU is three calls, of which two results live at once; of a formula that is recognized, our own calls run.
    """
    form, written = form_of(activation), recognize(activation)
    if isinstance(form, str) or any(True for _ in activation.parameters()):
        return 1
    forward = COMPOSITES[written.formula].call if written and written.formula else form.function
    x = torch.zeros(64)
    with torch.no_grad():
        return max(1, -(-peak_of(lambda: forward(x)) // x.nbytes))


def _spared(name: str, tensors: Sequence[Traced], trace: Trace, made: int) -> Iterator[Hold]:
    """Yield what both passes of an activation make with a table, less what they make without, as bytes.

    The forward pass makes so many tensors of its input's size at once; the backward pass takes the codes as they are,
    restores nothing, and multiplies once.
    """
    (call,) = trace.calls[name]
    nbytes = tensors[0].nbytes
    forward = (call.start, call.end, made * nbytes)
    backward = (backward_start(tensors, trace), _backward_end(name, tensors, trace), nbytes)
    for start, end, needed in (forward, backward):
        most = trace.base[max(0, start - 1)] + needed
        beyond = np.maximum(trace.base[start:end] - most, 0)
        changes = [0, *(np.flatnonzero(np.diff(beyond)) + 1).tolist(), len(beyond)]
        for a, b in pairwise(changes):
            if a < b and beyond[a]:  # in some releases of torch nothing happens between the two moments
                yield Hold(start + a, start + b, -int(beyond[a]))


def _backward_end(name: str, tensors: Sequence[Traced], trace: Trace) -> int:
    """Return when the backward pass of an activation has ended: when that of the module before it begins.

    Where something larger is computed between the two, what is known is when the last of `tensors` is freed.
    """
    (call,) = trace.calls[name]
    freed = max(x.freed for x in tensors)
    before = [x for x in trace.tensors if x.saved < call.start]
    if not before:
        return freed
    largest = np.diff(trace.base[before[-1].saved : call.start + 1]).max(initial=0)
    return max(freed, backward_start(before[-1:], trace)) if largest <= tensors[0].nbytes else freed


# ---- errors ----------------------------------------------------------------------------------------------------------


def _of_tables(trial: Trial, activations: Mapping[str, nn.Module], rounding: Rounding) -> dict[str, Errors]:
    """Return the errors with codes of tables of `TABLE_PROBE` bits; other tables err as their own errors say."""
    result: dict[str, Errors] = {}
    for segment in together(activations, lambda name: type(activations[name]).__name__):
        if not _errors_of_tables(activations[segment[0]], rounding):
            continue
        found = trial.converted(Activations(TABLE_PROBE, rounding), include=segment)
        noise, bias = found.noise_and_bias
        if rounding == "stochastic":  # f' on average, whatever two halves of one batch say
            noise, bias = noise + bias, 0.0
        for name in found.names:
            own = _errors_of_tables(activations[name], rounding)
            probe = own.get(TABLE_PROBE)
            share = {bits: error / probe if probe else 0.0 for bits, error in own.items()}
            result[name] = Errors(share, share).times(noise, bias)
    return result


def _errors_of_tables(activation: nn.Module, rounding: Rounding) -> dict[int, float]:
    """Return the tables' own errors by bits; of stochastic ones none, if deterministic ones err less than rounding."""
    form = form_of(activation)
    assert isinstance(form, Form)
    try:
        tables = {bits: form.make(bits=bits, rounding=rounding).table for bits in TABLE_BITS}
    except FewbitError:  # a derivative without bounds, such as that of squared ReLU, has no table for random rounding
        return {}
    if rounding == "stochastic" and any(table.kind != "stochastic" for table in tables.values()):
        return {}
    return {table.bits: table.error for bits, table in tables.items() if table.bits == bits}
