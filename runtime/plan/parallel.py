"""What parallelism changes of the memory of a rank.

DistributedDataParallel holds the gradients once more, in buckets. FSDP2 over n ranks holds 1/n of parameters, gradients
and the optimizer's state. A unit, which `fully_shard` was called on, is gathered before it runs, in both passes, while
the next one is gathered already; its gradient is whole until the ranks have added theirs, in a copy. What belongs to no
unit is gathered all the time. The stage of a pipeline that has n microbatches in flight saves for n of them while it
computes one, and adds its gradients to those of the ones before.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from ..memory.storages import bytes_of
from ..saved.checkpoint import outermost_blocks


@dataclass(frozen=True)
class Static:
    """Bytes that are there in every step.

    Attributes:
        parameters: with buffers.
        optimizer: its state.
        update: temporary memory of the optimizer's step.
    """

    parameters: int
    optimizer: int
    update: int

    @property
    def fixed(self) -> int:
        """What is there at every moment."""
        return self.parameters + self.optimizer


class Parallel(Protocol):
    """Kind of parallelism."""

    @property
    def in_flight(self) -> int:
        """Batches whose forward pass has run and whose backward pass has not, at most."""
        ...

    def static(self, static: Static) -> Static:
        """Return what is there in every step, of what one process without others has."""
        ...

    def gradients(self, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of the parameters' gradients, and of copies, at each moment."""
        ...

    def workspace(self, moments: int, backward: int) -> NDArray[np.int64]:
        """Return the bytes besides at each moment, of which `backward` begins the backward pass."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process."""

    @property
    def in_flight(self) -> int:
        """One."""
        return 1

    def static(self, static: Static) -> Static:
        """Return it as it is."""
        return static

    def gradients(self, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return them as they are."""
        return gradients

    def workspace(self, moments: int, backward: int) -> NDArray[np.int64]:
        """Return zeros."""
        return np.zeros(moments, np.int64)


@dataclass(frozen=True)
class Buckets(Alone):
    """`DistributedDataParallel`.

    Attributes:
        nbytes: of all gradients.
    """

    nbytes: int

    def gradients(self, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return them with the buckets."""
        return gradients + self.nbytes


@dataclass(frozen=True)
class Microbatches(Alone):
    """A stage of a pipeline.

    Attributes:
        count: that are in flight at once.
        largest: bytes of the largest gradient, which is there until it is added to that of the microbatches before.
    """

    count: int
    largest: int

    @property
    def in_flight(self) -> int:
        """Their number."""
        return self.count

    def gradients(self, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return all of them at every moment: those of the microbatches before."""
        return np.full_like(gradients, gradients.max())

    def workspace(self, moments: int, backward: int) -> NDArray[np.int64]:
        """Return the gradient that is to be added."""
        return np.where(np.arange(moments) < backward, 0, self.largest)


@dataclass(frozen=True)
class Shards(Alone):
    """FSDP2, with blocks as units.

    Attributes:
        ranks: that share the model.
        unit: parameters of the largest unit, in bytes.
        root: of what belongs to none.
    """

    ranks: int
    unit: int
    root: int

    def static(self, static: Static) -> Static:
        """Return this rank's share."""
        return Static(*(-(-part // self.ranks) for part in (static.parameters, static.optimizer, static.update)))

    def gradients(self, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this rank's share."""
        return -(-gradients // self.ranks)

    def workspace(self, moments: int, backward: int) -> NDArray[np.int64]:
        """Return what is gathered, and gradients before the ranks have added theirs."""
        gathered = np.full(moments, self.root + 2 * self.unit, np.int64)
        gathered[backward:] += self.root + 2 * self.unit
        return gathered


def parallel_of(text: str | None, model: nn.Module) -> Parallel:
    """Return the kind that a text names: None, "ddp", "fsdp:8" for 8 ranks, or "pipeline:4" for 4 batches in flight.

    Raises:
        FewbitError: the text names none.
    """
    if text is None:
        return Alone()
    trained = [bytes_of(p) for p in model.parameters() if p.requires_grad]
    if text == "ddp":
        return Buckets(sum(trained))
    kind, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in ("fsdp", "pipeline") or not number.isdecimal() or int(number) < 1:
        kinds = '"ddp" or "fsdp:8" with the number of ranks, or "pipeline:4" with that of microbatches in flight'
        raise FewbitError(f"parallel is {kinds}, not {shown(text)}")
    if kind == "pipeline":
        return Microbatches(int(number), max(trained, default=0)) if int(number) > 1 else Alone()
    units = [{id(p): bytes_of(p) for p in model.get_submodule(name).parameters()} for name in outermost_blocks(model)]
    in_units = {key for unit in units for key in unit}
    root = sum(bytes_of(p) for p in model.parameters() if id(p) not in in_units)
    return Shards(int(number), max((sum(unit.values()) for unit in units), default=0), root)
