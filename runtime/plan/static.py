"""Memory that is there throughout a step, parameters, buffers and the optimizer's state, and that of its own step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.names import nearest_names
from ..memory.storages import bytes_of
from .parallel import Static


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
        near = nearest_names(optimizer, [*OPTIMIZERS]) if isinstance(optimizer, str) else []
        hint = f"; nearest: {', '.join(near)}" if near else ""
        said = shown(optimizer if isinstance(optimizer, str) else type(optimizer).__name__)
        raise FewbitError(f"{said} is no optimizer that fewbit knows: {', '.join(OPTIMIZERS)}{hint}")
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
