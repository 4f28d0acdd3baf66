"""Swaps the class of a layer for a subclass, and back: how `level`, `outliers` and, for experts, `glu` convert.

    swap_class(layer, layers.Linear, "level", saver)    layer.__class__ becomes layers.Linear
    restore(layer)                                      and nn.Linear again

The layer remains the same object, with its parameters, buffers, hooks, mode and places, so every reference to it stays
valid: an optimizer, a plain list, another module that shares it. Modules without weights (activations) and those made
of several modules (gated MLPs) are replaced instead: placement.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..layers.base import CompressedLayer
from ..layers.gated_experts import GatedExperts
from ..layers.huggingface import form_of_class, like
from ..layers.saver import Saver

__all__ = [
    "By",
    "form_of",
    "precision_of",
    "restore",
    "swap_class",
    "swap_to_form",
    "swapped_by",
    "torch_class",
    "was_changed",
    "why_not",
]

By = Literal["level", "outliers", "glu", "normalizations", "attention", "loss"]
Forms = Mapping[type, type]

# Attribute that holds a layer's former class, and the attributes that only compressed layers and experts have.
_FORMER = "_fewbit_former"
_ATTRIBUTES = ("saver", "copies", "loss_chunk_size")
_ATTRIBUTES_OF_EXPERTS = ("plan", "form", "loops", "_table")


@dataclass(frozen=True)
class _Former:
    """The former class of a layer, the name of its new class, and the method that swapped it."""

    was: type[nn.Module]
    now: str
    by: By


def swap_class(layer: nn.Module, form: type[nn.Module], by: By, saver: Saver | None = None) -> None:
    """Change the class of `layer` to `form`, a subclass of its class; an earlier swap is undone first.

    Args:
        layer: of a class in torch.nn or one that is like it, or converted.
        form: as `form_of` returns it.
        by: the method of `convert`.
        saver: for a `CompressedLayer`, what it saves its tensors through.
    """
    restore(layer)
    vars(layer)[_FORMER] = _Former(type(layer), _name(form), by)
    layer.__class__ = form
    if isinstance(layer, CompressedLayer) and saver is not None:
        layer.saver = saver


def swap_to_form(layer: nn.Module, forms: Forms, by: By, saver: Saver) -> type[nn.Module]:
    """Change the class of `layer`, for which `why_not` returns None, to its form in `forms`, and return that."""
    form = form_of(layer, forms)
    assert form is not None
    swap_class(layer, form, by, saver)
    return form


def restore(layer: nn.Module) -> nn.Module:
    """Restore the class of `layer` if it was swapped and not changed again since; return `layer`."""
    if not was_changed(layer) and (former := vars(layer).pop(_FORMER, None)):
        precision = precision_of(layer)
        if precision is not None:
            precision.release(layer)
        for name in _ATTRIBUTES_OF_EXPERTS if isinstance(layer, GatedExperts) else _ATTRIBUTES:
            vars(layer).pop(name, None)
        layer.__class__ = former.was
    return layer


def swapped_by(layer: nn.Module) -> By | None:
    """Return the method that swapped the class of `layer`, or None if it was not swapped."""
    former = vars(layer).get(_FORMER)
    return former and former.by


def precision_of(layer: nn.Module) -> Any:
    """Return the `MixedPrecision` that sets the bits of a compressed layer, or None."""
    saver = vars(layer).get("saver")
    return getattr(getattr(saver, "saver", saver), "precision", None)  # swapped or not


def was_changed(layer: nn.Module) -> bool:
    """Return whether a swapped layer has been given another class since, as by parametrizations and FSDP."""
    former = vars(layer).get(_FORMER)
    return former is not None and _name(type(layer)) != former.now


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def torch_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of `layer`, or its former class if it was swapped."""
    former = vars(layer).get(_FORMER)
    return type(layer) if former is None or was_changed(layer) else former.was


def form_of(layer: nn.Module, forms: Forms) -> type[nn.Module] | None:
    """Return the compressed class for `layer`, for torch's class or one of transformers like it, or None."""
    cls = torch_class(layer)
    if cls in forms:
        return forms[cls]
    return form_of_class(cls) if like(cls) in forms else None


def why_not(layer: nn.Module, forms: Forms) -> str | None:
    """Return the reason that `layer` cannot be swapped to its form in `forms`, or None if it can."""
    if form_of(layer, forms) is None:
        if isinstance(layer, CompressedLayer) or type(layer) in forms.values():
            return "it is a compressed layer already"
        return f"{type(layer).__name__} may compute something else than torch's class that it derives from"
    return "its forward was replaced on the instance" if "forward" in vars(layer) else None
