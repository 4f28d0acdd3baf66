"""Converts the adapters that peft puts into a converted model.

    fewbit.convert(model, level="L2")
    model = get_peft_model(model, config)       its next step in training converts the adapters' layers, too

Adapters are layers of their own, which read the input of the frozen layer beside them. What is converted after peft and
what is converted before keep the same bytes, with codes that the adapters of one input share. Nothing is converted in
compiled code, nor once parameters are sharded: compile and shard after the first step, or convert after peft.
"""

import sys
import warnings
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...tables import FewbitError

__all__ = ["follow_adapters", "forget_adapters"]

Again = Callable[[nn.Module], object]

# Converted model -> what converts it again, and the adapters that it had when it was converted last. A copy has none.
_followed: WeakKeyDictionary[nn.Module, tuple[Again, frozenset[int]]] = WeakKeyDictionary()


def follow_adapters(model: nn.Module, again: Again) -> None:
    """Call `again` on `model` before a step in training, when peft has put adapters into it since.

    Args:
        model: a converted model.
        again: converts it; it must not refer to the model, which would then never be freed.
    """
    if isinstance(model, nn.TransformerEncoderLayer):
        return  # a hook would make torch take another path in evaluation, with other bits
    _followed[model] = again, _adapters(model)
    model.register_forward_pre_hook(_follow)


def forget_adapters(model: nn.Module) -> None:
    """Undo `follow_adapters` for `model` and all modules in it."""
    for module in model.modules():
        _followed.pop(module, None)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _follow]:
            del module._forward_pre_hooks[key]


def _follow(model: nn.Module, args: object) -> None:
    """Convert the model again if peft has put adapters into it."""
    if torch.compiler.is_compiling() or "peft" not in sys.modules:
        return
    if model not in _followed or not model.training or not torch.is_grad_enabled():
        return
    again, known = _followed[model]
    adapters = _adapters(model)
    if adapters <= known or any(hasattr(p, "full_tensor") for p in model.parameters()):
        return  # no new ones, or FSDP2 or tensor parallelism has sharded a parameter
    _followed[model] = again, adapters
    try:
        again(model)
    except FewbitError as error:
        warnings.warn(f"fewbit: adapters are not converted: {error}", stacklevel=2)


def _adapters(model: nn.Module) -> frozenset[int]:
    """Return the ids of the modules that peft has put into the model, with those in them."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return frozenset()
    kind = tuners.BaseTunerLayer
    return frozenset(id(part) for module in model.modules() if isinstance(module, kind) for part in module.modules())
