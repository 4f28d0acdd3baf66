"""Models that run without values, on the meta device and on fake tensors, as they would on a GPU; and storages.

values_for(model, inputs)   the modes in which a model runs on tensors without values
as_on_gpu()                 in which dropout and attention save what they save on a GPU
parts_of, identity_of       the storages of a tensor
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ...tables import FewbitError
from ..tensors.traits import is_abstract, tensors_among

LARGEST = 1 << 24  # elements: a mask of 4,096 by 4,096
_RANDOM = frozenset({torch.Tag.nondeterministic_seeded})
_DEPENDS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_UNANSWERED = (NotImplementedError, RuntimeError, DataDependentOutputException, DynamicOutputShapeException)


# ---- storages --------------------------------------------------------------------------------------------------------


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of `tensor`: itself, unless it is sparse or wraps others."""
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from parts_of(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.strided:
        yield tensor


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the numbers of `tensor`, of all its parts."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def identity_of(tensor: Tensor) -> int:
    """Return an id of the tensor's storage, equal for tensors sharing it; data addresses are 0 on the meta device."""
    return tensor.untyped_storage()._cdata


# ---- values that depend on no input ----------------------------------------------------------------------------------


def values_for(model: nn.Module, inputs: object) -> Iterator[AbstractContextManager[Any]]:
    """Yield the modes in which `model` runs on `inputs`; tensors without values need their fake mode and `_Answers`."""
    tensors = [
        leaf for leaf in chain(model.parameters(), model.buffers(), tree_leaves(inputs)) if isinstance(leaf, Tensor)
    ]
    yield from {id(x.fake_mode): x.fake_mode for x in tensors if isinstance(x, FakeTensor)}.values()
    if any(map(is_abstract, tensors)):
        yield _Answers()


class _Answers(TorchDispatchMode):
    """Tracks on the CPU the values of abstract tensors that depend on no input, and returns them when needed.

    A model of `transformers` checks whether its positions are consecutive (`(mask == 0).all()`) before it makes a mask.
    On the meta device and on fake tensors `Tensor.item()` raises. But positions and masks are made in the forward pass
    itself, by `torch.arange` and the like. So tensors made there without inputs, and tensors that depend only on those,
    are also computed on the CPU, which gives the true values. Values that depend on an input, such as the routing of a
    mixture of experts, are unknown: they raise an error of one line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()
        self._results = MetaResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_among(*args, kwargs)
        args, kwargs = self._without_devices(func, tensors, args, kwargs or {})
        if not _DEPENDS & {*func.tags}:
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

        def bare(leaf: Any) -> Any:
            return like.new_empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf

        return tree_map(bare, found)

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


def _run(results: "MetaResults", func: Any, args: Any, kwargs: Any) -> Any:
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


def _is_countable(result: Any) -> bool:
    """Return whether `result` is an abstract tensor whose values may be needed: integer or bool, not too large."""
    if not (isinstance(result, Tensor) and is_abstract(result)):
        return False
    return not result.is_floating_point() and not result.is_complex() and result.numel() <= LARGEST


# ---- results by the forms of arguments -------------------------------------------------------------------------------


_KINDS = frozenset((Tensor, nn.Parameter))
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class MetaResults:
    """Calls operations, and makes the result of an equal call anew without calling them.

    Torch runs many of its kernels for the meta device in Python, a hundred microseconds and more for a product of two
    tensors, and a model of equal layers calls them with equal forms again and again. Of a trace of Llama-3-8B with
    adapters they took a quarter.
    """

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
    owned = {identity_of(t) for t in made} - {identity_of(t) for t in given}
    for t in made:
        reach = 0 if not t.numel() else 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        if len(owned) < len(made) or t.untyped_storage().nbytes() != reach * t.dtype.itemsize:
            return None
    return [(t.shape, t.stride(), t.dtype) for t in made]


# ---- as on a GPU -----------------------------------------------------------------------------------------------------


# Whether `backward` takes where a tensor comes from in place of it, as the oldest release tried with it does.
_TAKES_EDGES = TorchVersion(torch.__version__) >= "2.9"


class as_on_gpu(TorchFunctionMode):
    """Within this block dropout and attention save for backward what their CUDA kernels save.

    For measuring on the meta device and on fake tensors: the output values are meaningless. There, and on the CPU,
    dropout is a product with a mask of the input's dtype, and attention may be decomposed into its steps. On CUDA
    dropout saves one byte an element, and `scaled_dot_product_attention` its inputs, its output and one float32 for
    each row of scores.

    Example:
        with fewbit.memory.as_on_gpu():
            print(fewbit.memory.profile(model, x))
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or its replacement with the saved tensors of a GPU."""
        if func is Tensor.backward and _TAKES_EDGES and not any((kwargs or {}).values()):
            # A mode is off within its own calls, and in this one torch's checkpoints compute attention again. The
            # function does not ask for modes where it is given no tensor, but where one comes from.
            with self:
                return torch.autograd.backward(get_gradient_edge(args[0]), torch.ones_like(args[0]))
        return _ON_GPU.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # This fused kernel runs on every device and saves what those for CUDA save. Neither it nor they make a dropout
    # mask, and they accept fewer heads of keys than of queries, so `enable_gqa` changes nothing.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


_ON_GPU: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
