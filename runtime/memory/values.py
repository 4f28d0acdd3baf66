"""Values of small integer tensors on the meta device and fake tensors, for models with data-dependent control flow.

A model of `transformers` checks whether its positions are consecutive (`(mask == 0).all()`) before it makes a mask. On
the meta device and on fake tensors `Tensor.item()` raises. But positions and masks are made in the forward pass itself,
by `torch.arange` and the like. So tensors made there without inputs, and tensors that depend only on those, are also
computed on the CPU, which gives the true values. Values that depend on an input, such as the routing of a mixture of
experts, are unknown: they raise an error of one line.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ...tables import FewbitError
from ..tensors.traits import is_abstract, tensors_among
from .meta_results import MetaResults
from .storages import identity_of

LARGEST = 1 << 24  # elements: a mask of 4,096 by 4,096
_RANDOM = frozenset({torch.Tag.nondeterministic_seeded})
_UNANSWERED = (NotImplementedError, RuntimeError, DataDependentOutputException, DynamicOutputShapeException)


def values_for(model: nn.Module, inputs: object) -> Iterator[AbstractContextManager[Any]]:
    """Yield the modes in which `model` runs on `inputs`; tensors without values need their fake mode and `_Answers`."""
    tensors = [
        leaf for leaf in chain(model.parameters(), model.buffers(), tree_leaves(inputs)) if isinstance(leaf, Tensor)
    ]
    yield from {id(x.fake_mode): x.fake_mode for x in tensors if isinstance(x, FakeTensor)}.values()
    if any(map(is_abstract, tensors)):
        yield _Answers()


class _Answers(TorchDispatchMode):
    """Tracks on the CPU the values of abstract tensors that depend on no input, and returns them when needed."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()
        self._results = MetaResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_among(*args, kwargs)
        args, kwargs = self._without_devices(func, tensors, args, kwargs or {})
        if not _asks_for_values(func):
            result = _run(self._results, func, args, kwargs)
            found = self._computed(func, args, kwargs) if _is_countable(result) else None
            if isinstance(found, Tensor) and found.shape == result.shape:
                self._values[result] = found
            elif func._schema.is_mutable:
                self._forget(result)
            return result
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

    def _without_devices(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with tensors of the CPU on the meta device, where others are there.

        A loss may hold targets of its own, or make them: torch.zeros(n) is on the CPU wherever the model is.
        """
        if not any(t.is_cpu and t.dim() for t in tensors) or not any(t.is_meta and t.dim() for t in tensors):
            return args, kwargs
        if func._schema.is_mutable:
            return args, kwargs

        def moved(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.dim() and leaf.device.type == "cpu"):
                return leaf
            bare = leaf.new_empty(leaf.shape, device="meta")
            if _is_countable(bare):
                self._values[bare] = leaf
            return bare

        return tree_map(moved, (args, kwargs))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of `func` on the values of its arguments, or None if one of them is unknown."""
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
        """Drop the values of tensors that were overwritten with unknown ones, and of all that share their memory."""
        gone = {identity_of(t) for t in tensors_among(written) if is_abstract(t)}
        for known in [known for known in self._values if identity_of(known) in gone]:
            del self._values[known]


def _run(results: MetaResults, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of `func` among `results`; raise an error of one line if there is no such op without values.

    A RuntimeError of a public op is the user's, such as shapes that do not match; that of a private op comes from a
    kernel that only some devices have.
    """
    try:
        return results(func, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        name = func.name().removeprefix("aten::")
        if isinstance(error, NotImplementedError) or name.startswith("_"):
            why = str(error).partition("\n")[0]
            raise FewbitError(f"{name} does not run without values: measure the model on the CPU ({why})") from error
        raise


@cache
def _asks_for_values(func: Any) -> bool:
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _is_countable(result: Any) -> bool:
    """Return whether `result` is an abstract tensor whose values may be needed: integer or bool, not too large."""
    if not (_is_tensor(result) and is_abstract(result)):
        return False
    return not result.is_floating_point() and not result.is_complex() and result.numel() <= LARGEST


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
