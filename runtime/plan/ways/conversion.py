"""Carries out choices that convert modules."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ...convert.api import convert_beside
from ..document import Choice


def convert_chosen(model: nn.Module, choices: Sequence[Choice], config: Callable[[Choice], Any]) -> None:
    """Convert the modules that choices name, those of one config together.

    Args:
        model: changed in place.
        choices: by modules.
        config: returns the config of `convert` that a choice stands for; equal choices have equal ones.
    """
    converted: dict[Any, list[str]] = {}
    for choice in choices:
        converted.setdefault(config(choice), []).append(choice.target)
    for method, names in converted.items():
        convert_beside(model, method, include=names)
