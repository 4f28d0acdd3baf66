"""Nothing of a normalization's or GELU's input, and exactly its output, which the layer behind it saves."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ...activations.inverted import PART, ROOM
from ...convert.api import convert_beside
from ...convert.method import Activations
from ...convert.normalizations import Normalizations
from ...layers import KeepOutput
from ...tensors.packing import packed_size
from ..document import Choice
from ..errors import Errors, Trial, finite, together
from ..known import ErrorsOfMethods, Known, WayToSave
from ..problem import AND, OUTPUT, TABLE, Hold, Option
from ..step import Step
from ..structure import structure_aside, unconverted
from ..trace import Trace

# What saves its output in place of its input.
BY_OUTPUT = (Normalizations(), Activations(keep="output"))
_NO_BITS = 0  # the number of bits by which errors of what is not in codes are named


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
            result.update(dict.fromkeys(segment, _noise(sum(found.noise_and_bias))))
        return {OUTPUT: finite(result)}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors by name: together the dtype's.

        Small models were off by 2.6 times that in float32 and by 0.7 times in bfloat16.
        """
        names, dtype = outputs_of(step.model), step.parameters[0].dtype
        return {OUTPUT: dict.fromkeys(names, _noise(torch.finfo(dtype).eps ** 2 / max(1, len(names))))}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each module whose output another module saves."""
        trace = known.trace
        by_module = trace.by_module
        by_storage: defaultdict[int | None, list[int]] = defaultdict(list)
        for i, x in enumerate(trace.tensors):
            by_storage[x.storage].append(i)
        for name, errors in known.of(OUTPUT).items():
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

    def carry_out(self, model: nn.Module, choices: Sequence[Choice]) -> None:
        """Convert the modules."""
        if choices:
            convert_beside(model, *BY_OUTPUT, include=[choice.target for choice in choices])


def _noise(error: float) -> Errors:
    return Errors({_NO_BITS: error}, {_NO_BITS: 0.0})


def outputs_of(model: nn.Module) -> list[str]:
    """Return the names of the normalizations and GELUs that can save their output in place of their input."""
    plain = unconverted(model)
    with structure_aside(model):
        report = convert_beside(model, *BY_OUTPUT)
        names = [row.name for row in report.replaced if row.name in plain]
        return [name for name in names if _keeps_output(model.get_submodule(name))]


def _keeps_output(module: nn.Module) -> bool:
    saver = getattr(module, "saver", None)
    return isinstance(saver, KeepOutput) or getattr(module, "keep", None) == "output"
