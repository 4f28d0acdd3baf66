"""What hooks save, by its place: one tensor exactly, in codes of groups, turned or not, with the largest numbers exact,
in host memory, or as the operand that a float8 layer of torchao makes of it; and an attention that is computed again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ....tables import FewbitError
from ...layers.offload import Swapper, SwappingSaver
from ...layers.saver import QuantizerSaver
from ...quantizers import Compressed, PerGroup, Quantizer, Rotated
from ...quantizers.per_group import LEAST_ROW
from ...saved.forms import Float8Operand
from ..document import Choice
from ..errors import BITS, LEAST_BITS, LINEAR, ROTATED_BITS, Errors, Trial, least_bits, relative_variance, total
from ..gradient_error import measure_attentions, measure_errors, outliers_bytes, outliers_of
from ..known import ErrorsOfMethods, Known, WayToSave, kind_of
from ..places import ByCall
from ..problem import ATTENTION, EXACT, FLOAT8, GROUPS, HOST, OUTLIERS, ROTATED, Hold, Option
from ..step import Step
from ..trace import Trace, backward_start, codes_bytes

SMALLEST_ON_HOST = 1 << 16  # bytes: copies of less are not worth their latency
TURNED_VARIANCE = {2: 0.133, 3: 0.0358}  # relative to the squares, of any values (quantizers/rotated.py)
_SCALE = 4  # bytes of one float32
# Bytes of an element that the cast to float8 takes for a moment: torchao multiplies and clamps in float32, each in a
# new tensor.
_ROOM = 9


class Tensors(WayToSave):
    """Saves each tensor by itself."""

    methods = (EXACT, GROUPS, OUTLIERS, ROTATED, HOST)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors of each place, from a few backward passes of one forward pass."""
        groups, outliers, rotated = measure_errors(trial.step, {x.place: kind_of(x) for x in trace.tensors})
        return {GROUPS: groups, OUTLIERS: outliers, ROTATED: rotated}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors of each place: those of all tensors of one use, shared equally."""
        linear = dict.fromkeys(x.place for x in trace.tensors if x.function in LINEAR)

        def turned(errors: Errors) -> Errors:
            noise = {b: errors.noise[b] / relative_variance(b) * TURNED_VARIANCE[b] for b in ROTATED_BITS}
            return Errors(noise, dict.fromkeys(ROTATED_BITS, 0.0))

        return {GROUPS: of_tensors, ROTATED: {place: turned(of_tensors[place]) for place in linear}}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each tensor; host memory is one beside a device's."""
        host, outliers, rotated = step.device.type in ("cuda", "meta"), known.of(OUTLIERS), known.of(ROTATED)
        for i, x in enumerate(known.trace.tensors):
            yield Option(EXACT, x.place, None, (i,), x.exact, sum(hold.nbytes for hold in x.exact[:1]))
            for bits in (b for b in BITS if b >= least_bits(x)):
                groups = known.in_groups(i, bits)
                if groups is None:
                    continue
                yield groups
                if x.place in outliers:
                    yield known.in_codes(i, bits, outliers_bytes(x.elements, x.dtype, bits), OUTLIERS)
                if host and bits in (4, 8) and groups.saved >= SMALLEST_ON_HOST:
                    seconds = groups.seconds + known.speeds.transfer(groups.saved)
                    last = Hold(max(x.saved, x.freed - 2), x.freed, groups.saved)
                    yield replace(groups, method=HOST, holds=(last,), saved=0, seconds=seconds)
            for bits in ROTATED_BITS if x.place in rotated else ():
                # In groups that are turned, which lie in the rows of its memory.
                rows = (x.elements // x.features, x.features) if x.features >= LEAST_ROW else x.shape
                nbytes = Rotated(bits).compress(torch.empty(rows, dtype=x.dtype, device="meta")).nbytes
                if nbytes < x.nbytes:
                    yield known.in_codes(i, bits, nbytes, ROTATED)


def quantizer_of(choice: Choice, swapper: Swapper) -> Quantizer | None:
    """Return the quantizer of a tensor in codes; None if it is saved exactly.

    Args:
        choice: of the tensor, or of the attention whose output it is.
        swapper: brings codes to host memory and back.
    """
    if choice.method == OUTLIERS:
        return outliers_of(choice.bits or 0)
    if choice.method == ROTATED:
        return Rotated(choice.bits or 0)
    if choice.method == HOST:  # codes of groups wait in host memory

        def swapped(x: Tensor, groups: PerGroup) -> Compressed:
            return SwappingSaver(QuantizerSaver(groups), swapper).compress(x)

        return ByCall(swapped, PerGroup(choice.bits or 0))
    return PerGroup(choice.bits or 0) if choice.method in (GROUPS, ATTENTION) else None


# ---- operands in float8 ----------------------------------------------------------------------------------------------


class Float8Operands(WayToSave):
    """Saves a tensor as the operand of the float8 layers that alone save it."""

    methods = (FLOAT8,)

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield an option for each such tensor.

        It adds no time: the layer's backward pass does not cast what the forward pass has cast for it.
        """
        for i, x in enumerate(known.trace.tensors):
            if x.dtype.itemsize == 1 or _operand_of(step.model, x.users) is None:
                continue
            nbytes = x.elements + _SCALE
            held = Hold(x.saved, x.freed, nbytes), Hold(x.saved, min(x.saved + 1, x.freed), _ROOM * x.elements)
            # The backward pass is given the operand, and restores nothing. (What a cast takes in it stays counted.)
            spared = (replace(hold, nbytes=-hold.nbytes) for hold in x.restored)
            yield Option(FLOAT8, x.place, None, (i,), (*held, *spared), nbytes)


def operands_of(model: nn.Module, choices: Sequence[Choice]) -> dict[str, Float8Operand]:
    """Return the quantizers of those of the choices that are float8, by place.

    Raises:
        FewbitError: one is of a layer that makes no such operand.
    """
    found = dict[str, Float8Operand]()
    for place in (choice.target for choice in choices if choice.method == FLOAT8):
        operand = _operand_of(model, [place.rpartition(":")[0]])
        if operand is None:
            raise FewbitError(f"{place} is float8, but no layer of torchao's float8 training saves it")
        found[place] = operand
    return found


def _operand_of(model: nn.Module, modules: Sequence[str]) -> Float8Operand | None:
    """Return the quantizer of what these modules save, if all of them save the same operand in float8."""
    found = {Float8Operand.of(model.get_submodule(name)) for name in modules}
    return found.pop() if len(found) == 1 else None


# ---- attention -------------------------------------------------------------------------------------------------------


class ComputedAttention(WayToSave):
    """Computes `scaled_dot_product_attention` again from query, key and value in codes, its output in as many bits.

    Torch's own backward pass takes the output and the log-sum-exp of exact scores, which rounded queries and keys do
    not fit: it needs `LEAST_OF_SCORES`. Here the scores are those of the rounded ones, and nothing else is saved but
    the output, if another module saves it.
    """

    methods = (ATTENTION,)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors by name of the attention, of those of equal operands measured together."""
        return {ATTENTION: measure_attentions(trial.step, trace.attentions)}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors of all that each attention saves."""
        attentions = trace.attentions
        return {ATTENTION: {a.name: total([of_tensors[trace.tensors[i].place] for i in a.members]) for a in attentions}}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each attention that one kernel computes."""
        trace = known.trace
        for attention in trace.attentions:
            errors = known.of(ATTENTION).get(attention.name)
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
