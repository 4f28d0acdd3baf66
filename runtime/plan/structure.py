"""What a plan changes of a model besides its parameters: classes, children, forwards and hooks; and how it is put back.

    with structure_aside(model): ...        whatever is converted in this block is as it was at its end
    before = Structure.of(model); ...; changes = before.changes()
    for change in reversed(changes): change.undo()

A user's own conversions are part of what is put back, so a plan never undoes them. What the user changes afterwards
stays: a change is undone only where it is still in force.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from ...tables import FewbitError
from ..convert.swap import hand_over

# Of the dictionaries of a module: parameters and buffers belong to the training, and keep their identity.
_APART = frozenset(("_parameters", "_buffers"))


_RUNTIME = __name__.rsplit(".", 2)[0]
# Where what conversions put into a model is defined; the models that this package brings along are elsewhere.
_OF_CONVERSIONS = tuple(f"{_RUNTIME}.{part}" for part in ("activations", "layers", "convert", "saved"))


class _Absent:
    """Stands for an attribute that is not there; equal to itself in copies."""

    def __reduce__(self) -> str:
        return "_ABSENT"


_ABSENT = _Absent()


@dataclass(frozen=True, eq=False)
class Change:
    """One change of a module.

    Attributes:
        module: that was changed.
        owner: the name of its dictionary in which an entry changed; "" for an attribute of its own.
        key: of the entry or attribute; None for the class.
        before, after: its values.
    """

    module: nn.Module
    owner: str
    key: Any
    before: Any
    after: Any

    @property
    def is_in_force(self) -> bool:
        """Whether nothing else has changed the same since."""
        now = type(self.module) if self.key is None else self._values().get(self.key, _ABSENT)
        return now is self.after

    def undo(self) -> None:
        """Put the value back, if the change is in force."""
        if not self.is_in_force:
            return
        if self.key is None:
            self.module.__class__ = self.before
            return
        if isinstance(self.before, nn.Module) and isinstance(self.after, nn.Module):
            hand_over(self.after, self.before)
            common = self.before._modules.keys() & self.after._modules.keys()  # peft may have put adapters around them
            self.before._modules.update({name: self.after._modules[name] for name in common})
        values = self._values()
        if self.before is _ABSENT:
            del values[self.key]
        else:
            values[self.key] = self.before

    def _values(self) -> dict[Any, Any]:
        return vars(self.module)[self.owner] if self.owner else vars(self.module)


@dataclass(frozen=True)
class Structure:
    """The classes, attributes and dictionaries of a model's modules at one moment.

    Attributes:
        modules: each with its class, and the contents of its dictionaries by name; "" has its attributes.
    """

    modules: tuple[tuple[nn.Module, type, Mapping[str, dict[Any, Any]]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Structure":
        """Return that of a model as it is now."""
        return cls(tuple((module, type(module), _contents(module)) for module in model.modules()))

    def changes(self) -> list[Change]:
        """Return what has changed since."""
        found = []
        for module, kind, before in self.modules:
            now = _contents(module)
            for owner, values in before.items():
                current = now.get(owner, {})
                for key in dict.fromkeys((*values, *current)):
                    one, other = values.get(key, _ABSENT), current.get(key, _ABSENT)
                    if one is not other:
                        found.append(Change(module, owner, key, one, other))
            if type(module) is not kind:
                found.append(Change(module, "", None, kind, type(module)))
        return found


def _contents(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Return the attributes of a module, and apart from these the contents of the dictionaries that torch gave it."""
    own = {name: dict(vars(module)[name]) for name in _DICTIONARIES if name in vars(module)}
    return {"": {k: v for k, v in vars(module).items() if k not in _DICTIONARIES and k not in _APART}, **own}


_DICTIONARIES = frozenset(k for k, v in vars(nn.Module()).items() if isinstance(v, dict) and k not in _APART)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module, or a part of it, is fewbit's: the user converted it, or wrote it so."""
    return any(_is_ours(part) or any(map(_is_ours, vars(part).values())) for part in module.modules())


def unconverted(model: nn.Module) -> set[str]:
    """Return the names of the modules in a model that `is_converted` does not hold for."""
    names = {name for name, _ in model.named_modules() if name}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_ours(module) or any(map(_is_ours, vars(module).values())):
            while name:
                names.discard(name)
                name = name.rpartition(".")[0]
    return names


def _is_ours(value: Any) -> bool:
    """Return whether a module, attribute or partial function is of a class, or is a function, of this package."""
    owner = value.func if isinstance(value, partial) else value
    module = owner.__module__ if isinstance(owner, FunctionType) else type(owner).__module__
    return module.startswith(_OF_CONVERSIONS)


@contextmanager
def structure_aside(model: nn.Module) -> Iterator[None]:
    """Put back the structure of a model at the end of this block, whatever raised in it."""
    before = Structure.of(model)
    try:
        yield
    finally:
        undo_changes(before.changes())


def undo_changes(changes: Sequence[Change]) -> None:
    """Undo changes, the last first.

    Raises:
        FewbitError: a class was changed again since, as by FSDP; nothing is undone then.
    """
    for change in changes:
        if change.key is None and not change.is_in_force:
            raise FewbitError(
                f"a {change.after.__name__} became a {type(change.module).__name__} after it was converted: take off "
                "what made it one, such as a parametrization or FSDP, before revert"
            )
    for change in reversed(changes):
        change.undo()
