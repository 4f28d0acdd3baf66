"""The options to run batch normalization, ReLU and a convolution or Linear as one layer (BLPA, convert/blpa.py).

In place of the normalization's input, the ReLU's signs and the convolution's input it saves one tensor: codes in fixed
point of what the normalization puts out, or its input, from which the rest is computed again without an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...convert.api import convert_beside
from ...convert.blpa import BLPA
from ...convert.preact_chains import plan_of
from ...tensors.packing import packed_size
from ..document import Choice
from ..errors import BITS, PROBE, Errors, Trial, alike, difference, noise_and_bias_of, product, segments, total
from ..known import ErrorsOfMethods, Known, WayToSave
from ..places import without_numbers
from ..problem import CHAIN, Hold, Option
from ..step import Step
from ..structure import is_converted, structure_aside
from ..trace import Trace

BITS_OF_CHAINS = (4, 5, 6, 8)
_VECTORS = 4  # of a number for each channel, that one layer makes, and whose memory gradients are in


class Chains(WayToSave):
    """Converts chains to layers."""

    methods = (CHAIN,)

    def measure(self, step: Step, trace: Trace, trial: Trial) -> ErrorsOfMethods:
        """Return the errors by name of the chain's linear part.

        One layer rounds to the nearest level, and limits what is far from the mean. More bits make steps smaller, and
        limit as much: two numbers of bits tell the two apart. Two chains of the same weights' shapes are measured
        together; of more, the first and the last.
        """
        names, result = [*chains_of(step.model)], dict[str, Errors]()
        trials = [trial, *(Trial(half) for half in trial.step.halves())] if names else []
        share = 4.0 ** (PROBE - max(BITS))  # of the squared error of steps, at the most bits

        def kind(name: str) -> str:
            return f"{without_numbers(name)} {[p.shape for p in trial.step.model.get_submodule(name).parameters()]}"

        for equal in alike(names, kind):
            for segment in [equal] if len(equal) == 2 else segments(equal):
                few, many = (_of_chains_at(bits, trials, segment) for bits in (PROBE, max(BITS)))
                by_bits = []
                for at_probe, at_most in zip(few, many, strict=True):
                    of_limits = max(0.0, (at_most - share * at_probe) / (1 - share))
                    of_steps = max(0.0, at_probe - of_limits)
                    by_bits.append({bits: of_steps * 4.0 ** (PROBE - bits) + of_limits for bits in BITS})
                result.update(dict.fromkeys(segment, Errors(*by_bits)))
        return {CHAIN: result}

    def estimate(self, step: Step, trace: Trace, of_tensors: Mapping[str, Errors]) -> ErrorsOfMethods:
        """Return the errors of what the modules of a chain save, all of it bias: codes are those of nearest levels."""
        result = {}
        for name, links in chains_of(step.model).items():
            own = total([of_tensors[x.place] for x in trace.tensors if x.module in links.names])
            result[name] = Errors(dict.fromkeys(BITS, 0.0), {b: own.noise[b] + own.bias[b] for b in BITS})
        return {CHAIN: result}

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield the options of each chain whose modules alone save what they save, in one call."""
        trace, speeds, errors = known.trace, known.speeds, known.of(CHAIN)
        for name, links in ((name, links) for name, links in chains_of(step.model).items() if name in errors):
            of_links = [i for i, x in enumerate(trace.tensors) if x.module in links.names]
            members = [i for i in of_links if links.names.issuperset(trace.tensors[i].users)]
            inputs = [trace.tensors[i] for i in members if trace.tensors[i].module == links.norm]
            once = all(len(trace.calls.get(link, ())) == 1 for link in (links.norm, links.linear))
            if len(members) < len(of_links) or len(inputs) != 1 or not once:
                continue
            (x,) = inputs
            tensors = [trace.tensors[i] for i in members]
            # One layer rectifies in place and saves no signs.
            spans = trace.calls.get(links.activation or "", ())
            change = [Hold(span.start, span.end, -x.nbytes) for span in spans]
            change += [Hold(y.saved, y.freed, -packed_size(y.elements, 1)) for y in tensors if y is not x]
            first, last = min(y.saved for y in tensors), max(y.freed for y in tensors)
            change.append(Hold(first, len(trace.base), _VECTORS * 4 * x.shape[1]))
            if not any(y.module == links.owner for y in trace.tensors):  # among which its input would be one more
                # One layer holds the gradient of the convolution's output until its backward pass ends. Where the
                # output is added to something, the sum's gradient is that one, and is held anyway: it counts twice.
                start = max((hold.end for hold in x.exact), default=x.saved)
                held = *x.exact, *change, Hold(min(start, x.freed - 1), x.freed, x.nbytes)
                yield Option(CHAIN, name, None, (*members,), held, x.nbytes, seconds=speeds.forward(links.norm))
            for bits in BITS_OF_CHAINS:
                nbytes = packed_size(x.elements, bits)
                costs = errors[name].noise[bits], errors[name].bias[bits]
                seconds = speeds.codes(x.elements, bits, x.dtype.itemsize)
                yield Option(
                    CHAIN, name, bits, (*members,), (Hold(first, last, nbytes), *change), nbytes, *costs, seconds
                )

    def configs(self, choice: Choice) -> tuple[Any, ...]:
        """Return that of the chain."""
        return (BLPA(choice.bits),)


@dataclass(frozen=True)
class Links:
    """The modules of a chain, by name.

    Attributes:
        norm: the batch normalization.
        activation: the ReLU; None if it is a function.
        linear: the convolution or Linear, by which the chain is named.
        before: what is folded into it.
        owner: the module that runs them.
    """

    norm: str
    activation: str | None
    linear: str
    before: tuple[str, ...]
    owner: str

    @property
    def names(self) -> frozenset[str]:
        """All of them but the owner."""
        return frozenset(name for name in (self.norm, self.activation, self.linear, *self.before) if name)


def chains_of(model: nn.Module) -> dict[str, Links]:
    """Return the chains of a model by the name of their linear part."""
    found = {}
    for each in plan_of(model).planned:
        chain, prefix = each.chain, each.name.removesuffix(each.chain.linear)
        before = tuple(prefix + link for link in chain.before if isinstance(link, str))
        activation = None if chain.activation is None else prefix + chain.activation
        links = Links(prefix + chain.norm, activation, each.name, before, prefix.removesuffix("."))
        parts = [model.get_submodule(name) for name in links.names]
        if not any(map(is_converted, parts)) and "forward" not in vars(model.get_submodule(links.owner)):
            found[each.name] = links
    return found


# ---- errors ----------------------------------------------------------------------------------------------------------


def _of_chains_at(bits: int, trials: Sequence[Trial], names: Sequence[str]) -> tuple[float, float]:
    """Return the noise and the bias of one of equal chains at a number of bits.

    Batch normalization takes the statistics of a whole batch, so that halves are batches of their own here: the share
    of bias is that of what their errors have in common; all, where there are no halves.
    """
    model, exact = trials[0].step.model, [t.exact for t in trials]
    with structure_aside(model):
        convert_beside(model, BLPA(bits), include=[*names])
        whole, *halves = (difference(t.gradient(0), g) for t, g in zip(trials, exact, strict=True))
    square, of_bias = product(whole, whole) / trials[0].scale / len(names), 1.0
    if halves:
        noise, bias = noise_and_bias_of(*halves)
        of_bias = bias / (noise + bias or 1.0)
    return (1 - of_bias) * square, of_bias * square
