"""The largest batch that fits into a memory, and its plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...tables import FewbitError
from .document import Choice, Plan
from .eager_planner import Planner
from .known import Known
from .problem import Hold
from .seconds import Scaled
from .trace import Attention, Given, Trace, Traced, trace
from .ways.steps import choices_of_batch

MOST_SAMPLES = 1 << 24  # above which a step is said not to grow with its batch


def plan_largest(planner: Planner) -> Plan:
    """Return the plan for the largest batch that fits the limits of `planner`, which has samples such as its own.

    Where memory grows evenly with the batch, traces of the batch and of twice the batch tell it for any other, and
    the search begins at the one that they tell; that of a contrastive loss grows with its square, so every batch
    that is tried is traced itself. Errors are taken as those of the given batch.
    """
    samples, plain = planner.step.samples, planner.measured_eagerly()
    *_, known = planner.eager_ways(plain)  # what saves most
    known_of = {samples: known}

    def traced(count: int) -> Known:
        if count not in known_of:
            speeds = Scaled(known.speeds, count / samples)
            known_of[count] = replace(known, trace=_trace_of(planner, count, known.changes), speeds=speeds)
        return known_of[count]

    def planned(count: int) -> Plan:
        alone = replace(planner, step=planner.step.with_samples(count))
        if not known.changes:
            return alone.beside_exact(alone.solved(traced(count)), traced(count), traced(count))
        exactly = replace(plain, trace=_trace_of(planner, count, ()), speeds=Scaled(plain.speeds, count / samples))
        own = choices_of_batch(planner.step.model, known.changes, exactly.trace, traced(count).trace)
        found = replace(traced(count), changes=tuple(own))
        return alone.beside_exact(alone.solved(found), found, exactly)

    def fits(count: int) -> bool:
        return planner.is_feasible(traced(count))

    guess = samples
    if fits(samples) and fits(2 * samples):
        guess = _expected(planner, known, traced(2 * samples).trace, samples)
    tolerance = 0.01 if guess >= 100 else 0.0
    most = largest_by_trial(fits, guess, tolerance)
    if not most:
        try:
            return planned(1)
        except FewbitError as error:
            raise FewbitError(f"not even one sample fits: {error}") from None
    return planned(most)


def _trace_of(planner: Planner, count: int, changes: Sequence[Choice]) -> Trace:
    """Return the trace of another number of samples, of the model changed by choices of ways."""
    try:
        with planner.changed(changes):
            return trace(planner.step.with_samples(count))
    except FewbitError:
        raise
    except Exception as error:  # a tensor that has as many rows as there are samples, and is not of samples
        raise FewbitError(
            f"batch='max' takes tensors of {planner.step.samples} rows for a row a sample, and with {count} the model "
            f"raises {type(error).__name__}: {' '.join(str(error).split()):.200}"
        ) from error


def _expected(planner: Planner, known: Known, double: Trace, samples: int) -> int:
    """Return the batch that should be the largest, if memory grows evenly; a larger one that fits if it does not.

    Args:
        planner: of the batch that was given.
        known: of a batch that fits.
        double: the trace of twice the batch, which fits too.
        samples: in the batch.
    """

    def scaled_to(count: int) -> Known:
        factor = count / samples
        return replace(known, trace=scaled(known.trace, double, factor), speeds=Scaled(known.speeds, factor))

    try:
        expected = scaled_to(4 * samples).trace.base.max()
    except FewbitError:  # the two steps allocate in another order
        return 2 * samples
    fourfold = _trace_of(planner, 4 * samples, known.changes).base.max()
    if abs(int(expected) - int(fourfold)) > 0.01 * fourfold:
        return 2 * samples

    def fits(count: int) -> bool:
        if count > MOST_SAMPLES:
            raise FewbitError("any batch fits: the memory of a step does not grow with it")
        return planner.is_feasible(scaled_to(count))

    return max(2 * samples, largest_by_trial(fits, 2 * samples))


def scaled(one: Trace, double: Trace, factor: float) -> Trace:
    """Return the trace of a batch that is `factor` times that of `one`, given that of twice the batch.

    Raises:
        FewbitError: the two steps differ in more than the sizes of their tensors.
    """
    same = len(one.base) == len(double.base) and [x.place for x in one.tensors] == [x.place for x in double.tensors]
    if not same or len(one.kept) != len(double.kept):
        raise FewbitError("a step of twice the batch allocates in another order, so the largest batch is not known")

    def line(a: Any, b: Any) -> Any:
        return a + (b - a) * (factor - 1)

    def hold(a: Hold, b: Hold) -> Hold:
        return Hold(a.start, a.end, max(0, int(line(a.nbytes, b.nbytes))))

    def shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(1, round(line(m, n))) for m, n in zip(a, b, strict=True))

    def tensor(a: Traced, b: Traced) -> Traced:
        holds = {name: tuple(map(hold, getattr(a, name), getattr(b, name))) for name in ("exact", "restored")}
        return replace(a, shape=shape(a.shape, b.shape), whole=a.whole and b.whole and hold(a.whole, b.whole), **holds)

    def given(a: Given, b: Given) -> Given:
        return replace(a, shape=shape(a.shape, b.shape), life=hold(a.life, b.life))

    def attention(a: Attention, b: Attention) -> Attention:
        shapes = ((shape(s, t), dtype) for (s, dtype), (t, _) in zip(a.operands, b.operands, strict=True))
        return replace(a, operands=tuple(shapes), statistics=tuple(map(hold, a.statistics, b.statistics)))

    return replace(
        one,
        tensors=tuple(map(tensor, one.tensors, double.tensors)),
        attentions=tuple(map(attention, one.attentions, double.attentions)),
        base=line(one.base, double.base).astype(np.int64),
        kept=tuple(replace(a, life=hold(a.life, b.life)) for a, b in zip(one.kept, double.kept, strict=True)),
        inputs={m: tuple(map(given, own, double.inputs[m])) for m, own in one.inputs.items()},
        gradients=line(one.gradients, double.gradients).astype(np.int64),
        left=int(line(one.left, double.left)),
    )


def largest_by_trial(fits: Callable[[int], bool], guess: int = 1, tolerance: float = 0.0) -> int:
    """Return the largest number for which `fits` is true, or 0; it is true up to some number and false beyond.

    Strides from the guess double until the number is between two trials, which are then bisected.

    Args:
        fits: of a number of 1 or more.
        guess: the first number to try.
        tolerance: share of the number by which the result may be too small; the first stride is twice as long.
    """
    stride = max(1, round(2 * tolerance * guess))
    if fits(guess):
        low, high = guess, guess + stride
        while fits(high):
            stride *= 2
            low, high = high, high + stride
    else:
        low, high = max(0, guess - stride), guess
        while low and not fits(low):
            stride *= 2
            low, high = max(0, low - stride), low
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
