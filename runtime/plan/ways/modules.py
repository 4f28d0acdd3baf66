"""Modules that are converted to save less: activations, normalizations and gated MLPs.

Tables      codes of its derivative's table in place of what an activation saves, to the nearest level or at random
Outputs     nothing of a normalization's or GELU's input, and exactly its output, which the layer behind it saves
GatedParts  of a gated MLP's product, codes of the activation's table, and copies of up and act(gate) in few bits
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from ....tables import FewbitError
from ...activations.arguments import Rounding
from ...activations.inverted import PART, ROOM
from ...convert.api import convert_beside
from ...convert.find import Form, activations, form_of
from ...convert.formulas import COMPOSITES
from ...convert.gated_mlps import GatedMLPs, candidates
from ...convert.method import Activations
from ...convert.normalizations import Normalizations
from ...convert.recognize import recognize
from ...layers import KeepOutput
from ...memory.peak import peak_of
from ...tensors.glu_parts import GLUPlan, Wanted
from ...tensors.packing import packed_size
from ..document import Choice
from ..errors import (
    BITS,
    LEAST_BITS,
    LEAST_OF_TABLE,
    LINEAR,
    PROBE,
    PRODUCTS,
    TABLE_BITS,
    TABLE_PROBE,
    TABLES,
    Errors,
    Trial,
    relative_variance,
    together,
)
from ..known import ErrorsOfMethods, Known, WayToSave
from ..places import within
from ..problem import AND, GATED, OUTPUT, STOCHASTIC, TABLE, Hold, Option
from ..step import Step
from ..structure import is_converted, structure_aside, unconverted
from ..trace import Trace, Traced, backward_start

_ROUNDING: Mapping[str, Rounding] = {TABLE: "deterministic", STOCHASTIC: "stochastic"}
# What saves its output in place of its input.
BY_OUTPUT = (Normalizations(), Activations(keep="output"))
_NO_BITS = 0  # the number of bits by which errors of what is not in codes are named
# Functions that gated MLPs put their gate through.
ACTIVATIONS = frozenset(("silu", "gelu", "relu", "sigmoid", "tanh", "mish", "hardtanh"))


class Tables(WayToSave):
    """Replaces activations by those that save codes."""

    methods = (TABLE, STOCHASTIC)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors by name of the activation, of those of a class measured together."""
        tables = tables_of(step.model)
        return {method: _of_tables(trial, tables, rounding) for method, rounding in _ROUNDING.items()}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors with codes to the nearest level, shared equally."""
        names = [*tables_of(step.model)]
        noise = {bits: TABLES[bits] / max(1, len(names)) for bits in TABLE_BITS}
        return {TABLE: dict.fromkeys(names, Errors(noise, dict.fromkeys(TABLE_BITS, 0.0)))}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each activation that alone saves what it saves, in one call."""
        for method in self.methods:
            for name, errors in known.of(method).items():
                members = known.trace.alone(name)
                if not members:
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

    def configs(self, choice: Choice) -> tuple[Any, ...]:
        """Return that of the activation."""
        return (Activations(choice.bits, _ROUNDING[choice.method]),)


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
    x = torch.zeros(64, dtype=torch.float32, device="cpu")
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


def _of_tables(trial: Trial, activations: Mapping[str, nn.Module], rounding: Rounding) -> dict[str, Errors]:
    """Return the errors with codes of tables of `TABLE_PROBE` bits; other tables err as their own errors say."""
    result: dict[str, Errors] = {}
    for segment in together(activations, lambda name: type(activations[name]).__name__):
        if not _errors_of_tables(activations[segment[0]], rounding):
            continue
        found = trial.converted(Activations(TABLE_PROBE, rounding), include=segment)
        noise, bias = found.noise, found.bias
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


# ---- outputs ---------------------------------------------------------------------------------------------------------


class Outputs(WayToSave):
    """Converts normalizations and GELUs to save their output."""

    methods = (OUTPUT,)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors of a dtype's rounding, and of GELU's interpolation, by name: they differ by class.

        All of it is noise, for the rounding differs among samples.
        """
        result: dict[str, Errors] = {}
        model = trial.step.model
        for segment in together(outputs_of(model), lambda name: type(model.get_submodule(name)).__qualname__):
            found = trial.converted(*BY_OUTPUT, include=segment)
            result.update(dict.fromkeys(segment, _noise(found.noise + found.bias)))
        return {OUTPUT: result}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors by name: together the dtype's.

        Small models were off by 2.6 times that in float32 and by 0.7 times in bfloat16.
        """
        names, dtype = outputs_of(step.model), step.parameters[0].dtype
        return {OUTPUT: dict.fromkeys(names, _noise(torch.finfo(dtype).eps ** 2 / max(1, len(names))))}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each module whose output another module saves."""
        trace = known.trace
        by_storage: defaultdict[int | None, list[int]] = defaultdict(list)
        for i, x in enumerate(trace.tensors):
            by_storage[x.storage].append(i)
        for name, errors in known.of(OUTPUT).items():
            members, outputs = trace.alone(name), by_storage.get(trace.outputs.get(name, -1), ())
            if not members or len(outputs) != 1:
                continue
            (output,) = outputs
            y, inputs = trace.tensors[output], [trace.tensors[i] for i in members]
            if y.module == name or y.elements != inputs[0].elements:
                continue
            first, last = min(x.saved for x in inputs), max(x.freed for x in inputs)
            # The backward pass computes from the output, in room that a step gives to the restored inputs.
            n, is_norm = y.elements, name not in known.of(TABLE)
            bits = 0 if is_norm else packed_size(n, 1)
            room = 8 * n if is_norm else 2 * n + ROOM * min(n, PART)
            start = min([*(gap.start for x in inputs for gap in x.gaps), last - 1])
            until = [Hold(start, last, max(0, room - sum(x.nbytes for x in inputs)))]
            until += [Hold(y.exact[-1].end, last, y.nbytes)] if y.exact and y.exact[-1].end < last else []
            seconds = known.speeds.codes(n, 8, y.dtype.itemsize) / (2 if is_norm else 1)
            yield Option(
                *(OUTPUT, f"{name}{AND}{y.place}", None, (*members, output)),
                (*y.exact, *until, Hold(first, last, bits)),
                *(y.nbytes + bits, errors.noise[_NO_BITS], 0.0, seconds),
            )

    def configs(self, choice: Choice) -> tuple[Any, ...]:
        """Return those of all such modules."""
        return BY_OUTPUT


def _noise(error: float) -> Errors:
    return Errors({_NO_BITS: error}, {_NO_BITS: 0.0})


def outputs_of(model: nn.Module) -> list[str]:
    """Return the names of the normalizations and GELUs that can save their output in place of their input."""
    plain = unconverted(model)
    with structure_aside(model):
        report = convert_beside(model, *BY_OUTPUT)
        names = [row.name for row in report.replaced if row.name in plain]
        modules = [(name, model.get_submodule(name)) for name in names]
        keeping = [name for name, module in modules if isinstance(getattr(module, "saver", None), KeepOutput)]
        return [name for name, module in modules if name in keeping or getattr(module, "keep", None) == "output"]


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


class GatedParts(WayToSave):
    """Converts gated MLPs.

    Their parts stand for what the activation and the product save, and for the product that the next projection and its
    adapters save. All these have the product's size, and are saved at the activation or after it.
    """

    methods = (GATED,)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors by name of the MLP: of the copies, by their bits, and of the table, which is the same."""
        result, probe = dict[str, Errors](), relative_variance(PROBE)
        for segment in together(gated_mlps_of(step.model), lambda _: ""):
            found = trial.converted(GatedMLPs(copy_bits=PROBE), include=segment)
            of_copies = min(found.rounding, found.noise)
            noises = {b: found.noise - of_copies + of_copies * relative_variance(b) / probe for b in BITS}
            result.update(dict.fromkeys(segment, Errors(noises, dict.fromkeys(BITS, found.bias))))
        return {GATED: result}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors of a product of two copies each, and of a table."""
        names = gated_mlps_of(step.model)
        use = PRODUCTS / max(1, len(names)) / 4
        noise = {b: use * relative_variance(b) for b in BITS}
        return {GATED: {n: Errors(noise, dict.fromkeys(BITS, TABLES[TABLE_PROBE] / len(names))) for n in names}}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each gated MLP that has one activation and drops nothing."""
        trace = known.trace
        for name, errors in known.of(GATED).items():
            inside = [i for i, x in enumerate(trace.tensors) if within(x.module, name)]
            acts = [trace.tensors[i] for i in inside if trace.tensors[i].function in ACTIVATIONS]
            # Where elements are dropped, adapters save another tensor than the product.
            dropouts = (m for m in step.model.get_submodule(name).modules() if isinstance(m, nn.Dropout))
            if len(trace.calls.get(name, ())) != 1 or len(acts) != 1 or any(m.p and m.training for m in dropouts):
                continue
            (act,) = acts
            members = [
                i for i in inside if trace.tensors[i].elements == act.elements and trace.tensors[i].saved >= act.saved
            ]
            tensors = [trace.tensors[i] for i in members]
            if any(not within(user, name) for x in tensors for user in x.users):
                continue
            # The product is made again where it is needed; of the others, what a step makes again to restore them.
            made_again = [hold for x in tensors if x.function not in LINEAR for hold in x.gaps]
            first, last = min(x.saved for x in tensors), max(x.freed for x in tensors if x.function not in LINEAR)
            # The product is held until the forward pass ends, so that it is known when the next projection saves it.
            (call,), product = trace.calls[name], tensors[-1]
            made_again += [Hold(h.start, call.end, product.nbytes) for h in product.exact[:1] if h.start < call.end]
            for bits in (b for b in BITS if b >= LEAST_BITS):
                # A table's codes and two copies.
                plan = GLUPlan("silu", (), "", TABLE_PROBE, bits, bits, "parts")
                nbytes = plan.nbytes(act.elements, 2, Wanted(True, True, True))
                seconds = known.speeds.codes(2 * act.elements, bits, act.dtype.itemsize)
                seconds += known.speeds.codes(act.elements, TABLE_PROBE, act.dtype.itemsize) / 2
                yield Option(
                    *(GATED, name, bits, (*members,)),
                    (Hold(first, last, nbytes), *made_again),
                    *(nbytes, errors.noise[bits], errors.bias[bits], seconds),
                )

    def configs(self, choice: Choice) -> tuple[Any, ...]:
        """Return that of the MLP."""
        return (GatedMLPs(copy_bits=choice.bits or 0),)


def gated_mlps_of(model: nn.Module) -> list[str]:
    """Return the names of the gated MLPs whose parts can be saved."""
    found = {each.name: each.current for each in candidates(model)}
    names = [
        name for name, module in found.items() if name and not (isinstance(module, nn.Module) and is_converted(module))
    ]
    with structure_aside(model):
        report = convert_beside(model, GatedMLPs(), include=names) if names else None
    return [row.name for row in report.replaced if row.name in found] if report else []
