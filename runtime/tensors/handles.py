"""Numbers that stand for objects in compiled graphs, whose ops take no objects.

    handle = new_handle(saver)        in the order in which objects get theirs
    by_handle(handle) is saver

A handle keeps nothing alive, and a copy of an object needs one of its own.
"""

import itertools
import weakref
from typing import Any

from ...tables import FewbitError

_objects: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def new_handle(target: Any) -> int:
    """Return a number for `target`, which can be referred to weakly."""
    handle = next(_numbers)
    _objects[handle] = target
    return handle


def by_handle(handle: int) -> Any:
    """Return the object of a handle.

    Raises:
        FewbitError: the object is gone, or there was none.
    """
    try:
        return _objects[int(handle)]
    except KeyError:
        raise FewbitError(f"a compiled graph refers to a saver that is gone (number {int(handle)})") from None
