"""Finds the activations of a model: their names, their places, their few-bit forms, and which of them are selected."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...tables import FewbitError
from ...tables.errors import shown
from ..activations.modules import MODULES, FewBitActivation
from ..backends.forwards import forward_of
from ..layers.activation import Activation as RoundedActivation
from .formulas import Formula, agrees
from .function_attributes import HeldFunction
from .recognize import IN_TORCH, read_function, recognize, why_left

__all__ = [
    "Found",
    "Selectors",
    "activations",
    "inventory",
    "modules_of",
    "original_of",
    "parts_of_normalizations",
    "unwanted",
]

Function = Callable[..., Any]
Activation = nn.Module | Function
Selector = str | type[nn.Module] | Callable[[str, Any], bool]
Selectors = Selector | Iterable[Selector]

# Attribute in which a replacement holds the original: not a submodule, so that nothing else sees it.
ORIGINAL = "_fewbit_original"
# Attribute of a model that trains by a plan (plan/fitted.py): an object whose `undo` puts the model back.
FITTED = "_fewbit_fitted"


def original_of(activation: Activation) -> Activation | None:
    """Return the original that `activation` replaced, or None if it is not a replacement."""
    return vars(activation).get(ORIGINAL) if isinstance(activation, nn.Module) else None


@dataclass(frozen=True, eq=False)
class Found:
    """One activation of a model.

    Attributes:
        current: the module in the model, or the function in an attribute.
        original: the module or function before any conversion.
        names: its qualified names; "" is the model itself.
        places: (parent, attribute) for each occurrence; empty for the model itself.
        around: the modules that contain it.
    """

    current: Activation
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    around: list[nn.Module] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def original(self) -> Activation:
        """The module or function before any conversion."""
        original = original_of(self.current)
        return self.current if original is None else original


def activations(model: nn.Module) -> list[Found]:
    """Return the activations of `model` in the order of `named_modules()`, including those without a few-bit form.

    Submodules of an activation and TorchScript modules are not searched.
    """
    found: dict[Any, Found] = {}
    for key, activation, name, around, attribute in _walk(model, "", ()):
        entry = found.setdefault(key, Found(activation))
        entry.names.append(name)
        entry.around.extend(module for module in around if module not in entry.around)
        if around and (around[-1], attribute) not in entry.places:
            entry.places.append((around[-1], attribute))
    return list(found.values())


def modules_of(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[Found]:
    """Return the `wanted` modules of `model` in the order of `named_modules()`, except inside TorchScript modules."""
    found: dict[int, Found] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[name] = module
        if not wanted(module):
            continue
        around = [modules[name[:end]] for end in (0, *(i for i, c in enumerate(name) if c == ".")) if name]
        if any(isinstance(parent, torch.jit.ScriptModule) for parent in around):
            continue
        entry = found.setdefault(id(module), Found(module))
        entry.names.append(name)
        entry.around.extend(parent for parent in around if parent not in entry.around)
        if around and (place := (around[-1], name.rpartition(".")[2])) not in entry.places:
            entry.places.append(place)
    return list(found.values())


def parts_of_normalizations(found: Iterable[Found]) -> frozenset[int]:
    """Return the ids of the modules inside normalizations, such as timm's activations, which save for themselves."""
    norms = [each.current for each in found if isinstance(each.current, _BatchNorm)]
    return frozenset(id(part) for norm in norms for part in norm.modules() if part is not norm)


def _walk(
    module: nn.Module, name: str, around: tuple[nn.Module, ...], attribute: str = ""
) -> Iterator[tuple[Any, Activation, str, tuple[nn.Module, ...], str]]:
    is_ours = isinstance(module, FewBitActivation | RoundedActivation)
    if is_ours or recognize(module) is not None or why_left(module) is not None:
        yield id(module), module, name, around, attribute
        return
    if isinstance(module, torch.jit.ScriptModule):
        return
    prefix = f"{name}." if name else ""
    for attribute, value in vars(module).items():
        if isinstance(value, HeldFunction | RoundedActivation) or read_function(value) is not None:
            yield (id(module), attribute), value, prefix + attribute, (*around, module), attribute
    for attribute, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix + attribute, (*around, module), attribute)


@dataclass(frozen=True)
class Form:
    """The few-bit form of an activation.

    Attributes:
        activation: the compiler's name.
        make: (bits=, table=) -> the module.
        function: a differentiable function with the same bits.
    """

    activation: str
    make: Callable[..., FewBitActivation]
    function: Function


@dataclass(frozen=True)
class TorchFunction:
    """A function of torch by its name in `FORWARDS`, with its parameters."""

    name: str
    parameters: tuple[float, ...]
    inplace: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return f(x), written to x if the function is in place and gradients are disabled."""
        y = forward_of(self.name).call(x, *self.parameters)
        return x.copy_(y) if self.inplace and not torch.is_grad_enabled() else y


def form_of(original: Activation, fused: bool = False) -> Form | str:
    """Return the few-bit form of an activation, or the reason it has none.

    Args:
        original: as `Found.original`.
        fused: replace a formula of several torch calls by torch's single function, which rounds differently.
    """
    if not isinstance(original, nn.Module):
        held = read_function(original)
        if held is None:
            return "it is no function that fewbit knows"
        return Form(held.activation, partial(HeldFunction, original, held), original)
    if isinstance(original, FewBitActivation | RoundedActivation):
        return "it is a few-bit activation of your own"
    known = recognize(original)
    if known is None:
        return why_left(original) or "it is no activation"
    # Torch has a single function for it, in place if the module works in place.
    has_fused = known.name in IN_TORCH and not (known.inplace and known.name in ("Sigmoid", "Tanh"))
    if known.formula is None or (fused and has_fused):
        inplace = {"inplace": True} if known.inplace else {}
        make = partial(MODULES[known.name], **dict(known.arguments), **inplace)
        function: Function = original.forward
        if known.formula is not None:
            few = make()
            function = TorchFunction(few._function, few._parameters_of_function, few.inplace)
        return Form(known.activation, make, function)
    if not agrees(original, known):
        return "it computes other bits than the formula that fewbit knows by its name"
    return Form(known.activation, partial(Formula, known), original.forward)


# ---- include and exclude ---------------------------------------------------------------------------------------------


def unwanted(found: list[Found], include: Selectors | None, exclude: Selectors) -> dict[Found, str]:
    """Return the activations that `include` and `exclude` rule out, with reasons."""
    excluded = _selected("exclude", exclude, found)
    skipped = {activation: "it is excluded" for activation in found if activation in excluded}
    if include is not None:
        included = _selected("include", include, found)
        skipped |= {activation: "it is not included" for activation in found if activation not in included}
    return skipped


def _selected(argument: str, selectors: Selectors, found: list[Found]) -> set[Found]:
    if isinstance(selectors, str | type) or callable(selectors):
        selectors = [selectors]
    if not isinstance(selectors, Iterable):
        raise FewbitError(f"{argument} takes names, patterns, classes or a function, not {shown(selectors)}")
    selected: set[Found] = set()
    for selector in selectors:
        matches = {activation for activation in found if _matches(argument, selector, activation)}
        if not matches and isinstance(selector, str | type):
            what = f"is called {selector!r}" if isinstance(selector, str) else f"is or is in a {selector.__name__}"
            raise FewbitError(f"{argument}: no activation {what}; {inventory(found)}")
        selected |= matches
    return selected


def _matches(argument: str, selector: Any, activation: Found) -> bool:
    if isinstance(selector, str):
        return any(
            name == selector or name.startswith(f"{selector}.") or fnmatchcase(name, selector)
            for name in activation.names
        )
    if isinstance(selector, type):
        return isinstance(activation.original, selector) or any(isinstance(m, selector) for m in activation.around)
    if callable(selector):
        return any(selector(name, activation.original) for name in activation.names)
    raise FewbitError(f"{argument} takes names, patterns, classes or a function, not {shown(selector)}")


def inventory(found: list[Found]) -> str:
    """Return the names to choose from, for an error message."""
    if not found:
        return "the model has none that fewbit knows"
    names = [repr(activation.name) for activation in found]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names[:3])}{more}"
