"""The options to run batch normalization, ReLU and a convolution or Linear as one layer (BLPA, convert/blpa.py).

In place of the normalization's input, the ReLU's signs and the convolution's input it saves one tensor: codes in fixed
point of what the normalization puts out, or its input, from which the rest is computed again without an error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ..convert.preact_chains import plan_of
from ..tensors.packing import packed_size
from .gradient_error import Errors
from .problem import CHAIN, Hold, Option
from .seconds import Speeds
from .structure import is_converted
from .trace import Trace, Traced

BITS = (4, 5, 6, 8)
_VECTORS = 4  # of a number for each channel, that one layer makes, and whose memory gradients are in


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


def chain_options(
    trace: Trace, chains: Mapping[str, Links], errors: Mapping[str, Errors], speeds: Speeds
) -> Iterator[Option]:
    """Yield the options to run chains as one layer.

    Args:
        trace: of the step.
        chains: as `chains_of` returns them.
        errors: of codes, by name.
        speeds: of the machine.
    """
    for name, links in ((name, links) for name, links in chains.items() if name in errors):
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
            again = speeds.forward(links.norm)
            yield Option(CHAIN, name, None, (*members,), (*x.exact, *change, _beside(x)), x.nbytes, seconds=again)
        for bits in BITS:
            nbytes = packed_size(x.elements, bits)
            costs = errors[name].noise[bits], errors[name].bias[bits]
            seconds = speeds.codes(x.elements, bits, x.dtype.itemsize)
            yield Option(CHAIN, name, bits, (*members,), (Hold(first, last, nbytes), *change), nbytes, *costs, seconds)


def _beside(x: Traced) -> Hold:
    """Return the gradient of the convolution's output, which one layer holds until its backward pass ends.

    Where the output is added to something, the sum's gradient is that gradient, and is held anyway; it counts twice.
    """
    start = max((hold.end for hold in x.exact), default=x.saved)
    return Hold(min(start, x.freed - 1), x.freed, x.nbytes)
