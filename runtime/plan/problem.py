"""The planner's problem, and its solution: each saved tensor is covered by one option, within memory at every moment.

    minimise    Σ price(option)         over the chosen options
    such that   each tensor is in the cover of exactly one chosen option
                base(τ) + Σ bytes that chosen options hold at τ  ≤  memory,     at every moment τ
                Σ seconds ≤ time,   Σ squared errors ≤ error²                    where they are limited

An option may cover one tensor (save it exactly, in 4 bits) or several (recompute a block; save codes of a table in
place of all that an activation saves). What it holds is a list of bytes between two moments, so that recomputing a
block, which saves little but holds much for a moment of the backward pass, is an option like any other. `base` is the
memory of a step that saves none of the tensors: activations while they are used, temporary results, gradients.
Moments count the allocations of a traced step (trace.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

EXACT, GROUPS, HOST, RECOMPUTE = "exact", "groups", "host", "recompute"
TABLE, STOCHASTIC, ATTENTION, GATED, OUTPUT = "table", "stochastic", "attention", "gated", "output"
CHAIN, OUTLIERS, ROTATED, CHUNKED, TILED = "chain", "outliers", "rotated", "chunked", "tiled"
FLOAT8 = "float8"
OF_TENSORS = (EXACT, GROUPS, HOST, OUTLIERS, ROTATED, FLOAT8)
OF_STEPS = (CHUNKED, TILED)  # which ways/ has, a file each
METHODS = (*OF_TENSORS, RECOMPUTE, TABLE, STOCHASTIC, ATTENTION, GATED, OUTPUT, CHAIN, *OF_STEPS)
AND = "|"  # between a target and another that its option holds exactly
ALL_GRAPHS = "all compiled graphs"  # the target that stands for all that a compiled step saves


@dataclass(frozen=True)
class Hold:
    """Bytes that are held from the moment `start` until before the moment `end`."""

    start: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class Option:
    """One way to have tensors again in the backward pass.

    Attributes:
        method: one of `METHODS`.
        target: the place of the tensor, or the name of the module, that it is for.
        bits: of the codes, None where there are none.
        covers: indices of the tensors.
        holds: the memory that it takes.
        saved: bytes from forward to backward pass, as a report shows them.
        noise: the mean squared error that it adds to the gradient, relative to the gradient's squared norm, as far as
            it averages out over steps.
        bias: the rest of the squared error, which does not.
        seconds: that it adds to a step.
    """

    method: str
    target: str
    bits: int | None
    covers: tuple[int, ...]
    holds: tuple[Hold, ...]
    saved: int
    noise: float = 0.0
    bias: float = 0.0
    seconds: float = 0.0

    @property
    def error(self) -> float:
        """The squared error of the gradient."""
        return self.noise + self.bias


@dataclass(frozen=True)
class Problem:
    """Tensors, options and limits.

    Attributes:
        tensors: number of tensors to cover.
        options: each tensor has at least one of its own.
        base: bytes at each moment of the step, without what options hold.
        fixed: bytes that are there throughout: parameters, the optimizer's state.
        seconds: of an exact step.
    """

    tensors: int
    options: tuple[Option, ...]
    base: NDArray[np.int64]
    fixed: int
    seconds: float

    def usage(self, chosen: Iterable[Option]) -> NDArray[np.int64]:
        """Return the bytes at each moment with the chosen options, without `fixed`."""
        change = np.zeros(len(self.base) + 1, np.int64)
        for option in chosen:
            for hold in option.holds:
                change[hold.start] += hold.nbytes
                change[hold.end] -= hold.nbytes
        return self.base + np.cumsum(change[:-1])

    def exact_peak(self) -> int:
        """Return the bytes of the peak of a step that saves all exactly."""
        return self.fixed + int(self.usage(o for o in self.options if o.method == EXACT).max())

    def floor(self) -> int:
        """Return bytes of the peak that no choice goes below: those of the largest moment, with all that options may
        spare of what is there anyway."""
        at, spared = int(np.argmax(self.base)), dict[int, int]()
        for option in self.options:
            held = sum(h.nbytes for h in option.holds if h.start <= at < h.end)
            spared[option.covers[0]] = min(held, spared.get(option.covers[0], 0))
        return self.fixed + int(self.base[at]) + sum(spared.values())

    @cached_property
    def moments(self) -> NDArray[np.int64]:
        """The moments at which memory may be largest, whatever is chosen.

        Of the moments between which no option's memory changes, the one with the largest base; and of these none at
        which every option holds no more, and the base is no larger, than at another.
        """
        edges = sorted({0, *(t for o in self.options for h in o.holds for t in (h.start, h.end) if t < len(self.base))})
        largest = np.array(
            [a + int(np.argmax(self.base[a:b])) for a, b in zip(edges, [*edges[1:], len(self.base)], strict=True)]
        )
        # Options that hold bytes in the same proportions say the same, such as the numbers of bits of one tensor.
        alike = dict[tuple[object, ...], int]()
        for j, option in enumerate(self.options):
            most = max((abs(hold.nbytes) for hold in option.holds), default=1) or 1
            alike[tuple((hold.start, hold.end, round(hold.nbytes / most, 6)) for hold in option.holds)] = j
        held, base = self.held_at(largest)[:, sorted(alike.values())], self.base[largest]
        order = np.argsort(-(base + held.sum(1) / max(1, self.tensors)), kind="stable")
        held, base = held[order], base[order]
        table = np.column_stack([base, held])
        kept: list[int] = []
        rows, last = np.empty_like(table), 0
        for row, place in zip(table, order, strict=True):
            count = len(kept)
            if count and (rows[last] >= row).all():  # what dominated the moment before, often dominates this one
                continue
            above = np.flatnonzero((rows[:count] >= row).all(1))
            if len(above):
                last = int(above[0])
                continue
            rows[count] = row
            kept.append(int(place))
        return largest[sorted(kept)]

    def held_at(self, moments: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes that each option holds at each of the moments, (moments, options)."""
        held = np.zeros((len(moments), len(self.options)), np.int64)
        for j, option in enumerate(self.options):
            for hold in option.holds:
                first, last = np.searchsorted(moments, (hold.start, hold.end))
                held[first:last, j] += hold.nbytes
        return held


@dataclass(frozen=True)
class Price:
    """What a step's error and time cost, in one unit.

    The unit is about a tenth of a training's loss: transformers trained with derivatives rounded in sixteen ways ended
    above exact training by 0.10 noise² + 0.62 bias². Their ratio is the default's, six (5.1 to 6.9; a ResNet's losses
    scatter too much to tell: 0 to 2; plots/studies/price.py). The weight of time is a choice: a step 10 % longer is as
    bad as a gradient whose relative error, without bias, is 0.1. That costs 0.001 of the loss, and steps that are a
    tenth longer cost more: where the loss falls as a power of 0.1 of the steps, about 0.01.

    Attributes:
        noise: of the squared relative error that averages out.
        bias: of the rest of it.
        time: of the share by which the step takes longer.
    """

    noise: float = 1.0
    bias: float = 6.0
    time: float = 0.1

    def of(self, option: Option, seconds: float) -> float:
        """Return the price of an option in a step that takes `seconds` exactly."""
        return self.noise * option.noise + self.bias * option.bias + self.time * option.seconds / max(seconds, 1e-9)


@dataclass(frozen=True)
class Limits:
    """Most memory, error and time of a plan; None is no limit.

    Attributes:
        memory: bytes of the peak.
        error: relative error of the gradient, the root of the squared error.
        time: of a step, relative to the exact one.
    """

    memory: int | None = None
    error: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class Solution:
    """The chosen options.

    Attributes:
        chosen: one that covers each tensor.
        price: Σ prices, or the peak where it was minimised.
        bound: no solution is below; from the solver's relaxation.
    """

    chosen: tuple[Option, ...]
    price: float
    bound: float

    @property
    def gap(self) -> float:
        """The relative distance of the price from the bound, 0 for a proven optimum."""
        return max(0.0, self.price - self.bound) / max(abs(self.price), 1e-12)

    @property
    def noise(self) -> float:
        """The squared relative error of the gradient that averages out."""
        return sum(option.noise for option in self.chosen)

    @property
    def bias(self) -> float:
        """The squared relative error of the gradient that does not."""
        return sum(option.bias for option in self.chosen)

    @property
    def error(self) -> float:
        """The relative error of the gradient."""
        return (self.noise + self.bias) ** 0.5

    @property
    def seconds(self) -> float:
        """What the options add to a step."""
        return sum(option.seconds for option in self.chosen)
