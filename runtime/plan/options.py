"""The options of a traced step: what may be done with each saved tensor, activation and block, and what it costs."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..convert.find import Form, activations, form_of
from ..quantizers import PerGroup
from ..recompute import blocks_of
from ..tensors.packing import packed_size
from .gradient_error import BITS, Errors
from .problem import EXACT, GROUPS, HOST, RECOMPUTE, TABLE, Hold, Option, Problem
from .seconds import Speeds
from .step import Step
from .trace import Trace, Traced

# Least bits by the function that saves a tensor. A plan is measured at one moment, and what hardly matters to a fresh
# model may matter later: its attention is even, and queries in 1 bit do no harm. A GPT-2 of four layers planned at its
# first step without these ended 300 steps .53 above exact training's loss, at a predicted error of .006.
LEAST_LINEAR, LEAST_BITS, LEAST_OF_SCORES, LEAST_OF_TABLE = 3, 4, 6, 2
_LINEAR = frozenset(("linear", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"))
_OF_SCORES = frozenset(
    ("scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum", "softmax", "multi_head_attention_forward")
)
SMALLEST_ON_HOST = 1 << 16  # bytes: copies of less are not worth their latency


def kind_of(tensor: Traced) -> str:
    """Return the same text for the same tensors of equal layers, whose names differ in numbers."""
    return f"{without_numbers(tensor.place)} {tensor.function} {tensor.shape} {tensor.dtype}"


def without_numbers(name: str) -> str:
    """Return a name of a module with a star in place of each number of a layer: `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=[.:])|^\d+(?=[.:])|(?<=\.)\d+$|^\d+$", "*", name)


@dataclass(frozen=True)
class Known:
    """What is known of a step.

    Attributes:
        trace: memory and lives.
        errors: of quantizing the tensor of each place.
        tables: squared relative error of the gradient with codes of a table, by name of the activation and bits.
        speeds: of the machine.
    """

    trace: Trace
    errors: Mapping[str, Errors]
    tables: Mapping[str, Mapping[int, float]]
    speeds: Speeds

    @property
    def kinds(self) -> list[str]:
        """Of each tensor, the same text for those of equal layers."""
        return [kind_of(x) for x in self.trace.tensors]

    @property
    def gradients(self) -> NDArray[np.int64]:
        """Bytes of the parameters' gradients at each moment."""
        return self.trace.gradients

    @property
    def backward(self) -> int:
        """The moment at which the backward pass begins."""
        return self.trace.backward

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
        if recompute:
            options += _of_blocks(step.model, self)
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
    errors = known.errors.get(x.place)
    if errors is None:
        return
    for bits in (b for b in BITS if b >= least_bits(x)):
        nbytes = codes_bytes(x.shape, x.dtype, x.features, bits)
        if nbytes >= x.nbytes:
            continue
        costs = errors.noise[bits], errors.bias[bits]
        seconds = known.speeds.codes(x.elements, bits, x.dtype.itemsize)
        yield Option(GROUPS, x.place, bits, (i,), (Hold(x.saved, x.freed, nbytes),), nbytes, *costs, seconds)
        if host and bits in (4, 8) and nbytes >= SMALLEST_ON_HOST:
            there = seconds + known.speeds.transfer(nbytes)
            last = Hold(max(x.saved, x.freed - 2), x.freed, nbytes)
            yield Option(HOST, x.place, bits, (i,), (last,), 0, *costs, there)


def least_bits(x: Traced) -> int:
    """Return the fewest bits that a plan gives a tensor."""
    if x.function in _OF_SCORES:
        return LEAST_OF_SCORES
    return LEAST_LINEAR if x.function in _LINEAR else LEAST_BITS


@cache
def codes_bytes(shape: tuple[int, ...], dtype: torch.dtype, features: int, bits: int) -> int:
    """Return the bytes that `PerGroup` saves of a tensor, in groups within its rows."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return (PerGroup(bits).within(features) if x.dim() > 1 else PerGroup(bits)).compress(x).nbytes


# ---- activations -----------------------------------------------------------------------------------------------------


def tables_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the activations that a table can stand for, by name."""
    return {
        found.name: found.current
        for found in activations(model)
        if isinstance(found.current, nn.Module) and len(found.names) == 1 and isinstance(form_of(found.current), Form)
    }


def _of_activations(model: nn.Module, known: Known) -> Iterator[Option]:
    """Yield the options to replace what an activation saves by codes of its derivative's table."""
    by_module = _owned(known.trace)
    for name in known.tables:
        own = by_module.get(name, [])
        members = [i for i in own if known.trace.tensors[i].users == (name,)]
        if not members or len(known.trace.calls.get(name, ())) != 1 or len(members) < len(own):
            continue
        tensors = [known.trace.tensors[i] for i in members]
        first, last = min(x.saved for x in tensors), max(x.freed for x in tensors)
        elements = tensors[0].elements
        for bits, error in known.tables[name].items():
            if error and bits < LEAST_OF_TABLE:
                continue
            nbytes = packed_size(elements, bits)
            seconds = known.speeds.codes(elements, bits, tensors[0].dtype.itemsize) / 2
            yield Option(TABLE, name, bits, (*members,), (Hold(first, last, nbytes),), nbytes, error, 0.0, seconds)


def _owned(trace: Trace) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for i, x in enumerate(trace.tensors):
        found[x.module].append(i)
    return found


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _of_blocks(model: nn.Module, known: Known) -> Iterator[Option]:
    """Yield the options to recompute a block from its input.

    Recomputing holds the block's exact tensors from the first of its backward pass on, and what its forward pass needs
    beside them for a moment. Its input is held between the passes; of what it saves exactly in any case, nothing.
    """
    trace = known.trace
    exact = trace.base.copy()
    for x in trace.tensors:
        for hold in x.exact:
            exact[hold.start : hold.end] += hold.nbytes
    for name in blocks_of(model):
        calls = trace.calls.get(name, ())
        members = [i for i, x in enumerate(trace.tensors) if all(_within(user, name) for user in x.users)]
        shared = any(_within(x.module, name) and i not in members for i, x in enumerate(trace.tensors))
        if len(calls) != 1 or not members or shared:  # what others save too would be saved first by them
            continue
        (call,) = calls
        tensors = [trace.tensors[i] for i in members]
        if min(x.saved for x in tensors) < call.start or max(x.saved for x in tensors) >= call.end:
            continue
        start = _backward_start(tensors, trace)
        holds = [Hold(max(h.start, start), h.end, h.nbytes) for x in tensors for h in x.exact if h.end > start]
        own = [k for k in trace.kept if _within(k.module, name) and call.start <= k.life.start < call.end]
        whole = [k.life for k in own if not k.in_bits and k.life.end > start]
        holds += [Hold(call.end, start, -life.nbytes) for life in whole]
        # What is saved in bits, recomputing saves whole, unless it is the memory of a tensor that it saves anyway.
        storages, end = {x.storage for x in tensors}, max(x.freed for x in tensors)
        masks = {k.storage: k.life.nbytes for k in own if k.in_bits and k.storage not in storages}
        holds += [Hold(start, end, nbytes) for nbytes in masks.values()]
        room = int(exact[call.start : call.end].max() - exact[call.start])
        known_room = sum(x.nbytes for x in tensors) + sum(h.nbytes for h in whole) + sum(masks.values())
        holds.append(Hold(start, start + 1, max(0, room - known_room)))
        given = [Hold(h.end, start, h.nbytes) for h in trace.inputs.get(name, ()) if h.end < start]
        saved = sum(h.nbytes for h in given)
        seconds = known.speeds.forward(name)
        yield Option(RECOMPUTE, name, None, (*members,), (*holds, *given), saved, seconds=seconds)


def _backward_start(tensors: list[Traced], trace: Trace) -> int:
    """Return when the backward pass of a block begins."""
    return min(x.exact[0].end if x.exact and x.exact[0].end > trace.backward else x.freed for x in tensors)


def _within(module: str, block: str) -> bool:
    return module == block or module.startswith(f"{block}.")
