"""Puts one module in the place of another, and back: activations, which may be functions, and gated MLPs.

Layers with weights of their own stay in place and change their class: swap.py.
"""

from typing import Any

from torch import nn

from .find import Activation, Found, original_of

# The dictionaries of hooks on a module, and their flags.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


def put(found: Found, new: nn.Module) -> None:
    """Replace `found` by `new` in all its places, with its mode and hooks."""
    if isinstance(found.current, nn.Module):
        hand_over(found.current, new)
    for parent, attribute in found.places:
        _set(parent, attribute, new)


def put_back(found: Found) -> nn.Module | None:
    """Put the original of `found` back in all its places; return it if it is itself the model."""
    original = original_of(found.current)
    if original is None:
        return None
    if isinstance(original, nn.Module):
        hand_over(found.current, original)
    for parent, attribute in found.places:
        _set(parent, attribute, original)
    return original if isinstance(original, nn.Module) and not found.places else None


def hand_over(old: Any, new: nn.Module) -> None:
    """Give `new` the mode and the hooks of `old`: the same dictionaries, so that handles still remove hooks."""
    new.training = old.training
    for name in _HOOKS:
        vars(new)[name] = vars(old)[name]


def _set(parent: nn.Module, attribute: str, value: Activation) -> None:
    if attribute in parent._modules and isinstance(value, nn.Module):
        parent._modules[attribute] = value  # in its place: the order of a Sequential is that of its modules
    else:
        # Not as a submodule: a TransformerDecoderLayer whose activation is one gets F.relu when it is copied.
        vars(parent)[attribute] = value
