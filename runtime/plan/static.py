"""Memory that is there throughout a step, parameters, buffers and the optimizer's state, and that of its own step.

DistributedDataParallel holds the gradients once more, in buckets. FSDP2 over n ranks holds 1/n of parameters, gradients
and the optimizer's state. A unit, which `fully_shard` was called on, is gathered before it runs, in both passes, while
the next one is gathered already; its gradient is whole until the ranks have added theirs, in a copy. What belongs to no
unit is gathered all the time. The stage of a pipeline that has n microbatches in flight saves for n of them while it
computes one, and adds its gradients to those of the ones before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.names import nearest_hint
from ..memory.values import bytes_of
from ..saved.checkpoint import outermost_blocks


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Return whether `fully_shard` made a unit of a module, whose class it then changed."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


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


@dataclass(frozen=True)
class Updates:
    """What an optimizer of torch takes, in copies of what it updates, as torch's allocator tells.

    Attributes:
        copies: in its state.
        numbers: in its state for each parameter, of four bytes.
        own: temporary ones of the parameter that is updated, where one is after another.
        before: of the parameter before it, whose last one is still there.
        together: temporary ones of all parameters, where all are updated at once (torch's "foreach").
    """

    copies: float
    numbers: int
    own: int
    before: int
    together: int


OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adam"), Updates(2.0, 1, 2, 1, 1)),
    "nadam": Updates(2.0, 2, 2, 1, 1),
    "radam": Updates(2.0, 1, 5, 0, 1),
    "adamax": Updates(2.0, 1, 1, 0, 1),
    "rmsprop": Updates(1.0, 1, 1, 1, 1),
    "adagrad": Updates(1.0, 1, 1, 1, 2),
    "momentum": Updates(1.0, 0, 0, 0, 0),
    "lion": Updates(1.0, 0, 2, 1, 1),
    **dict.fromkeys(("adamw8bit", "adam8bit"), Updates(0.5, 0, 2, 1, 1)),
    "sgd": Updates(0.0, 0, 0, 0, 0),
}
_OTHER = Updates(0.0, 0, 3, 1, 2)  # the most of torch's others, such as Rprop and Adadelta, whose state is counted
_NUMBERS = 64  # bytes of numbers that torch wraps into tensors


def static_bytes(model: nn.Module, optimizer: str | torch.optim.Optimizer) -> Static:
    """Return the memory of parameters and optimizer: of this rank's shards where they are sharded.

    Raises:
        FewbitError: the optimizer's name is not known.
    """
    trained = [bytes_of(p) for p in model.parameters() if p.requires_grad]
    tensors = [*model.parameters(), *model.buffers()]
    held = sum({id(t): bytes_of(t) for t in (*tensors, *(s for t in tensors for s in _scales(t)))}.values())
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        name = optimizer.lower() if isinstance(optimizer, str) else ""
        updates, is_fused, one_by_one = OPTIMIZERS.get(name.removesuffix("-fused")), name.endswith("-fused"), on_cpu
    else:
        group = optimizer.param_groups[0]
        name = type(optimizer).__name__.lower()
        name = "momentum" if name == "sgd" and group.get("momentum") else name
        updates = _with_options(OPTIMIZERS.get(name, _OTHER if optimizer.state else None), group, name)
        # As torch chooses: one parameter after another on the CPU, all of them at once on a GPU.
        is_fused, one_by_one = bool(group.get("fused")), on_cpu or group.get("foreach") is False
    if updates is None:
        said = shown(optimizer if isinstance(optimizer, str) else type(optimizer).__name__)
        raise FewbitError(
            f"{said} is no optimizer that fewbit knows: {', '.join(OPTIMIZERS)}{nearest_hint(optimizer, OPTIMIZERS)}"
        )
    alone = max((updates.own * b + updates.before * a for a, b in pairwise([0, *trained])), default=0)
    update = 0 if is_fused else alone if one_by_one else updates.together * sum(trained)
    update += _NUMBERS
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
        tensors = [t for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, Tensor)]
        return Static(held, sum(map(bytes_of, tensors)), update)
    # Those of a GPU's parameters may lie in host memory: a few bytes too many.
    numbers = 4 * updates.numbers * len(trained)
    return Static(held, int(updates.copies * sum(trained)) + numbers, update)


def _scales(codes: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that bitsandbytes keeps beside a parameter of few bits, as attributes of it."""
    states = [getattr(codes, name, None) for name in ("quant_state", "SCB")]
    while states:
        state = states.pop()
        if isinstance(state, Tensor):
            yield state
        elif state is not None:
            states += [x for x in vars(state).values() if isinstance(x, Tensor | type(state))]


def _with_options(updates: Updates | None, group: dict[str, object], name: str) -> Updates | None:
    """Return what an optimizer takes with the options of its parameters: a gradient that they change is a new one."""
    if updates is None:
        return None
    kept = [group.get("amsgrad"), group.get("centered"), name == "rmsprop" and group.get("momentum")]
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay") and name != "adamw"
    more = int(decays) + int(bool(group.get("nesterov")))
    copies, together = updates.copies + sum(map(bool, kept)), max(updates.together, int(more > 0))
    return replace(updates, copies=copies, own=updates.own + more, together=together)


# ---- several processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parallel:
    """What several processes change of a step; one process without others changes nothing.

    Attributes:
        ranks: that share parameters, gradients and the optimizer's state.
        in_flight: batches whose forward pass has run and whose backward pass has not, at most.
        buckets: bytes in which the gradients are held once more.
        gathered: bytes that are there besides, throughout.
        added: bytes that are there besides in the backward pass.
    """

    ranks: int = 1
    in_flight: int = 1
    buckets: int = 0
    gathered: int = 0
    added: int = 0

    def static(self, static: Static) -> Static:
        """Return this rank's share of what one process without others has in every step."""
        return Static(*(-(-part // self.ranks) for part in (static.parameters, static.optimizer, static.update)))

    def gradients(self, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of the parameters' gradients on this rank, and of copies, at each moment."""
        if self.in_flight > 1:  # all of them at every moment: those of the microbatches before
            gradients = np.full_like(gradients, gradients.max())
        return -(-gradients // self.ranks) + self.buckets

    def workspace(self, moments: int, backward: int) -> NDArray[np.int64]:
        """Return the bytes besides at each moment, of which `backward` begins the backward pass."""
        return np.where(np.arange(moments) < backward, self.gathered, self.gathered + self.added)


def parallel_of(text: str | None, model: nn.Module) -> Parallel:
    """Return the kind that a text names: None, "ddp", "fsdp:8" for 8 ranks, or "pipeline:4" for 4 batches in flight.

    Raises:
        FewbitError: the text names none.
    """
    if text is None:
        return Parallel()
    trained = [bytes_of(p) for p in model.parameters() if p.requires_grad]
    if text == "ddp":
        return Parallel(buckets=sum(trained))
    kind, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in ("fsdp", "pipeline") or not number.isdecimal() or int(number) < 1:
        kinds = '"ddp" or "fsdp:8" with the number of ranks, or "pipeline:4" with that of microbatches in flight'
        raise FewbitError(f"parallel is {kinds}, not {shown(text)}")
    if kind == "pipeline":
        # The largest gradient is there until it is added to that of the microbatches before.
        return Parallel(in_flight=int(number), added=max(trained, default=0) if int(number) > 1 else 0)
    units = [{id(p): bytes_of(p) for p in model.get_submodule(name).parameters()} for name in outermost_blocks(model)]
    in_units = {key for unit in units for key in unit}
    root = sum(bytes_of(p) for p in model.parameters() if id(p) not in in_units)
    # What is gathered, and as much again of gradients before the ranks have added theirs.
    whole = root + 2 * max((sum(unit.values()) for unit in units), default=0)
    return Parallel(int(number), gathered=whole, added=whole)
