"""Conversion of every accepted notation to an `Activation`: a name, a call, an expression or a callable."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ...tables.errors import FewbitError, shown
from .base import Activation
from .callables import callable_activation
from .expression import LONGEST, check_variable, expression_activation, expression_tree
from .kinks import from_the_left, settled, steps
from .registry import named_activation


def parse_activation(text: str, kinks: Iterable[float] = ()) -> Activation:
    """Return the activation that `text` denotes: a family, alone or called with keyword numbers, or an expression in x.

    >>> parse_activation("Softplus(beta=2.0)").name
    'softplus(beta=2)'
    >>> parse_activation("x * sigmoid(1.702*x)").name
    'x*sigmoid(1.702*x)'

    Args:
        text: a name, a call or an expression.
        kinks: points where f' jumps or bends, in addition to those known or detected.

    Raises:
        FewbitError: `text` is not a known notation; the message lists the accepted ones.
    """
    if len(text) > LONGEST and not re.fullmatch(r"[\w\s-]*", text):
        raise FewbitError(f"an activation is written in at most {LONGEST} characters, not {len(text)}")
    tree = expression_tree(text)
    if tree is None:
        check_variable(text)
    activation = named_activation(text) if tree is None else expression_activation(tree)
    return with_kinks(activation, kinks)


def as_activation(
    activation: str | Activation | Callable[..., Any],
    kinks: Iterable[float] = (),
    derivative: Callable[..., Any] | None = None,
) -> Activation:
    """Return the `activation` argument of `fewbit.solve` as an `Activation`; `solve` documents the arguments."""
    if isinstance(activation, str | Activation):
        if derivative is not None:
            raise FewbitError("derivative= goes with a callable; a named activation and an expression have their own")
        return parse_activation(activation, kinks) if isinstance(activation, str) else with_kinks(activation, kinks)
    if not callable(activation) or not (derivative is None or callable(derivative)):
        raise FewbitError(
            "an activation is a name such as gelu or softplus(beta=2), an expression such as x*sigmoid(2*x), "
            f"or a callable, not {shown(activation if derivative is None else derivative)}"
        )
    return with_kinks(callable_activation(activation, derivative), kinks)


def with_kinks(activation: Activation, kinks: Iterable[float]) -> Activation:
    """Return `activation` with `kinks` added to its own."""
    given = [_point(kink) for kink in kinks]
    if not given:
        return activation
    with np.errstate(all="ignore"):
        new = {settled(activation.derivative, kink) for kink in given} - set(activation.kinks)
    together = tuple(sorted({*activation.kinks, *new}))
    derivative = from_the_left(activation.derivative, tuple(sorted(new)))
    function = activation.function if activation.consistent else None
    together, step = steps(derivative, together, function, activation.enclosure)
    return replace(activation, kinks=together, derivative=derivative, step=step)


def _point(kink: Any) -> float:
    real = isinstance(kink, int | float | np.integer | np.floating) and not isinstance(kink, bool)
    if not real or not math.isfinite(kink):
        raise FewbitError(f"a kink is a finite number, not {shown(kink)}")
    return float(kink) + 0.0
