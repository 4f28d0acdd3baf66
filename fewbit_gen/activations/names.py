"""Canonical texts of family calls: softplus(beta=2)."""

import inspect
from collections.abc import Callable

from ...tables.names import number_text
from .base import Activation


def call_text(family: Callable[..., Activation], **arguments: float) -> str:
    """Return the canonical name of `family` called with `arguments`, omitting defaults."""
    defaults = {p.name: p.default for p in inspect.signature(family).parameters.values()}
    given = [f"{key}={number_text(value)}" for key, value in arguments.items() if value != defaults[key]]
    return f"{family.__name__}({','.join(given)})" if given else family.__name__
