"""Layers that change their class to a subclass of it, and back: how `level` and `outliers` convert what has weights.

    recast(layer, layers.Linear, "level", saver)        layer.__class__ is layers.Linear from now on
    restore(layer)                                      and nn.Linear again

The layer stays the very object, with its parameters, buffers, hooks, mode and places, and so does whoever holds it: an
optimizer, a list that is no submodule, another module that it is shared with. What has no weights (activations) or is
made of several modules (gated MLPs) is replaced instead: placement.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..layers.base import CompressedLayer
from ..layers.huggingface import form_of_class, like
from ..layers.saver import Saver

__all__ = ["By", "form_of", "precision_of", "recast", "recast_by", "restore", "torch_class", "was_changed", "why_not"]

By = Literal["level", "outliers"]
Forms = Mapping[type, type]

# Where a layer keeps what it was, and what compressed layers have that torch's have not.
_FORMER = "_fewbit_former"
_ATTRIBUTES = ("saver", "copies")


@dataclass(frozen=True)
class _Former:
    """The class that a layer had, the name of the one it was given, and by whom."""

    was: type[nn.Module]
    now: str
    by: By


def recast(layer: nn.Module, form: type[nn.Module], by: By, saver: Saver) -> None:
    """Make `layer` a `form`, a subclass of torch's class of it, in place; what it has been made before counts no more.

    Args:
        layer: of a class in torch.nn or one that is like it, or converted.
        form: as `form_of` returns it; if it compresses, through `saver`.
        by: the method of `convert`.
        saver: what the layer saves through.
    """
    restore(layer)
    vars(layer)[_FORMER] = _Former(type(layer), _name(form), by)
    layer.__class__ = form
    if isinstance(layer, CompressedLayer):
        layer.saver = saver


def restore(layer: nn.Module) -> nn.Module:
    """Make `layer` torch's own again if it was recast and nobody has changed its class since; return it."""
    if not was_changed(layer) and (former := vars(layer).pop(_FORMER, None)):
        precision = precision_of(layer)
        if precision is not None:
            precision.release(layer)
        for name in _ATTRIBUTES:
            vars(layer).pop(name, None)
        layer.__class__ = former.was
    return layer


def recast_by(layer: nn.Module) -> By | None:
    """Return which method `layer` was recast by, or None if it was by none."""
    former = vars(layer).get(_FORMER)
    return former and former.by


def precision_of(layer: nn.Module) -> Any:
    """Return the `MixedPrecision` that a compressed layer has its bits from, or None."""
    saver = vars(layer).get("saver")
    return getattr(getattr(saver, "saver", saver), "precision", None)  # swapped or not


def was_changed(layer: nn.Module) -> bool:
    """Tell whether a recast layer has been given another class since, as parametrizations and FSDP do."""
    former = vars(layer).get(_FORMER)
    return former is not None and _name(type(layer)) != former.now


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def torch_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of `layer`; of one that was recast, the class that it had."""
    former = vars(layer).get(_FORMER)
    return type(layer) if former is None or was_changed(layer) else former.was


def form_of(layer: nn.Module, forms: Forms) -> type[nn.Module] | None:
    """Return what `layer` is recast to, the form of its class or of a class of transformers like it, or None."""
    cls = torch_class(layer)
    if cls in forms:
        return forms[cls]
    return form_of_class(cls) if like(cls) in forms else None


def why_not(layer: nn.Module, forms: Forms) -> str | None:
    """Return why `layer` cannot be recast to the form that `forms` has for its class, or None if it can."""
    if form_of(layer, forms) is None:
        if isinstance(layer, CompressedLayer) or type(layer) in forms.values():
            return "it is a compressed layer already"
        return f"{type(layer).__name__} may compute something else than torch's class that it derives from"
    return "its forward was replaced on the instance" if "forward" in vars(layer) else None
