"""What a training step holds whatever a plan chooses, and when each saved tensor would be held (recorder.py finds it).

A tensor's codes are held from the moment when it is saved; the tensor itself, if it is saved exactly, from the moment
when the forward pass lets go of it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...tables import FewbitError
from ..quantizers import PerGroup
from ..saved.store import within_rows
from .places import without_numbers
from .problem import Hold

NUMBERS = 4096  # bytes of those that torch wraps into tensors before an operation, and of seeds of rounding


@dataclass(frozen=True)
class Traced:
    """A tensor that may be rounded, and its life in the step.

    Attributes:
        place: as `Places` names it.
        module: name of the module that saves it first.
        function: name of the torch function that saves it first.
        shape, dtype: of the tensor.
        features: elements of its innermost dimension.
        saved, freed: moments between which its codes are held.
        exact: what it takes to hold it exactly.
        restored: what the traced step holds of it in the backward pass, which is in the base.
        users: names of all modules that save it.
        storage: number of the storage that held it, None if it lives on anyway.
        whole: life of that storage if the tensor is a part of it.
    """

    place: str
    module: str
    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    features: int
    saved: int
    freed: int
    exact: tuple[Hold, ...]
    restored: tuple[Hold, ...]
    users: tuple[str, ...]
    storage: int | None
    whole: Hold | None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the exact tensor."""
        return self.elements * self.dtype.itemsize

    @property
    def gaps(self) -> list[Hold]:
        """What the backward pass makes again of a tensor that is not held exactly, as bytes that are not there."""
        holds = sorted(self.exact, key=lambda hold: hold.start)
        return [Hold(before.end, after.start, -before.nbytes) for before, after in pairwise(holds)]


@dataclass(frozen=True)
class Span:
    """One call of a module in the forward pass, from a moment to another."""

    start: int
    end: int


@dataclass(frozen=True)
class Kept:
    """A storage that a module saves exactly in any case.

    Attributes:
        module: its name.
        storage: number of the storage.
        life: of the storage.
        in_bits: whether it is saved in one bit an element.
    """

    module: str
    storage: int
    life: Hold
    in_bits: bool


@dataclass(frozen=True)
class Given:
    """A tensor that a module is given.

    Attributes:
        storage: number of its storage.
        life: of the storage.
        shape, dtype: of the tensor.
        requires_grad: whether a gradient flows through it; not through a mask.
    """

    storage: int
    life: Hold
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Attention:
    """A `scaled_dot_product_attention`, which may be computed again in the backward pass.

    Attributes:
        name: as `Places` names it.
        operands: query, key and value: their shapes and dtypes.
        members: indices of the tensors that it saves.
        shared: those of them that other ops save, too.
        output: index of its output, if that is one of them.
        statistics: lives of what it makes and saves exactly, such as the log-sum-exp.
    """

    name: str
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    members: tuple[int, ...]
    shared: tuple[int, ...]
    output: int | None
    statistics: tuple[Hold, ...]

    @property
    def module(self) -> str:
        """Name of the module that calls it."""
        return self.name.rpartition(":")[0]

    @property
    def kind(self) -> str:
        """The same text for the same attention of equal layers."""
        return f"{without_numbers(self.name)} {self.operands}"


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        tensors: what may be rounded, in the order of saving.
        base: bytes at each moment.
        calls: of each module.
        kept: what one module alone saves exactly in any case.
        inputs: what each module is given, of what the step has made.
        backward: the moment at which the backward pass begins.
        gradients: bytes of the parameters' gradients at each moment, which are in `base`.
        attentions: in the order of the forward pass.
        outputs: of each module that returns one tensor, the number of its storage, unless that is changed in place
            before it is saved.
        saves: the moments at which the forward pass saves anything, in order.
        left: bytes that stay after the step besides the gradients, such as what a module keeps of its last input.
    """

    tensors: tuple[Traced, ...]
    base: NDArray[np.int64]
    calls: dict[str, tuple[Span, ...]]
    kept: tuple[Kept, ...]
    inputs: dict[str, tuple[Given, ...]]
    backward: int
    gradients: NDArray[np.int64]
    attentions: tuple[Attention, ...]
    outputs: dict[str, int]
    saves: tuple[int, ...]
    left: int = 0

    @property
    def by_module(self) -> dict[str, list[int]]:
        """The indices of the tensors that each module saves first."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for i, x in enumerate(self.tensors):
            found[x.module].append(i)
        return found


def backward_start(tensors: Sequence[Traced], trace: Trace) -> int:
    """Return when the backward pass of what saves these tensors begins."""
    return min(x.exact[0].end if x.exact and x.exact[0].end > trace.backward else x.freed for x in tensors)


@cache
def codes_bytes(shape: tuple[int, ...], dtype: torch.dtype, features: int, bits: int, function: str = "") -> int:
    """Return the bytes that `PerGroup` saves of a tensor that a torch function saves, in groups within its rows."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return (within_rows(PerGroup(bits), features, function) if x.dim() > 1 else PerGroup(bits)).compress(x).nbytes


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
