"""Putting one module in the place of another, and back: activations, which may be functions, and gated MLPs.

What has weights of its own stays where it is, and changes its class: recast.py.
"""

from typing import Any

from torch import nn

from .find import Activation, Found, original_of

# What others have registered on a module, and the flag that goes with it.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


def put(found: Found, new: nn.Module) -> None:
    """Let `new` stand wherever `found` stands, with its mode and hooks."""
    if isinstance(found.current, nn.Module):
        _hand_over(found.current, new)
    for parent, attribute in found.places:
        _set(parent, attribute, new)


def put_back(found: Found) -> nn.Module | None:
    """Let what `found` is in place of stand there again; return it if it is itself the model."""
    original = original_of(found.current)
    if original is None:
        return None
    if isinstance(original, nn.Module):
        _hand_over(found.current, original)
    for parent, attribute in found.places:
        _set(parent, attribute, original)
    return original if isinstance(original, nn.Module) and not found.places else None


def _hand_over(old: Any, new: nn.Module) -> None:
    """Give `new` the mode and the hooks of `old`: the same dictionaries, so that handles go on removing from them."""
    new.training = old.training
    for name in _HOOKS:
        vars(new)[name] = vars(old)[name]


def _set(parent: nn.Module, attribute: str, value: Activation) -> None:
    if attribute in parent._modules and isinstance(value, nn.Module):
        parent._modules[attribute] = value  # in its place: the order of a Sequential is that of its modules
    else:
        # What was no submodule becomes none: a TransformerDecoderLayer takes F.relu when it is copied with one.
        vars(parent)[attribute] = value
