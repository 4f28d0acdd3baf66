"""f(x) in CUDA C++, for every row of `activation_spec.py`."""

import re
from collections.abc import Sequence

import numpy as np

from .....tables.errors import FewbitError
from ...activation_spec import ROWS
from .lookup import literal

# Function -> statements that end in `return`; {0} is the first parameter.
FORMULAS: dict[str, str] = {row.name: row.cuda for row in ROWS}
# Torch's names of the parameters and their defaults, in torch's order; None where there is no default.
PARAMETERS: dict[str, tuple[tuple[str, float | None], ...]] = {row.name: row.defaults for row in ROWS if row.parameters}


def function_of(activation: str) -> tuple[str | None, tuple[float, ...]]:
    """Return the function in `FORMULAS` that a table's `activation` names, and its parameters.

    >>> function_of("softplus(beta=2)")
    ('softplus', (2.0, 20.0))

    Returns:
        (None, ()) if the activation has no formula: an expression, a callable, another family.
    """
    call = re.fullmatch(r"(\w+)(?:\((.*)\))?", activation)
    if not call or call[1] not in FORMULAS:
        return None, ()
    values = dict(PARAMETERS.get(call[1], ()))
    try:
        given = dict(pair.split("=") for pair in (call[2] or "").split(",") if pair)
        values |= {name: float(value) for name, value in given.items()}
    except ValueError:  # the activation's name is an expression such as relu(x)
        return None, ()
    parameters = tuple(value for value in values.values() if value is not None)
    return (call[1], parameters) if len(parameters) == len(PARAMETERS.get(call[1], ())) else (None, ())


def formula(function: str, parameters: Sequence[float] = ()) -> str:
    """Return the statements that compute f(x) and return it.

    Args:
        function: a name in `FORMULAS`.
        parameters: values of its parameters, in torch's order.

    Raises:
        FewbitError: there is no formula for `function`.
    """
    if function not in FORMULAS:
        raise FewbitError(f"no CUDA formula of {function!r}; there are {', '.join(FORMULAS)}")
    literals = [
        f"({text})" if text.startswith("-") else text for text in map(literal, np.asarray(parameters, np.float64))
    ]
    return FORMULAS[function].format(*literals)
