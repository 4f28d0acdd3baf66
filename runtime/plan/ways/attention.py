"""`scaled_dot_product_attention` computed again from query, key and value in codes, and its output in as many bits.

Torch's own backward pass takes the output and the log-sum-exp of exact scores, which rounded queries and keys do not
fit: it needs `LEAST_OF_SCORES`. Here the scores are those of the rounded ones, and nothing else is saved but the
output, if another module saves it.
"""

import math
from collections.abc import Iterator, Mapping

from ..errors import BITS, LEAST_BITS, Errors, Trial, total
from ..gradient_error import measure_attentions
from ..known import ErrorsOfMethods, Known, WayToSave
from ..problem import ATTENTION, Hold, Option
from ..step import Step
from ..trace import Trace, backward_start, codes_bytes


class ComputedAttention(WayToSave):
    """Computes attentions again."""

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
