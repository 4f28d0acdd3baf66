"""The options to compute a module again in the backward pass: a block of layers, or a part of one, such as its MLP.

Between the passes it holds its input, exactly or in codes, and in the backward pass all that it saves exactly, from the
first moment of its own backward pass on, beside what its forward pass needs for a moment. From an input in codes it
also holds its decisions, such as the signs of ReLU (runtime/saved/decisions.py), and its gradient errs.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...layers.saver import QuantizerSaver
from ...quantizers import PerGroup
from ...saved.checkpoint import blocks_of, recomputed_forward
from ...saved.recompute import Recompute
from ..document import Choice
from ..errors import BITS, PROBE, Errors, Trial, alike, difference, errors_of_each, relative_variance, total
from ..known import ErrorsOfMethods, Known, WayToSave
from ..places import within, without_numbers
from ..problem import RECOMPUTE, Hold, Option
from ..step import Step
from ..trace import Trace, Traced, backward_start, codes_bytes

BITS_OF_INPUTS = (4, 6, 8)


@dataclass(frozen=True)
class ErrorsOfBlock(Errors):
    """What computing a block again from an input in codes does to the gradient.

    Attributes:
        decisions: bytes of the decisions of the first call, which it saves besides.
    """

    decisions: int = 0


class Blocks(WayToSave):
    """Computes modules again."""

    methods = (RECOMPUTE,)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors of inputs in codes by name of the block; of parts of blocks there are none."""
        names = _whole_blocks(step, trace)
        draws, result = count(), dict[str, Errors]()
        share = {bits: relative_variance(bits) / relative_variance(PROBE) for bits in BITS}

        def wrong(blocks: Sequence[str]) -> list[Tensor]:
            with computed_again(trial.step.model, blocks, PROBE):
                return difference(trial.gradient(next(draws)), trial.exact)

        decided = decided_bytes(step, names)
        for equal in alike(names, without_numbers):
            for name, (noise, bias) in errors_of_each(equal, wrong, trial.scale):
                own = Errors(share, share).times(noise, bias)
                result[name] = ErrorsOfBlock(own.noise, own.bias, decided.get(name, 0))
        return {RECOMPUTE: result}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors of all that a block saves, as each of these is computed from the rounded input."""
        names = _whole_blocks(step, trace)
        decided, result = decided_bytes(step, names), {}
        for name in names:
            own = total([of_tensors[x.place] for x in trace.tensors if within(x.module, name)])
            result[name] = ErrorsOfBlock(own.noise, own.bias, decided.get(name, 0))
        return {RECOMPUTE: result}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each block and part of one: from its input as it is, and of blocks from codes."""
        trace, speeds, errors = known.trace, known.speeds, known.of(RECOMPUTE)
        random_state = torch.get_rng_state().nbytes if step.device.type == "cpu" else 0  # of a GPU, in host memory
        exact = trace.base.copy()
        for x in trace.tensors:
            for hold in x.exact:
                exact[hold.start : hold.end] += hold.nbytes
        for name in recomputable(step.model, trace):
            members, (call,) = _members(name, trace), trace.calls[name]
            tensors = [trace.tensors[i] for i in members]
            start, end = backward_start(tensors, trace), max(x.freed for x in tensors)
            inputs, seconds = trace.inputs.get(name, ()), speeds.forward(name)
            # That of the first call is held as long as a node of its graph is: one whose gradient nobody needs, such as
            # the keys in XLM's cache, until the graph goes. While computing again the step's own is beside it.
            states = Hold(call.start, len(exact), random_state), Hold(start, start + 1, random_state)
            holds = [*_holds_again(name, trace, members, exact), *states]
            # What is saved of an input itself is the input, and held as that is; any other input is until the end.
            storages = {x.storage for x in tensors}
            until = {x.storage: start if x.storage in storages else end for x in inputs}
            lasting = [Hold(x.life.end, max(x.life.end, until[x.storage]), x.life.nbytes) for x in inputs]
            given = [h for h in lasting if h.start < h.end]
            saved = sum(h.nbytes for h in given)
            if name not in trace.writing:  # it would be from a copy of its input (saved/recompute.py), uncounted here
                yield Option(RECOMPUTE, name, None, (*members,), (*holds, *given), saved, seconds=seconds)
            if name not in errors:
                continue
            own = errors[name]
            assert isinstance(own, ErrorsOfBlock)
            rounded = [x for x in inputs if x.requires_grad]
            restored = sum(x.life.nbytes for x in rounded if x.storage not in storages)
            holds += [h for h, x in zip(lasting, inputs, strict=True) if not x.requires_grad]
            decisions = own.decisions  # in bits, and a byte each when they are taken again
            holds += [Hold(start, end, restored + 8 * decisions), Hold(call.start, end, decisions)]
            for bits in BITS_OF_INPUTS:
                shapes = ((x.shape, x.dtype, x.shape[-1] if x.shape else 1) for x in rounded)
                codes = sum(codes_bytes(*each, bits) for each in shapes)
                elements = [(int(np.prod(x.shape)), x.dtype.itemsize) for x in rounded]
                taken = seconds + sum(speeds.codes(count, bits, itemsize) for count, itemsize in elements)
                held, saved = (*holds, Hold(call.start, end, codes)), codes + decisions
                yield Option(RECOMPUTE, name, bits, (*members,), held, saved, own.noise[bits], own.bias[bits], taken)

    def carry_out(self, model: nn.Module, choices: Sequence[Choice]) -> None:
        """Let the modules compute again; of two choices for one, the later counts."""
        bits_of = {choice.target: choice.bits for choice in choices}
        from_bits = {bits: recompute_from(bits) for bits in {*bits_of.values()}}
        for name, bits in bits_of.items():
            module = model.get_submodule(name)
            vars(module)["forward"] = recomputed_forward(module, from_bits[bits])


def recomputable(model: nn.Module, trace: Trace) -> list[str]:
    """Return the names of the modules that may be computed again, and save less so: blocks and the parts of blocks."""
    blocks = blocks_of(model)
    inside = [name for name in trace.calls if any(within(name, block) for block in blocks)]
    return [name for name in inside if "forward" not in vars(model.get_submodule(name)) and _members(name, trace)]


def _whole_blocks(step: Step, trace: Trace) -> list[str]:
    """Return the names of the blocks among what may be computed again."""
    blocks = set(blocks_of(step.model))
    return [name for name in recomputable(step.model, trace) if name in blocks]


def _members(name: str, trace: Trace) -> list[int]:
    """Return the indices of the tensors that computing a module again covers; none if it cannot be, or saves nothing.

    What others save too would be saved first by them. What a part of a block is given, others may hold in codes.
    """
    calls = trace.calls.get(name, ())
    if len(calls) != 1:
        return []
    (span,) = calls
    inside = range(
        bisect_left(trace.tensors, span.start, key=lambda x: x.saved),
        bisect_left(trace.tensors, span.end, key=lambda x: x.saved),
    )
    of_module = [i for i in inside if within(trace.tensors[i].module, name)]
    members = [i for i in of_module if all(within(user, name) for user in trace.tensors[i].users)]
    if len(members) < 2 or len(members) < len(of_module):
        return []
    given = {x.storage for x in trace.inputs.get(name, ()) if x.requires_grad}
    others = (trace.tensors[i] for i in range(len(trace.tensors)) if not inside.start <= i < inside.stop)
    return [] if given and any(x.storage in given for x in others) else members


def _holds_again(name: str, trace: Trace, members: Sequence[int], exact: NDArray[np.int64]) -> list[Hold]:
    """Return what computing a module again holds in the backward pass, and no longer holds between the passes."""
    (call,) = trace.calls[name]
    tensors = [trace.tensors[i] for i in members]
    start = backward_start(tensors, trace)
    again = [*_saved_again(tensors)]
    holds = [Hold(max(h.start, start), h.end, h.nbytes) for h in again if h.end > start]
    own = [k for k in trace.kept if within(k.module, name) and call.start <= k.life.start < call.end]
    whole = [k.life for k in own if not k.in_bits and k.life.end > start]
    holds += [Hold(call.end, start, -life.nbytes) for life in whole]
    # What is saved in bits, computing again saves whole, unless it is the memory of a tensor that it saves anyway.
    storages, end = {x.storage for x in tensors}, max(x.freed for x in tensors)
    masks = {k.storage: k.life for k in own if k.in_bits and k.storage not in storages}
    # The backward pass is in the reverse order of the forward pass: the mask is gone when what was saved before it is.
    for mask in masks.values():
        used = next((x.freed for x in reversed(tensors) if x.saved <= mask.start), end)
        holds.append(Hold(start, used, mask.nbytes))
    # Computing again ends before the operation that saves the last tensor.
    last = bisect_left(trace.saves, call.end) - 1
    forward = exact[call.start : max(trace.saves[last], call.start + 1)] - exact[call.start]
    for sign, held in ((-1, [h for x in tensors for h in x.exact]), (1, again)):
        for h in held:
            forward[max(0, h.start - call.start) : max(0, h.end - call.start)] += sign * h.nbytes
    for mask in masks.values():
        forward[mask.start + 1 - call.start :] += mask.nbytes
    room = int(forward.max())
    inputs = {x.storage for x in trace.inputs.get(name, ())}  # there before the forward pass, so not in its room
    made = [h for h in _saved_again([x for x in tensors if x.storage not in inputs]) if h.start <= start < h.end]
    known = sum(h.nbytes for h in made) + sum(h.nbytes for h in whole) + sum(mask.nbytes for mask in masks.values())
    return [*holds, Hold(start, start + 1, max(0, room - known))]


def _saved_again(tensors: Sequence[Traced]) -> Iterator[Hold]:
    """Yield what tensors hold that are saved as they are: a part of a storage, such as v of q, k and v, all of it."""
    wholes: dict[Hold, list[Traced]] = {}
    for x in tensors:
        if x.whole is None:
            yield from x.exact
        else:
            wholes.setdefault(x.whole, []).append(x)
    for whole, parts in wholes.items():
        end = max(x.freed for x in parts)
        holds = [Hold(max(h.start, whole.end), h.end, h.nbytes) for x in parts for h in x.exact]
        holds += [Hold(x.freed, end, x.nbytes) for x in parts]
        holds.append(Hold(whole.end, end, max(0, whole.nbytes - sum(x.nbytes for x in parts))))
        yield from (h for h in holds if h.start < h.end)


# ---- computing again -------------------------------------------------------------------------------------------------


def recompute_from(bits: int | None) -> Recompute:
    """Return what computes modules again, from inputs of so many bits an element; None saves them exactly."""
    return Recompute() if bits is None else Recompute(QuantizerSaver(PerGroup(bits)))


@contextmanager
def computed_again(model: nn.Module, names: Iterable[str], bits: int) -> Iterator[list[tuple[str, Recompute]]]:
    """Compute modules of a model again, each from an input of its own in codes, until the end of this block."""
    modules = [(name, model.get_submodule(name), recompute_from(bits)) for name in names]
    for _, module, recompute in modules:
        vars(module)["forward"] = recomputed_forward(module, recompute)
    try:
        yield [(name, recompute) for name, _, recompute in modules]
    finally:
        for _, module, _ in modules:
            vars(module).pop("forward", None)


def decided_bytes(step: Step, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes of the decisions that modules save if they are computed again from an input in codes, by name.

    One forward pass for each level of modules within modules.
    """
    found: dict[str, int] = {}
    with step.apart():
        left: list[str] = [*names]
        while left:
            level = [name for name in left if not any(within(name, other) for other in left if other != name)]
            left = [name for name in left if name not in level]
            with computed_again(step.model, level, max(BITS)) as modules:
                step.output()
            found |= {name: recompute.decided for name, recompute in modules}
    return found
