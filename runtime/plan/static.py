"""Memory that is there throughout a step: parameters, buffers and the optimizer's state."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.names import nearest_names
from ..memory.storages import parts_of
from .parallel import Static

# Copies of the trained parameters in an optimizer's state.
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adam", "nadam", "radam", "adamax"), 2.0),
    **dict.fromkeys(("momentum", "lion", "rmsprop", "adagrad"), 1.0),
    **dict.fromkeys(("adamw8bit", "adam8bit"), 0.5),
    "sgd": 0.0,
}


def static_bytes(model: nn.Module, optimizer: str | torch.optim.Optimizer) -> Static:
    """Return the memory of parameters and optimizer: of this rank's shards where they are sharded.

    Raises:
        FewbitError: the optimizer's name is not known.
    """
    trained = [_bytes(p) for p in model.parameters() if p.requires_grad]
    held = sum({id(t): _bytes(t) for t in (*model.parameters(), *model.buffers())}.values())
    is_fused = False
    # As torch chooses: one parameter after another on the CPU, all of them at once on a GPU ("foreach").
    one_by_one = all(p.device.type == "cpu" for p in model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        group = optimizer.param_groups[0]
        is_fused = bool(group.get("fused"))
        one_by_one = one_by_one or group.get("foreach") is False
        name = "momentum" if group.get("momentum") else type(optimizer).__name__
    else:
        name = optimizer
    update = 0 if is_fused else 2 * max(trained, default=0) if one_by_one else sum(trained)
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
        tensors = [t for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, Tensor)]
        return Static(held, sum(map(_bytes, tensors)), update)
    if not isinstance(name, str) or name.lower().removesuffix("-fused") not in OPTIMIZERS:
        near = nearest_names(name, [*OPTIMIZERS]) if isinstance(name, str) else []
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise FewbitError(f"{shown(name)} is no optimizer that fewbit knows: {', '.join(OPTIMIZERS)}{hint}")
    copies = OPTIMIZERS[name.lower().removesuffix("-fused")]
    update = update if copies and not name.lower().endswith("-fused") else 0
    return Static(held, int(copies * sum(trained)), update)


def _bytes(x: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in parts_of(x))
