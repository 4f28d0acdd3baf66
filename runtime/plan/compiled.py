"""What is known of a compiled step: its memory, as torch's allocator saw it, and the errors of what its graphs save.

1  observe   the graphs, divided as the backend divides them, run op by op; what they save comes back rounded, value by
             value, in repeated calls of the backward graphs (compiled_run.py)
2  compile   with the backend's own bits; the allocator's events of one step tell when each value's codes live, and its
             time beside that of torch's own compiler how long quantizers take in it (compiled_run.py)
3  options   each value exactly or with 1 to 8 bits, which change the bytes of its codes and nothing else

Which values are saved and which are computed again is the min-cut's choice (compile/cut.py), at the backend's bits,
and that of torch's `activation_memory_budget`, which a step is measured with. Torch's own compiler, which saves all
exactly, is known by a step with each budget: its memory and its time.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...tables import FewbitError
from ..memory.allocator import Allocations
from .compiled_run import LEAST_OF_ROLES, CompiledRun, Value, budget_runs, compile_step, observe
from .document import Choice
from .errors import LEAST_BITS
from .known import Known
from .places import without_numbers
from .problem import ALL_GRAPHS, EXACT, GROUPS, Hold, Option, Problem
from .seconds import Quantizers
from .step import Step

_log = logging.getLogger("fewbit.plan")
# Of torch's `activation_memory_budget`, for plans: with few bits, and exactly.
RATIOS, EXACT_RATIOS = (0.5, 0.0), (0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class CompiledKnown:
    """What is known of a compiled step.

    Attributes:
        values: what its graphs save in codes, by place: the calls that save at one place have one value together.
        holds: when the codes of each value live, of each call, and their bytes at the backend's own bits.
        exact_holds: when each value would live exactly, of each call.
        base: bytes at each event of the allocator, without these codes.
        gradients: bytes of what outlives the step, at each event.
        backward: the event at which the backward pass begins.
        quantizers: their times in this step.
        seconds: of an exact step, compiled by torch.
        recompute: torch's `activation_memory_budget`.
        recompute_seconds: that a step takes longer for it.
        by_torch: the same step, compiled by torch alone; None if torch could not.
        changes: what is done to the model in the compiled step, for the plan.
        host_memory: most bytes of a graph's codes that waited in host memory; None if they did not. Of values that
            moved, scales alone have holds.
    """

    values: tuple[Value, ...]
    holds: tuple[tuple[Hold, ...], ...]
    exact_holds: tuple[tuple[Hold, ...], ...]
    base: NDArray[np.int64]
    gradients: NDArray[np.int64]
    backward: int
    quantizers: Quantizers
    seconds: float
    recompute: float = 1.0
    recompute_seconds: float = 0.0
    by_torch: "CompiledKnown | None" = None
    changes: tuple[Choice, ...] = ()
    host_memory: int | None = None
    left: ClassVar[int] = 0  # of what outlives the step, nothing but `gradients`

    @property
    def taken(self) -> float:
        """Of the time of an exact step, the share that computing again takes."""
        return self.recompute_seconds / max(self.seconds, 1e-9)

    @property
    def is_exact(self) -> bool:
        """Whether torch alone compiled it. Its one plan is then the step that was measured."""
        return [value.place for value in self.values] == [ALL_GRAPHS]

    @property
    def kinds(self) -> list[str]:
        """Of each value, the same text for those of equal layers."""
        return [f"{without_numbers(v.module)} {v.role} {v.shape}" for v in self.values]

    def uniform(self, bits: int) -> list[Option]:
        """Return the options to save each value in so many bits an element, where its graph can."""
        found = enumerate(zip(self.values, self.holds, strict=True))
        return [_in_groups(i, v, holds, bits, self) for i, (v, holds) in found if bits in v.sizes]

    def problem(self, step: Step, fixed: int) -> Problem:
        """Return the planner's problem; what is computed again the compiler decides."""
        options: list[Option] = []
        for i, (value, holds) in enumerate(zip(self.values, self.holds, strict=True)):
            exact = value.exact_bytes
            # Codes alone move: exactly, such a value would be on the device, from when on is not known.
            moved = self.has_moved(value, holds)
            lives = (Hold(0, len(self.base), exact),) if moved else self.exact_holds[i]
            options.append(Option(EXACT, value.place, None, (i,), lives, exact))
            least = LEAST_OF_ROLES.get(value.role, LEAST_BITS)
            options += [_in_groups(i, value, holds, bits, self) for bits in value.sizes if bits >= least]
        return Problem(len(self.values), tuple(options), self.base, fixed, self.seconds)

    def has_moved(self, value: Value, holds: Sequence[Hold]) -> bool:
        """Return whether the codes of a value waited in host memory: fewer bytes than one bit takes lived on."""
        held = sum(hold.nbytes for hold in holds)
        return self.host_memory is not None and held < min(value.sizes.values(), default=0)

    def moment(self, at: int) -> str:
        """Return where in the step a moment lies, in words."""
        if at < self.backward:
            return "in the compiled forward pass"
        found = zip(self.holds, self.values, strict=True)
        ahead = [(hold.end, value.module) for holds, value in found for hold in holds if hold.end > at]
        return (
            f"in the compiled backward pass of {min(ahead)[1] or 'the model'}" if ahead else "after the backward pass"
        )


AnyKnown = Known | CompiledKnown  # of which a planner asks the same


def know_compiled(step: Step) -> CompiledKnown:
    """Observe and compile a step.

    Args:
        step: on real tensors.

    Raises:
        FewbitError: the compiled graphs save nothing that could be rounded.
    """
    values = observe(step, {})
    if not values:
        raise FewbitError("the compiled graphs save nothing that could be rounded")
    run = compile_step(step)
    quantizers = Quantizers.of(step)
    by_torch = next((_by_torch(record, taken, quantizers) for _, record, taken in budget_runs(step, [1.0])), None)
    seconds = by_torch.seconds if by_torch else run.seconds
    known = replace(_known(values, run, quantizers, seconds), by_torch=by_torch)
    alone = _quantizing(known)
    return replace(known, quantizers=quantizers.within((run.seconds - seconds) / alone)) if alone else known


def know_recomputed(step: Step, known: CompiledKnown, recompute: float) -> CompiledKnown:
    """Observe and compile a step that is known, with one of torch's budgets.

    Args:
        step: on real tensors.
        known: of the step that computes again what Inductor does by default.
        recompute: torch's `activation_memory_budget`.
    """
    options = {"recompute": recompute}
    _log.info("compiling the step in few bits, with torch's memory budget %g", recompute)
    run = compile_step(step, **options)
    found = _known(observe(step, options), run, known.quantizers, known.seconds)
    more = max(0.0, run.seconds - _quantizing(found) - known.seconds)
    return replace(found, recompute=recompute, recompute_seconds=more)


def know_hosted(step: Step, known: CompiledKnown, most: int) -> CompiledKnown | None:
    """Compile a step that is known, with codes that wait in host memory; None if none would.

    What their copies take is measured, with what the computation hides of it.

    Args:
        step: on real tensors.
        known: of the same step without.
        most: bytes of a graph's codes that may wait there.
    """
    _log.info("compiling the step with codes in host memory")
    run = compile_step(step, host_memory=most)
    found = replace(_known(observe(step, {}), run, known.quantizers, known.seconds), host_memory=most)
    if not any(map(found.has_moved, found.values, found.holds)):
        return None
    more = max(0.0, run.seconds - _quantizing(known) - known.seconds)
    return replace(found, recompute_seconds=more, changes=known.changes)


def other_ways(step: Step, known: CompiledKnown) -> Iterator[CompiledKnown]:
    """Yield a known step, as it is or changed, with torch's budgets: compiled by torch alone, and in few bits."""
    if known.by_torch is not None:
        for one in know_by_torch(known.by_torch, step, EXACT_RATIOS):
            yield replace(one, changes=known.changes)
    for ratio in RATIOS:
        yield replace(know_recomputed(step, known, ratio), changes=known.changes)


def know_by_torch(by_torch: CompiledKnown, step: Step, ratios: Iterable[float]) -> Iterator[CompiledKnown]:
    """Yield a step that torch alone compiles with each of its budgets, without those that it fails with.

    Args:
        by_torch: the same step with torch's default.
        step: on real tensors.
        ratios: of torch's `activation_memory_budget`.
    """
    for ratio, record, taken in budget_runs(step, ratios):
        known = _by_torch(record, by_torch.seconds, by_torch.quantizers)
        yield replace(known, recompute=ratio, recompute_seconds=taken - by_torch.seconds)


def _by_torch(record: Allocations, seconds: float, quantizers: Quantizers) -> CompiledKnown:
    """Return what a step of torch's own compiler tells: all that it saves is one value, which is exact."""
    boundary, end = record.marks[0], len(record.levels)
    saved = [Hold(b.start, b.end, b.nbytes) for b in record.blocks if b.start < boundary < b.end < end]
    holds = tuple(saved) or (Hold(boundary, boundary + 1, 0),)
    nbytes = sum(hold.nbytes for hold in holds)
    value = Value(ALL_GRAPHS, "", "", (), 1, nbytes, {}, {}, {}, (0, 0))
    return CompiledKnown(
        (value,), (holds,), (holds,), _without(holds, record), _gradients(record), boundary, quantizers, seconds
    )


def _without(holds: Iterable[Hold], record: Allocations) -> NDArray[np.int64]:
    """Return the bytes at each event of the allocator without those that are held."""
    base = record.levels.copy()
    for hold in holds:
        base[hold.start : hold.end] -= hold.nbytes
    return base


def _gradients(record: Allocations) -> NDArray[np.int64]:
    """Return the bytes of what the backward pass makes and a step leaves, at each event."""
    gradients = np.zeros(len(record.levels), np.int64)
    for block in record.blocks:
        if block.end == len(record.levels) and block.start >= record.marks[0]:
            gradients[block.start :] += block.nbytes
    return gradients


def _known(values: Sequence[Value], run: CompiledRun, quantizers: Quantizers, seconds: float) -> CompiledKnown:
    """Return what a run tells of the memory of `values`."""
    record = run.record
    boundary = record.marks[0]
    # The codes of each value live as the buffers do that the backward graphs were given, by their addresses.
    between = {block.address: block for block in record.blocks if block.start < boundary < block.end}
    holds, exact_holds = [], []
    for value in values:
        found = [between[a] for a in run.addresses.get((value.call, value.place), ()) if a in between]
        start, end = min((b.start for b in found), default=boundary), max((b.end for b in found), default=boundary + 1)
        holds.append(Hold(start, end, sum(b.nbytes for b in found)))
        if (value.call, value.place) in run.overwritten:
            end = _overwritten_after(value, end, record)
        exact_holds.append(Hold(start, end, value.exact_bytes))
    by_place: defaultdict[str, list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        by_place[value.place].append(i)
    together: list[Value] = []  # the values of one place are one: an option for the place changes all of them
    for equal in ([values[i] for i in own] for own in by_place.values()):
        bits_of_all = [bits for bits in equal[0].sizes if all(bits in v.sizes for v in equal)]
        sizes, noise, bias = (
            {bits: sum(getattr(v, name)[bits] for v in equal) for bits in bits_of_all}
            for name in ("sizes", "noise", "bias")
        )
        exact = sum(v.exact_bytes for v in equal)
        together.append(replace(equal[0], exact_bytes=exact, sizes=sizes, noise=noise, bias=bias))
    lives, exact_lives = (
        tuple(tuple(each[i] for i in own) for own in by_place.values()) for each in (holds, exact_holds)
    )
    base = _without(holds, record)
    return CompiledKnown(tuple(together), lives, exact_lives, base, _gradients(record), boundary, quantizers, seconds)


def _overwritten_after(value: Value, end: int, record: Allocations) -> int:
    """Return when the memory is written over to which a value is unpacked, whose codes live until `end`.

    Exactly, the value would live until then, beside the result. The kernel that writes it is the last to read other
    buffers of this size, so that the first of them to be free tells (peaks of a net of two layers within 1.5 %).
    """
    boundary = record.marks[0]
    ends = [b.end for b in record.blocks if b.nbytes == value.exact_bytes and boundary < b.start <= end < b.end]
    return min(ends, default=end)


def _quantizing(known: CompiledKnown) -> float:
    """Return how long the quantizers of a step with the backend's own bits take, whose codes take `holds`."""
    seconds = 0.0
    for value, holds in zip(known.values, known.holds, strict=True):
        held = sum(hold.nbytes for hold in holds)
        bits = next((bits for bits, nbytes in value.sizes.items() if nbytes == held), None)
        if bits is not None:
            seconds += known.quantizers.codes(value.exact_bytes // value.itemsize, bits)
    return seconds


def _shared(holds: Sequence[Hold], nbytes: int) -> tuple[Hold, ...]:
    """Return the lives with so many bytes in all, divided as the codes are."""
    codes = sum(hold.nbytes for hold in holds)
    if not codes:
        return (replace(holds[0], nbytes=nbytes),)
    return tuple(replace(hold, nbytes=-(-nbytes * hold.nbytes // codes)) for hold in holds)


def _in_groups(i: int, value: Value, holds: Sequence[Hold], bits: int, known: CompiledKnown) -> Option:
    nbytes, elements = value.sizes[bits], value.exact_bytes // value.itemsize
    costs = value.noise[bits], value.bias[bits], known.quantizers.codes(elements, bits)
    if known.has_moved(value, holds):  # but for its scales, as many at any bits
        return Option(GROUPS, value.place, bits, (i,), tuple(holds), sum(hold.nbytes for hold in holds), *costs)
    return Option(GROUPS, value.place, bits, (i,), _shared(holds, nbytes), nbytes, *costs)
