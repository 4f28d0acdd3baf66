"""The loss in chunks of tokens: exact, for language models whose head and cross-entropy can be computed so.

It changes the memory of a step from the head on, at every moment, and not the life of one saved tensor. So a plan with
it is solved for a trace of its own, beside the plan without it; what rounding does to the gradient is the same in both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod

from torch import nn

from ...convert.api import convert_beside
from ...convert.chunked_loss import ChunkedLoss, why_not
from ..document import Choice
from ..options import Known
from ..problem import CHUNKED
from ..step import Step
from ..structure import structure_aside
from ..trace import Given, Trace, trace

# A head whose logits, in float32, are less than this share of a step's peak is not worth another trace and another
# solution: the plan without chunks could gain no more than that by it.
_WORTH = 1 / 50


def carry_out(model: nn.Module, heads: Sequence[str]) -> None:
    """Compute the loss of the logits of these Linear layers, by name, in chunks."""
    if heads:
        convert_beside(model, ChunkedLoss(heads=tuple(heads)), include=heads)


@contextmanager
def in_chunks(model: nn.Module, heads: Sequence[str]) -> Iterator[None]:
    """Compute the loss of these heads in chunks within this block."""
    with structure_aside(model):
        carry_out(model, heads)
        yield


def known_in_chunks(known: Known, step: Step) -> Known | None:
    """Return what is known of a step whose loss is in chunks; None where that saves nothing.

    Args:
        known: of the step as it is.
        step: the same.
    """
    heads = _heads_of(step.model, known.trace)
    if not heads:
        return None
    try:
        with in_chunks(step.model, heads):
            traced = trace(step)
    except Exception:  # a user's loss may do anything with logits that have no memory
        return None
    least, least_plain = int(traced.base.max()), int(known.trace.base.max())
    if least > (1 - _WORTH) * least_plain:
        return None  # another loss than torch's cross-entropy, or logits that something reads
    found = with_traces(known, step.model, heads, known.trace, traced)
    first, *others = found.changes
    seconds = known.speeds.added(step, partial(in_chunks, step.model, heads))
    return replace(found, changes=(replace(first, seconds=seconds), *others))


def with_traces(known: Known, model: nn.Module, heads: Sequence[str], plain: Trace, traced: Trace) -> Known:
    """Return what is known of a step in chunks, of which the first head's choice says what all of them save.

    Args:
        known: of a step, of this batch or a smaller one.
        model: of the step.
        heads: their names.
        plain, traced: the step without chunks and with them.
    """
    now = sum(_gradients(model.get_submodule(name), traced.inputs.get(name, ())) for name in heads)
    exact = now + max(0, int(plain.base[plain.backward] - traced.base[traced.backward]))
    sizes = [(exact, now, known.taken * known.speeds.step), *[(0, 0, 0.0)] * (len(heads) - 1)]
    choices = (Choice(h, CHUNKED, None, a, b, 0.0, 0.0, s) for h, (a, b, s) in zip(heads, sizes, strict=True))
    return replace(known, trace=traced, changes=tuple(choices))


def _gradients(head: nn.Module, inputs: Sequence[Given]) -> int:
    """Return the bytes of the gradients that wait for the backward pass, of hidden states and what learns of a head."""
    hidden = sum(prod(x.shape) * x.dtype.itemsize for x in inputs if x.requires_grad)
    return hidden + sum(p.nbytes for p in head.parameters() if p.requires_grad)


def _heads_of(model: nn.Module, traced: Trace) -> tuple[str, ...]:
    """Return the Linear layers that make logits worth the while: the model's own heads, or else the last layer."""
    found = [each for each in ChunkedLoss().candidates(model) if isinstance(each.current, nn.Module)]
    names = [each.name for each in found if each.name in traced.calls]
    if not found:
        modules = dict(model.named_modules())
        layers = [name for name in traced.calls if name and type(modules.get(name)) is nn.Linear]
        names = [max(layers, key=lambda name: traced.calls[name][-1].start)] if layers else []
    modules = [model.get_submodule(name) for name in names]
    usable = all(name and len(traced.calls[name]) == 1 for name in names) and not any(map(why_not, modules))
    return tuple(names) if usable and _logits(model, names, traced) > _WORTH * int(traced.base.max()) else ()


def _logits(model: nn.Module, names: Sequence[str], traced: Trace) -> int:
    """Return the bytes of the largest logits in float32."""
    sizes = [
        4 * prod(x.shape[:-1]) * getattr(model.get_submodule(name), "out_features", 0)
        for name in names
        for x in traced.inputs.get(name, ())
    ]
    return max(sizes, default=0)
