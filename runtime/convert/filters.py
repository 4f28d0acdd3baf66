"""Selection of the modules that `convert` replaces: by name, pattern, class or function."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from .find import Found

Selector = str | type[nn.Module] | Callable[[str, Any], bool]
Selectors = Selector | Iterable[Selector]


def unwanted(found: list[Found], include: Selectors | None, exclude: Selectors) -> dict[Found, str]:
    """Return the activations that `include` and `exclude` rule out, with reasons."""
    excluded = _selected("exclude", exclude, found)
    skipped = {activation: "it is excluded" for activation in found if activation in excluded}
    if include is not None:
        included = _selected("include", include, found)
        skipped |= {activation: "it is not included" for activation in found if activation not in included}
    return skipped


def _selected(argument: str, selectors: Selectors, found: list[Found]) -> set[Found]:
    listed = [selectors] if isinstance(selectors, str | type) or callable(selectors) else _listed(argument, selectors)
    selected: set[Found] = set()
    for selector in listed:
        matches = {activation for activation in found if _matches(argument, selector, activation)}
        if not matches and isinstance(selector, str | type):
            what = f"is called {selector!r}" if isinstance(selector, str) else f"is or is in a {selector.__name__}"
            raise FewbitError(f"{argument}: no activation {what}; {inventory(found)}")
        selected |= matches
    return selected


def _listed(argument: str, selectors: Any) -> list[Selector]:
    if isinstance(selectors, Iterable):
        return list(selectors)
    raise FewbitError(f"{argument} takes names, patterns, classes or a function, not {shown(selectors)}")


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
