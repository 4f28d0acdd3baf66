"""One saved tensor: exactly; in codes of groups, turned or not, or with the largest numbers exact; or in host memory.

The hooks of a fitted model carry these out, by the tensor's place.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...layers.offload import Swapper, SwappingSaver
from ...layers.saver import QuantizerSaver
from ...quantizers import Compressed, PerGroup, Quantizer, Rotated
from ...quantizers.per_group import LEAST_ROW
from ..document import Choice
from ..errors import BITS, LINEAR, ROTATED_BITS, Errors, Trial, least_bits, relative_variance
from ..gradient_error import measure_errors, outliers_bytes, outliers_of
from ..known import ErrorsOfMethods, Known, WayToSave, kind_of
from ..problem import ATTENTION as COMPUTED_AGAIN
from ..problem import EXACT, GROUPS, HOST, OUTLIERS, ROTATED, Hold, Option
from ..step import Step
from ..trace import Trace

SMALLEST_ON_HOST = 1 << 16  # bytes: copies of less are not worth their latency
TURNED_VARIANCE = {2: 0.133, 3: 0.0358}  # relative to the squares, of any values (quantizers/rotated.py)


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
    if choice.method == HOST:
        return _ToHost(PerGroup(choice.bits or 0), swapper)
    return PerGroup(choice.bits or 0) if choice.method in (GROUPS, COMPUTED_AGAIN) else None


@dataclass(frozen=True)
class _ToHost:
    """A quantizer whose codes wait in host memory."""

    quantizer: PerGroup
    swapper: Swapper

    def within(self, features: int) -> "_ToHost":
        return _ToHost(self.quantizer.within(features), self.swapper)

    def compress(self, x: Tensor) -> Compressed:
        return SwappingSaver(QuantizerSaver(self.quantizer), self.swapper).compress(x)
