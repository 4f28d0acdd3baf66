"""The parts of a gated MLP's product: codes of the activation's table, and copies of up and act(gate).

They stand for what the activation and the product save, and for the product that the next projection and its adapters
save. All these have the product's size, and are saved at the activation or after it.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ...convert.api import convert_beside
from ...convert.gated_mlps import GatedMLPs, candidates
from ...tensors.glu_parts import GLUPlan, Wanted
from ..document import Choice
from ..errors import (
    BITS,
    LEAST_BITS,
    LINEAR,
    PROBE,
    PRODUCTS,
    TABLE_PROBE,
    TABLES,
    Errors,
    Trial,
    finite,
    relative_variance,
    together,
)
from ..known import ErrorsOfMethods, Known, WayToSave, convert_chosen
from ..places import within
from ..problem import GATED, Hold, Option
from ..step import Step
from ..structure import is_converted, structure_aside
from ..trace import Trace

# Functions that gated MLPs put their gate through.
ACTIVATIONS = frozenset(("silu", "gelu", "relu", "sigmoid", "tanh", "mish", "hardtanh"))


class GatedParts(WayToSave):
    """Converts gated MLPs."""

    methods = (GATED,)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors by name of the MLP: of the copies, by their bits, and of the table, which is the same."""
        result, probe = dict[str, Errors](), relative_variance(PROBE)
        for segment in together(gated_mlps_of(step.model), lambda _: ""):
            found = trial.converted(GatedMLPs(copy_bits=PROBE), include=segment)
            noise, bias = found.noise_and_bias
            of_copies = min(found.rounding, noise)
            noises = {b: noise - of_copies + of_copies * relative_variance(b) / probe for b in BITS}
            result.update(dict.fromkeys(segment, Errors(noises, dict.fromkeys(BITS, bias))))
        return {GATED: finite(result)}

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
            if len(trace.calls.get(name, ())) != 1 or len(acts) != 1 or _drops(step.model.get_submodule(name)):
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

    def carry_out(self, model: nn.Module, choices: Sequence[Choice]) -> None:
        """Convert the MLPs."""
        convert_chosen(model, choices, lambda choice: GatedMLPs(copy_bits=choice.bits or 0))


def gated_mlps_of(model: nn.Module) -> list[str]:
    """Return the names of the gated MLPs whose parts can be saved."""
    found = {each.name: each.current for each in candidates(model)}
    names = [
        name for name, module in found.items() if name and not (isinstance(module, nn.Module) and is_converted(module))
    ]
    with structure_aside(model):
        report = convert_beside(model, GatedMLPs(), include=names) if names else None
    return [row.name for row in report.replaced if row.name in found] if report else []


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops elements, so that adapters save another tensor than the product."""
    return any(isinstance(m, nn.Dropout) and m.p and m.training for m in module.modules())
