"""The options of a traced step: what may be done with each saved tensor, activation and block, and what it costs."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..activations.inverted import PART, ROOM
from ..convert.find import Form, activations, form_of
from ..convert.formulas import COMPOSITES
from ..convert.recognize import recognize
from ..memory.peak import peak_of
from ..saved.exactness import OF_SCORES
from ..tensors.glu_parts import GLUPlan, Wanted
from ..tensors.packing import packed_size
from .chains import chain_options, chains_of
from .conversion_error import ConversionErrors
from .document import Choice
from .gradient_error import BITS, TABLE_PROBE, Errors, outliers_bytes
from .places import within, without_numbers
from .problem import (
    AND,
    ATTENTION,
    EXACT,
    GATED,
    GROUPS,
    HOST,
    OUTLIERS,
    OUTPUT,
    STOCHASTIC,
    TABLE,
    Hold,
    Option,
    Problem,
)
from .recomputing import recomputable, recomputed_options
from .seconds import Speeds
from .step import Step
from .structure import is_converted
from .trace import Trace, Traced, backward_start, codes_bytes

# Least bits by the function that saves a tensor. A plan is measured at one moment, and what hardly matters to a fresh
# model may matter later: its attention is even, and queries in 1 bit do no harm. A GPT-2 of four layers planned at its
# first step without these ended 300 steps .53 above exact training's loss, at a predicted error of .006.
LEAST_LINEAR, LEAST_BITS, LEAST_OF_SCORES, LEAST_OF_TABLE = 3, 4, 6, 2
LINEAR = frozenset(("linear", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"))
# Functions that gated MLPs put their gate through.
ACTIVATIONS = frozenset(("silu", "gelu", "relu", "sigmoid", "tanh", "mish", "hardtanh"))
SMALLEST_ON_HOST = 1 << 16  # bytes: copies of less are not worth their latency


def kind_of(tensor: Traced) -> str:
    """Return the same text for the same tensors of equal layers, whose names differ in numbers."""
    return f"{without_numbers(tensor.place)} {tensor.function} {tensor.shape} {tensor.dtype}"


@dataclass(frozen=True)
class Known:
    """What is known of a step.

    Attributes:
        trace: memory and lives.
        errors: of quantizing the tensor of each place.
        outliers: of doing so with the largest numbers exact, where that may be better.
        attentions: of computing the attention of each name again, from codes.
        conversions: of tables, gated MLPs' parts, and outputs in place of inputs.
        decided: bytes of the decisions of blocks that are computed again from inputs in codes.
        speeds: of the machine.
        changes: what is done to the model in the traced step, for the plan.
    """

    trace: Trace
    errors: Mapping[str, Errors]
    outliers: Mapping[str, Errors]
    attentions: Mapping[str, Errors]
    conversions: ConversionErrors
    decided: Mapping[str, int]
    speeds: Speeds
    changes: tuple[Choice, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """Of each tensor, the same text for those of equal layers."""
        return [kind_of(x) for x in self.trace.tensors]

    @property
    def taken(self) -> float:
        """Of the time of an exact step, the share that `changes` add."""
        return sum(choice.seconds for choice in self.changes) / max(self.speeds.step, 1e-9)

    @property
    def gradients(self) -> NDArray[np.int64]:
        """Bytes of the parameters' gradients at each moment."""
        return self.trace.gradients

    @property
    def backward(self) -> int:
        """The moment at which the backward pass begins."""
        return self.trace.backward

    def uniform(self, bits: int) -> list[Option]:
        """Return the options to save each tensor in groups of so many bits an element, where that saves bytes."""
        found = (_in_groups(i, x, bits, self) for i, x in enumerate(self.trace.tensors))
        return [option for option in found if option is not None]

    def problem(self, step: Step, fixed: int, recompute: bool = True) -> Problem:
        """Return the planner's problem.

        Args:
            step: what was measured.
            fixed: bytes that are there throughout.
            recompute: whether blocks may be recomputed.
        """
        host = step.device.type in ("cuda", "meta")
        options = [option for i, x in enumerate(self.trace.tensors) for option in _of_tensor(i, x, self, host)]
        options += _of_activations(step.model, self)
        options += _of_attentions(self)
        options += _of_gated_mlps(step.model, self)
        options += _of_outputs(self)
        options += chain_options(self.trace, chains_of(step.model), self.conversions.chains, self.speeds)
        if recompute:
            names = recomputable(step.model, self.trace)
            state = torch.get_rng_state().nbytes if step.device.type == "cpu" else 0  # in host memory
            options += recomputed_options(self.trace, names, self.conversions.blocks, self.decided, self.speeds, state)
        return Problem(len(self.trace.tensors), tuple(options), self.trace.base, fixed, self.speeds.step)

    def moment(self, at: int) -> str:
        """Return where in the step a moment lies, in words."""
        if at < self.trace.backward:
            calls = [(span, name) for name, spans in self.trace.calls.items() for span in spans]
            inside = [(span.end - span.start, name) for span, name in calls if span.start <= at < span.end]
            return f"in the forward pass of {min(inside)[1] or 'the model'}" if inside else "after the forward pass"
        ahead = [(x.freed, x.module) for x in self.trace.tensors if x.freed >= at]
        return f"in the backward pass of {min(ahead)[1] or 'the model'}" if ahead else "after the backward pass"


# ---- one tensor ------------------------------------------------------------------------------------------------------


def _of_tensor(i: int, x: Traced, known: Known, host: bool) -> Iterator[Option]:
    held = sum(hold.nbytes for hold in x.exact[:1])
    yield Option(EXACT, x.place, None, (i,), x.exact, held)
    for bits in (b for b in BITS if b >= least_bits(x)):
        groups = _in_groups(i, x, bits, known)
        if groups is None:
            continue
        yield groups
        if x.place in known.outliers:
            beside, errors = outliers_bytes(x.elements, x.dtype, bits), known.outliers[x.place]
            costs = errors.noise[bits], errors.bias[bits], known.speeds.outliers(x.elements, bits)
            yield Option(OUTLIERS, x.place, bits, (i,), (Hold(x.saved, x.freed, beside),), beside, *costs)
        if host and bits in (4, 8) and groups.saved >= SMALLEST_ON_HOST:
            seconds = groups.seconds + known.speeds.transfer(groups.saved)
            last = Hold(max(x.saved, x.freed - 2), x.freed, groups.saved)
            yield replace(groups, method=HOST, holds=(last,), saved=0, seconds=seconds)


def _in_groups(i: int, x: Traced, bits: int, known: Known) -> Option | None:
    """Return the option to save a tensor in groups; None if its error is not known, or codes take no less."""
    errors = known.errors.get(x.place)
    nbytes = codes_bytes(x.shape, x.dtype, x.features, bits, x.function)
    if errors is None or bits not in errors.noise or nbytes >= x.nbytes:
        return None
    costs = errors.noise[bits], errors.bias[bits], known.speeds.codes(x.elements, bits, x.dtype.itemsize)
    return Option(GROUPS, x.place, bits, (i,), (Hold(x.saved, x.freed, nbytes),), nbytes, *costs)


def least_bits(x: Traced) -> int:
    """Return the fewest bits that a plan gives a tensor."""
    if x.function in OF_SCORES:
        return LEAST_OF_SCORES
    return LEAST_LINEAR if x.function in LINEAR else LEAST_BITS


# ---- activations -----------------------------------------------------------------------------------------------------


def tables_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the activations that a table can stand for, by name."""
    return {
        found.name: found.current
        for found in activations(model)
        if isinstance(found.current, nn.Module) and len(found.names) == 1 and not is_converted(found.current)
        if isinstance(form_of(found.current), Form)
    }


def _of_activations(model: nn.Module, known: Known) -> Iterator[Option]:
    """Yield the options to replace what an activation saves by codes of its derivative's table."""
    by_module, conversions = _owned(known.trace), known.conversions
    for method, tables in ((TABLE, conversions.tables), (STOCHASTIC, conversions.stochastic)):
        for name, errors in tables.items():
            own = by_module.get(name, [])
            members = [i for i in own if known.trace.tensors[i].users == (name,)]
            if not members or len(known.trace.calls.get(name, ())) != 1 or len(members) < len(own):
                continue
            tensors = [known.trace.tensors[i] for i in members]
            first, last = min(x.saved for x in tensors), max(x.freed for x in tensors)
            made = _made_by(model.get_submodule(name))
            elements, spared = tensors[0].elements, [*_spared(name, tensors, known.trace, made)]
            for bits, noise in errors.noise.items():
                bias = errors.bias[bits]
                if noise + bias and bits < LEAST_OF_TABLE:
                    continue
                nbytes = packed_size(elements, bits)
                seconds = known.speeds.codes(elements, bits, tensors[0].dtype.itemsize) / 2
                held, costs = (Hold(first, last, nbytes), *spared), (noise, bias, seconds)
                yield Option(method, name, bits, (*members,), held, nbytes, *costs)


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


def _owned(trace: Trace) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for i, x in enumerate(trace.tensors):
        found[x.module].append(i)
    return found


# ---- attention -------------------------------------------------------------------------------------------------------


def _of_attentions(known: Known) -> Iterator[Option]:
    """Yield the options to compute attention again from query, key, value, whose output is in as many bits.

    Torch's own backward pass takes the output and the log-sum-exp of exact scores, which rounded queries and keys do
    not fit: it needs `LEAST_OF_SCORES`. Here the scores are those of the rounded ones, and nothing else is saved but
    the output, if another module saves it.
    """
    trace = known.trace
    for attention in trace.attentions:
        errors = known.attentions.get(attention.name)
        own = [trace.tensors[i] for i in attention.members if i not in attention.shared]
        if errors is None or not own or any(i != attention.output for i in attention.shared):
            continue
        shapes = [shape for shape, _ in attention.operands]
        if len(attention.members) > len(shapes) + 1 or any(x.shape not in shapes for x in own):
            continue  # not one kernel, but steps that save scores, and would take room for them again
        outputs = [trace.tensors[i] for i in attention.shared]
        first, last = min(x.saved for x in own), max(x.freed for x in own)
        backward = backward_start(own, trace)
        statistics = [Hold(first, backward, -h.nbytes) for h in attention.statistics if h.end > backward > first]
        again = known.speeds.attention(attention.module)
        for bits in (b for b in BITS if b >= LEAST_BITS):
            nbytes = sum(codes_bytes(shape, dtype, shape[-1], bits) for shape, dtype in attention.operands)
            held = [Hold(x.saved, x.freed, codes_bytes(x.shape, x.dtype, x.features, bits)) for x in outputs]
            sizes = [(math.prod(shape), dtype) for shape, dtype in attention.operands]
            sizes += [(x.elements, x.dtype) for x in outputs]
            seconds = again + sum(known.speeds.codes(n, bits, dtype.itemsize) for n, dtype in sizes)
            yield Option(
                *(ATTENTION, attention.name, bits, attention.members),
                (Hold(first, last, nbytes), *held, *statistics),
                nbytes + sum(h.nbytes for h in held),
                *(errors.noise[bits], errors.bias[bits], seconds),
            )


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


def _of_gated_mlps(model: nn.Module, known: Known) -> Iterator[Option]:
    """Yield the options to save the parts of a gated MLP: a table's code, and copies of up and act(gate).

    They stand for what the activation and the product save, and for the product that the next projection and its
    adapters save. All these have the product's size, and are saved at the activation or after it.
    """
    trace = known.trace
    for name, errors in known.conversions.gated.items():
        inside = [i for i, x in enumerate(trace.tensors) if within(x.module, name)]
        acts = [trace.tensors[i] for i in inside if trace.tensors[i].function in ACTIVATIONS]
        if len(trace.calls.get(name, ())) != 1 or len(acts) != 1 or _drops(model.get_submodule(name)):
            continue
        (act,) = acts
        members = [
            i for i in inside if trace.tensors[i].elements == act.elements and trace.tensors[i].saved >= act.saved
        ]
        tensors = [trace.tensors[i] for i in members]
        if any(not within(user, name) for x in tensors for user in x.users):
            continue
        # The product is made again where it is needed; of the others, what a step makes again to restore them.
        made_again = [hold for x in tensors if x.function not in LINEAR for hold in _gaps(x)]
        first, last = min(x.saved for x in tensors), max(x.freed for x in tensors if x.function not in LINEAR)
        for bits in (b for b in BITS if b >= LEAST_BITS):
            nbytes = parts_bytes(act.elements, bits)
            seconds = known.speeds.codes(2 * act.elements, bits, act.dtype.itemsize)
            seconds += known.speeds.codes(act.elements, TABLE_PROBE, act.dtype.itemsize) / 2
            yield Option(
                *(GATED, name, bits, (*members,)),
                (Hold(first, last, nbytes), *made_again),
                *(nbytes, errors.noise[bits], errors.bias[bits], seconds),
            )


def parts_bytes(elements: int, bits: int) -> int:
    """Return the bytes of a table's codes and of two copies."""
    plan = GLUPlan("silu", (), "", TABLE_PROBE, bits, bits, "parts")
    return plan.nbytes(elements, 2, Wanted(True, True, True))


def _gaps(x: Traced) -> Iterator[Hold]:
    """Yield what the backward pass makes again of a tensor that is not held exactly, as bytes that are not there."""
    for before, after in pairwise(sorted(x.exact, key=lambda hold: hold.start)):
        yield Hold(before.end, after.start, -before.nbytes)


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops elements, so that adapters save another tensor than the product."""
    return any(isinstance(m, nn.Dropout) and m.p and m.training for m in module.modules())


# ---- outputs ---------------------------------------------------------------------------------------------------------


def _of_outputs(known: Known) -> Iterator[Option]:
    """Yield the options to save nothing of a normalization's or GELU's input, and exactly its output, which another
    module saves."""
    trace = known.trace
    by_module = _owned(trace)
    by_storage: defaultdict[int | None, list[int]] = defaultdict(list)
    for i, x in enumerate(trace.tensors):
        by_storage[x.storage].append(i)
    for name, error in known.conversions.outputs.items():
        members = [i for i in by_module.get(name, ()) if trace.tensors[i].users == (name,)]
        outputs = by_storage.get(trace.outputs.get(name, -1), ())
        if not members or len(members) < len(by_module[name]) or len(trace.calls[name]) != 1 or len(outputs) != 1:
            continue
        (output,) = outputs
        y, inputs = trace.tensors[output], [trace.tensors[i] for i in members]
        if y.module == name or y.elements != inputs[0].elements:
            continue
        first, last = min(x.saved for x in inputs), max(x.freed for x in inputs)
        # The backward pass computes from the output, in room that a step gives to the restored inputs.
        n, is_norm = y.elements, name not in known.conversions.tables
        bits = 0 if is_norm else packed_size(n, 1)
        room = 8 * n if is_norm else 2 * n + ROOM * min(n, PART)
        start = min([*(gap.start for x in inputs for gap in _gaps(x)), last - 1])
        until = [Hold(start, last, max(0, room - sum(x.nbytes for x in inputs)))]
        until += [Hold(y.exact[-1].end, last, y.nbytes)] if y.exact and y.exact[-1].end < last else []
        yield Option(
            *(OUTPUT, f"{name}{AND}{y.place}", None, (*members, output)),
            (*y.exact, *until, Hold(first, last, bits)),
            *(y.nbytes + bits, error, 0.0, known.speeds.codes(n, 8, y.dtype.itemsize) / (2 if is_norm else 1)),
        )
