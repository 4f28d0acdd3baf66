"""Values of small whole-number tensors on devices that have none, for models that look at what they compute.

A model of `transformers` asks whether its positions are consecutive (`(mask == 0).all()`) before it makes a mask. On
the meta device and on fake tensors nobody can answer: `Tensor.item()` raises. But positions and masks are made in the
forward pass itself, by `torch.arange` and its like. So what is made there of nothing, and what follows from that
alone, is computed beside on the CPU, and the answer is the true one. What follows from the values of an input, such as
where a mixture of experts sends a token, has no answer: that is an error in one line.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ...tables import FewbitError
from ..tensors.abstract import is_abstract
from .storages import fake_modes, identity_of

LARGEST = 1 << 24  # elements: a mask of 4,096 by 4,096
_RANDOM = frozenset({torch.Tag.nondeterministic_seeded})
_UNANSWERED = (NotImplementedError, RuntimeError, DataDependentOutputException, DynamicOutputShapeException)


def values_for(model: nn.Module, inputs: object) -> Iterator[AbstractContextManager[Any]]:
    """Yield the modes in which `model` runs on `inputs`: for tensors without values that of fake ones, and answers."""
    tensors = [
        leaf for leaf in chain(model.parameters(), model.buffers(), tree_leaves(inputs)) if isinstance(leaf, Tensor)
    ]
    yield from fake_modes(tensors)
    if any(map(is_abstract, tensors)):
        yield _Answers()


class _Answers(TorchDispatchMode):
    """Keeps the values of tensors without values that are computed from nothing, and answers with them."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if not asked:
            result = _run(func, args, kwargs)
            found = self._computed(func, args, kwargs) if _is_countable(result) else None
            if isinstance(found, Tensor) and found.shape == result.shape:
                self._values[result] = found
            elif func._schema.is_mutable:
                self._forget(result)
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(is_abstract, tensors)):
            return func(*args, **kwargs)
        found = self._computed(func, args, kwargs)
        if found is None:
            try:
                return func(*args, **kwargs)
            except _UNANSWERED as error:
                raise FewbitError(
                    f"the model asks for values ({func.name().removeprefix('aten::')}), which tensors of the meta "
                    "device and fake tensors do not have: measure it on the CPU"
                ) from error
        like = next(t for t in tensors if is_abstract(t))
        return tree_map(lambda leaf: like.new_empty(leaf.shape, dtype=leaf.dtype) if _is_tensor(leaf) else leaf, found)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `func` returns of the values of its arguments, or None if one of them has none."""
        if _RANDOM & set(func.tags):
            return None
        known = True

        def real(leaf: Any) -> Any:
            nonlocal known
            if isinstance(leaf, Tensor) and is_abstract(leaf):
                value = self._values.get(leaf)
                known = known and value is not None
                return value
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        args, kwargs = tree_map(real, (args, kwargs))
        if not known:
            return None
        with _disable_current_modes():
            try:
                return func(*args, **kwargs)
            except (NotImplementedError, RuntimeError, TypeError):
                return None

    def _forget(self, written: Any) -> None:
        """Drop the values of what has been written to with others, and of all that shares its memory."""
        gone = {identity_of(leaf) for leaf in tree_leaves(written) if _is_tensor(leaf) and is_abstract(leaf)}
        for known in [known for known in self._values if identity_of(known) in gone]:
            del self._values[known]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what `func` returns; an op that no device without memory has is an error in one line.

    Of public ops RuntimeError is the user's, such as shapes that do not fit; of private ones it is that of a kernel
    that only some devices have.
    """
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        name = func.name().removeprefix("aten::")
        if isinstance(error, NotImplementedError) or name.startswith("_"):
            why = str(error).partition("\n")[0]
            raise FewbitError(f"{name} does not run without values: measure the model on the CPU ({why})") from error
        raise


def _is_countable(result: Any) -> bool:
    """Tell whether `result` is a tensor without values whose values may be asked for."""
    if not (_is_tensor(result) and is_abstract(result)):
        return False
    return not result.is_floating_point() and not result.is_complex() and result.numel() <= LARGEST


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
