"""Which tensors a call changes in place, told before it does, so that it can be computed again from what they were.

    may_write(function)     by its name or an argument: add_, +=, x[i] = y, out=, inplace=True
    Watching(before_write)  looks at the operators of such functions, whose schemas say what is written

Other functions are called directly, at some 2 µs each: only what may write is taken apart.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..tensors.traits import written_by

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_ASSIGNMENTS = frozenset(("__setitem__", *(f"__i{name}__" for name in _OPERATORS)))


def may_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch may change an argument in place; operators of libraries may."""
    name = getattr(func, "__name__", "_")
    if name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__")):
        return True
    if kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    if type(func).__module__ == "torch._ops":
        return True
    place = _place_of_inplace(func)
    return place is not None and len(args) > place and bool(args[place])


@cache
def _place_of_inplace(func: Any) -> int | None:
    """Return which argument of a function of `torch.nn.functional` is `inplace`."""
    if getattr(func, "__module__", None) != "torch.nn.functional":
        return None
    try:
        names = [*inspect.signature(func).parameters]
    except ValueError:  # of C
        return None
    return names.index("inplace") if "inplace" in names else None


class Watching(TorchFunctionMode):
    """Calls `before_write` with each tensor that is about to be changed in place."""

    def __init__(self, before_write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._before_write = before_write

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not may_write(func, args, kwargs):
            return func(*args, **kwargs)
        with _Written(self._before_write):
            return func(*args, **kwargs)


class _Written(TorchDispatchMode):
    """Watches operators below autograd, where a schema tells what is written."""

    def __init__(self, before_write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._before_write = before_write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for written in written_by(func, args, kwargs or {}):
            self._before_write(written)
        return func(*args, **(kwargs or {}))
