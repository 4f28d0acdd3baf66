"""Results of operations on the meta device, by the forms of their arguments.

Torch runs many of its kernels for the meta device in Python, a hundred microseconds and more for a product of two
tensors, and a model of equal layers calls them with equal forms again and again. Of a trace of Llama-3-8B with adapters
they took a quarter.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.traits import tensors_among
from .storages import identity_of

_KINDS = frozenset((Tensor, nn.Parameter))
_DEPENDS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class MetaResults:
    """Calls operations, and makes the result of an equal call anew without calling them."""

    def __init__(self) -> None:
        self._forms: dict[Any, list[_Form] | None] = {}  # by call; None of what must be called each time

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        try:
            call = func, _form(args), _form(tuple(kwargs.items())) if kwargs else (), torch.get_default_dtype()
            forms = self._forms.get(call, ())
        except (_UnknownError, TypeError):  # TypeError: of what has no hash
            return func(*args, **kwargs)
        if forms:
            made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in forms]
            return made[0] if len(made) == 1 else tuple(made)
        result = func(*args, **kwargs)
        if forms == ():
            self._forms[call] = _forms_of(result, tensors_among(*args, kwargs))
        return result


class _UnknownError(Exception):
    """An argument may change a result by more than its form."""


@cache
def _makes_tensors(func: Any) -> bool:
    """Return whether an operation of torch's own returns new tensors, of forms that follow from its arguments'."""
    schema = func._schema
    of_memory = schema.is_mutable or any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and not of_memory and not _DEPENDS & {*func.tags} and bool(schema.returns)


def _form(value: Any) -> Any:
    """Return what an argument is as far as results depend on it: of a tensor, its form.

    A tensor of no dimensions has a lower rank in type promotion where a Python number made it, which cannot be seen.
    """
    if isinstance(value, Tensor):
        if type(value) not in _KINDS or not value.is_meta or not value.dim() or value.layout is not torch.strided:
            raise _UnknownError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return type(value), value  # for 1, 1.0 and True are equal


def _forms_of(result: Any, given: list[Tensor]) -> list[_Form] | None:
    """Return the forms of results that own their memory, each apart and without gaps; None of others."""
    made = [*result] if isinstance(result, tuple) else [result]
    if not given or not all(type(t) is Tensor and t.is_meta and t.layout is torch.strided for t in made):
        return None
    forms = [(t.shape, t.stride(), t.dtype) for t in made]
    owned = {identity_of(t) for t in made} - {identity_of(t) for t in given}
    if len(owned) < len(made) or any(
        t.untyped_storage().nbytes() != _bytes(form) for t, form in zip(made, forms, strict=True)
    ):
        return None
    return forms


def _bytes(form: _Form) -> int:
    size, stride, dtype = form
    reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return reach * dtype.itemsize
