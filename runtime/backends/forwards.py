"""The function that an op calls forward, by its name: one of torch's, an expression in x, or a user's callable.

Expressions mean the same in every process. A callable is known in the process that registered it, as long as somebody
holds its `Forward`.
"""

from weakref import WeakValueDictionary

from ...tables import FewbitError
from .expressions import expression_function
from .torch_functions import FORWARDS, Forward

CALLABLE = "callable:"  # how names of callables begin
_expressions: dict[str, Forward] = {}
_callables: WeakValueDictionary[str, Forward] = WeakValueDictionary()


def forward_of(name: str) -> Forward:
    """Return the function called `name`: one in `FORWARDS`, an expression in x, or a registered callable.

    Raises:
        FewbitError: there is none.
    """
    return FORWARDS.get(name) or custom_forward(name)


def custom_forward(name: str) -> Forward:
    """Return the function of an expression or of a callable that is known; raises `FewbitError` if there is none."""
    known = _expressions.get(name) or _callables.get(name)
    if known is not None:
        return known
    if name.startswith(CALLABLE):
        raise FewbitError(
            f"no {name.partition('#')[0]} in this process: its module is gone or elsewhere; "
            "an expression is known anywhere"
        )
    return _expressions.setdefault(name, Forward(expression_function(name)))


def register_callable(name: str, forward: Forward) -> None:
    """Let `forward_of` find `forward` by its `name`, which begins with `CALLABLE`, as long as somebody holds it."""
    _callables[name] = forward
