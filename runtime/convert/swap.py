"""Swaps the class of a layer for a subclass, and back: how `level`, `outliers` and, for experts, `glu` convert.

    swap_class(layer, layers.Linear, "level", saver)    layer.__class__ becomes layers.Linear
    restore(layer)                                      and nn.Linear again

The layer remains the same object, with its parameters, buffers, hooks, mode and places, so every reference to it stays
valid: an optimizer, a plain list, another module that shares it. Modules without weights (activations) and those made
of several modules (gated MLPs) are replaced instead.

    put(found, new)                                     new is in all places of what was found
    put_back(found)                                     and the original again
    with all_or_nothing(model): ...                     the model is as it was where the block raises or Ctrl-C ends it
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..layers.base import CompressedLayer
from ..layers.gated_experts import GatedExperts
from ..layers.huggingface import form_of_class, like
from ..layers.saver import Saver
from .find import Activation, Found, original_of

__all__ = [
    "By",
    "all_or_nothing",
    "form_of",
    "hand_over",
    "precision_of",
    "put",
    "put_back",
    "restore",
    "restore_all",
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
# The dictionaries of hooks on a module, and their flags.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


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


def restore_all(model: nn.Module, by: By) -> nn.Module:
    """Restore the classes of all layers of `model` that a method swapped; return `model`."""
    for module in model.modules():
        if swapped_by(module) == by:
            restore(module)
    return model


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


# ---- one module in the place of another ------------------------------------------------------------------------------


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


# ---- all or nothing --------------------------------------------------------------------------------------------------


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Put back the classes, attributes, submodules and hooks of all modules of `model` if the block raises.

    Parametrizations rest meanwhile: to ask for a weight of `spectral_norm` in training is a step of its iteration.
    """
    modules = [*model.modules()]
    precisions = {id(found): found for found in map(precision_of, modules) if found is not None}
    savers = [saver for precision in precisions.values() for saver in precision.savers.values()]
    before: list[tuple[Any, type, dict[str, Any], dict[str, Any]]] = []
    for each in (*modules, *precisions.values(), *savers):  # and what allocates bits among the modules
        attributes = dict(vars(each))
        before.append(
            (each, type(each), attributes, {k: v.copy() for k, v in attributes.items() if isinstance(v, dict)})
        )
    lists = [m for m in modules if isinstance(m, ParametrizationList)]
    in_training = [each for m in lists for each in m.modules() if each.training]
    try:
        for each in in_training:
            each.training = False
        yield
    except BaseException:  # KeyboardInterrupt above all
        for each, cls, attributes, dictionaries in before:
            if isinstance(each, nn.Module):
                each.__class__ = cls
            vars(each).clear()
            vars(each).update(attributes)
            for name, entries in dictionaries.items():
                attributes[name].clear()  # the same dictionary: handles that remove a hook refer to it
                attributes[name].update(entries)
        raise
    finally:
        for each in in_training:
            each.training = True
