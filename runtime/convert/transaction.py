"""Leaves a model as it was where a conversion is broken off, by an error or by Ctrl-C."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from .swap import precision_of

__all__ = ["all_or_nothing"]


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Put back the classes, attributes, submodules and hooks of all modules of `model` if the block raises.

    Parametrizations rest meanwhile: to ask for a weight of `spectral_norm` in training is a step of its iteration.
    """
    before = [_state_of(each) for each in _changeable(model)]
    lists = [m for m in model.modules() if isinstance(m, ParametrizationList)]
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


def _changeable(model: nn.Module) -> list[Any]:
    """Return what a conversion changes: modules, and what allocates bits among them."""
    modules = [*model.modules()]
    precisions = {id(found): found for found in map(precision_of, modules) if found is not None}
    savers = [saver for precision in precisions.values() for saver in precision.savers.values()]
    return [*modules, *precisions.values(), *savers]


def _state_of(each: Any) -> tuple[Any, type, dict[str, Any], dict[str, Any]]:
    attributes = dict(vars(each))
    return each, type(each), attributes, {k: v.copy() for k, v in attributes.items() if isinstance(v, dict)}
