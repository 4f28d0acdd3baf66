"""The named activations and the parser of their calls: "softplus(beta=2)"."""

import ast
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

from ...tables.errors import FewbitError, shown
from ...tables.names import find_name, nearest_names
from . import piecewise, smooth
from .base import Activation, call_text

FAMILIES: dict[str, Callable[..., Activation]] = {
    family.__name__: family for family in (*piecewise.FAMILIES, *smooth.FAMILIES)
}
# One instance of each family: only those whose arguments all have defaults can be given by name alone.
EXAMPLES = tuple({"threshold": "threshold(threshold=1,value=0)"}.get(name, name) for name in FAMILIES)
ACCEPTED = (
    "write a name, or a name with keyword numbers such as softplus(beta=2), or an expression such as x*sigmoid(2*x)"
)
# Of a family in any spelling, or what is meant as one: no operators and no brackets.
_NAME = re.compile(r"(\w([\w\s.-]*\w)?)?")
# Infinite bounds: Python has no literal for them.
_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def activation_name(family: str, **arguments: float) -> str:
    """Return the canonical name of `family` called with `arguments`, omitting defaults."""
    return call_text(FAMILIES[family], **arguments)


def named_activation(text: str) -> Activation:
    """Return the family that `text` names or calls with keyword numbers.

    Raises:
        FewbitError: `text` names no family (the message lists the nearest names) or has invalid arguments.
    """
    if _NAME.fullmatch(text.strip()):
        return call_family(text.strip(), {})
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
        arguments = keyword_numbers(call)
        if arguments is not None:
            return call_family(call.func.id, arguments)
    raise FewbitError(f"cannot read activation {shown(text)}; {ACCEPTED}")


def call_family(family: str, arguments: dict[str, Any]) -> Activation:
    """Return the activation of `family`, in any spelling, with `arguments`; raises `FewbitError`."""
    name = find_name(family, FAMILIES)
    if name is None:
        near = nearest_names(family, FAMILIES)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(FAMILIES)}, or any expression in x"
        raise FewbitError(f"unknown activation {shown(family)}; {hint}")
    accepted = inspect.signature(FAMILIES[name]).parameters
    for argument in arguments:
        if argument not in accepted:
            takes = f"takes {', '.join(accepted)}" if accepted else "takes no arguments"
            raise FewbitError(f"activation {name} {takes}, not {shown(argument)}")
    missing = [p.name for p in accepted.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise FewbitError(f"activation {name} needs {' and '.join(missing)}: {name}({'=…, '.join(missing)}=…)")
    return FAMILIES[name](**arguments)


def keyword_numbers(call: ast.Call) -> dict[str, float] | None:
    """Return the keyword arguments of `call`, or None if one is not a number or is repeated."""
    arguments: dict[str, float] = {}
    for keyword in call.keywords:
        try:
            value = _INFINITE.get(ast.unparse(keyword.value)) or ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or keyword.arg is None or keyword.arg in arguments:  # **more, or a repeated keyword
            return None
        arguments[keyword.arg] = value
    return arguments
