"""Savers: they compress the tensors that a layer saves for its backward pass.

`QuantizerSaver(PerGroup(bits=4))` gives every layer and sample the same bits; `MixedPrecision` (runtime/allocation)
gives each layer a saver that allocates bits from a budget, by the gradients it observes. A saver of one's own derives
from `Saver`, or has its `compress` and `observe`.

Autograd has to hold the tensors of a compressed tensor directly, not inside an opaque object: only then do
checkpointing, swapping and `fewbit.memory.profile` see them. `take_apart` and `put_together` do that for any dataclass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion

from ..quantizers import Compressed, PerGroup, Quantizer
from ..tensors.graphs import cast_key, memory_key
from ..tensors.packing import packed_bytes
from ..tensors.traits import total_bytes
from .callers import is_callers

# Whether torch's compiler traces the layers' functions of autograd at all, and those in which sizes depend on values.
# Those that it does not trace end the graph.
TRACES_FUNCTIONS = TorchVersion(torch.__version__) >= "2.9"
TRACES_SIZES = TorchVersion(torch.__version__) >= "2.11"


class Saver(ABC):
    """Compresses the tensors that a `CompressedLayer` saves.

    Attributes:
        has_dynamic_sizes: whether the sizes of its codes depend on values.
        sees_held: whether it saves a tensor as it is that is in memory anyway; a user's saver is not asked.
        is_traced: whether torch's compiler traces it; else a graph ends at each layer that it serves.
    """

    has_dynamic_sizes: ClassVar[bool] = False
    sees_held: ClassVar[bool] = False
    is_traced: ClassVar[bool] = True

    @abstractmethod
    def compress(self, x: Tensor) -> Compressed:
        """Return `x` in few bits, as a dataclass of its tensors.

        Args:
            x: floating-point, at least two dimensions, the first of samples; it requires no gradient. Do not hold a
                reference to it.
        """

    @abstractmethod
    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Observe the gradient of the layer's output; called in every backward pass that uses the saved tensors.

        Args:
            gradient: dimension 0 = samples. Do not change it or hold a reference to it.
            rstd: 1/deviation that a normalization has multiplied by: (C,) by channel, or dimension 0 = samples.
        """

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x`, whose last dimension holds features, in few bits, each row by itself where that is possible."""
        return self.compress(x)

    def compress_once(self, x: Tensor, rows: bool = False) -> Compressed:
        """Return the input `x` of a layer in few bits, for all layers of this saver that get it one after another.

        Examples are query, key and value; gate and up; parallel convolutions. Each gradient stays unbiased; only the
        rounding is common to them.

        Args:
            x: the input.
            rows: whether its last dimension holds features, so that each row is a token.
        """
        return self.compress_rows(x) if rows else self.compress(x)

    def with_codes_of(self, x: Tensor, way: int) -> "Saver":
        """Return, in compiled code, the saver for `x` alone, which knows of layers before that compress it alike.

        Args:
            x: the layer's input.
            way: −1 if it is compressed as it is, else its dimension of samples, where each row is compressed by itself.
        """
        return self

    def observed_in_graph(self, compressed: Any, gradient: Tensor, rstd: Tensor | None = None) -> Any:
        """Observe the gradient in compiled code; return `compressed`, depending on it where something is learnt."""
        self.observe(gradient, rstd)
        return compressed


@dataclass(frozen=True)
class _Foreign(Saver):
    """A user's saver that does not derive from `Saver`."""

    saver: Any

    def compress(self, x: Tensor) -> Compressed:
        return self.saver.compress(x)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        self.saver.observe(gradient, rstd)

    def compress_rows(self, x: Tensor) -> Compressed:
        return getattr(self.saver, "compress_rows", self.saver.compress)(x)


def as_saver(saver: Any) -> Saver:
    """Return `saver`, with the methods of `Saver` that a user's own lacks, which cannot share what is in memory."""
    return saver if isinstance(saver, Saver) else _Foreign(saver)


class Recent:
    """The codes of the tensors compressed last, found by these tensors, without keeping their memory alive.

    Two of them, for adapters take turns: the input of all of a block's, and what one of them passes on. Casts of one
    tensor to the same dtype are one tensor here. Threads may take turns at it: each replaces the list as a whole.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, StorageWeakRef | None, Any]] = []

    def found(self, x: Tensor) -> Any:
        """Return what was noted for `x`, if it was among the last and has not changed since; else None."""
        identity, _ = _identity(x)
        entries = self._entries
        for entry in entries:
            if entry[0] == identity and (entry[1] is None or not entry[1].expired()):
                self._entries = [*(other for other in entries if other is not entry), entry]
                return entry[2]
        return None

    def note(self, x: Tensor, codes: Any) -> None:
        """Record the codes of `x`, and forget those that were used longest ago."""
        self._entries = [*self._entries[-1:], (*_identity(x), codes)]

    def forget(self) -> None:
        """Drop the record."""
        self._entries = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, ()


def _identity(x: Tensor) -> tuple[tuple[Any, ...], StorageWeakRef | None]:
    """Return what tensors of the same values have in common, and the memory with which that ends, if any."""
    cast = cast_key(x)
    if cast is not None:
        return cast, None
    return memory_key(x), StorageWeakRef(x.untyped_storage())


@dataclass(frozen=True)
class QuantizerSaver(Saver):
    """Saves through one quantizer, whatever the layer and sample.

    A tensor that would not get smaller (samples of very few elements) is saved as it is.

    Attributes:
        quantizer: such as `PerGroup(bits=4)`.

    Example:
        saver = fewbit.layers.QuantizerSaver(fewbit.quantizers.PerGroup(bits=4, group_size=128))
        layer = fewbit.layers.Linear(128, 64, saver=saver)
    """

    sees_held: ClassVar[bool] = True
    quantizer: Quantizer
    _recent: Recent = field(default_factory=Recent, init=False, repr=False, compare=False)

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` in few bits."""
        return self._smaller(x, self.quantizer.compress(x))

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x` in few bits, each row of its last dimension by itself."""
        if not isinstance(self.quantizer, PerGroup):
            return self.compress(x)
        return self._smaller(x, self.quantizer.within(x.shape[-1]).compress(last_innermost(x)))

    def _smaller(self, x: Tensor, compressed: Compressed) -> Compressed:
        if is_compiling() and not isinstance(self.quantizer, PerGroup):
            return compressed  # its size may depend on values, which are not known
        return compressed if compressed.nbytes < total_bytes([x]) else Whole(x)

    def compress_once(self, x: Tensor, rows: bool = False) -> Compressed:
        """Return `x` in few bits, with the same codes if another layer compressed the same `x` shortly before.

        A tensor that autograd already holds is saved as it is: a compressed copy would add memory.
        """
        if is_compiling():  # the compiler merges equal calls
            return super().compress_once(x, rows)
        compressed = self._recent.found(x)
        if compressed is None:
            compressed = Whole(x) if is_held(x) else super().compress_once(x, rows)
            if not isinstance(compressed, Whole):
                self._recent.note(x, compressed)
        return compressed

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Learn nothing."""
        if not is_compiling():
            self._recent.forget()


@dataclass(frozen=True)
class ExactSaver(Saver):
    """Saves tensors as they are, like torch's own layers.

    Example:
        layer = fewbit.layers.Linear(128, 64, saver=fewbit.layers.ExactSaver())
    """

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` itself."""
        return Whole(x)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Learn nothing."""


@dataclass(frozen=True, eq=False)
class Whole:
    """An uncompressed tensor."""

    tensor: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return total_bytes([self.tensor])

    def decompress(self) -> Tensor:
        """Return the tensor itself."""
        return self.tensor


@dataclass(frozen=True)
class _Place:
    """Placeholder for a tensor that was taken out."""

    index: int


def is_no_smaller(shape: Sequence[int], itemsize: int, group_size: int, bits: int) -> bool:
    """Return whether codes of a sample (`PerGroup`) take its bytes or more, which compiled code asks before there are.

    Args:
        shape: of the tensor, the first dimension of samples.
        itemsize: bytes of an element.
        group_size: G.
        bits: of a code.
    """
    elements = prod(shape[1:])
    groups = -(-elements // max(1, min(group_size, elements)))
    return packed_bytes([bits], elements) + 4 * groups + 1 >= elements * itemsize


def last_innermost(x: Tensor) -> Tensor:
    """Return `x`, copied unless its last dimension is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# Functions of torch that save their output for their own backward pass, by the names of their nodes.
_KEEP_THEIR_OUTPUT = {f"{name}Backward0" for name in ("Relu", "Sigmoid", "Tanh", "Exp", "Softmax", "LogSoftmax")}


def is_held(x: Tensor) -> bool:
    """Return whether `x` stays in memory whatever a layer saves.

    It does if it is, or is a view of, the output of a torch function that saves it for its own gradient, such as a ReLU
    that code calls by name or that was left; or if the caller of the model passed it in (callers.py). Compiled code
    knows neither.
    """
    if is_compiling():
        return False
    return is_callers(x) or any(
        t is not None and t.grad_fn is not None and t.grad_fn.name() in _KEEP_THEIR_OUTPUT for t in (x, x._base)
    )


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors in `value` to `tensors`; return `value` with placeholders in their stead.

    Dataclasses, tuples, lists and dictionaries are searched to any depth.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _mapped(value, lambda part: take_apart(part, tensors))


def tensors_in(compressed: Any) -> list[Tensor]:
    """Return the tensors of one `Compressed`, several in a tuple, or None, by steps that a compiler can trace."""
    if compressed is None:
        return []
    if isinstance(compressed, tuple):
        return [t for part in compressed for t in tensors_in(part)]
    parts = [getattr(compressed, field.name) for field in fields(compressed) if field.init]
    inner = [t for part in parts if hasattr(part, "decompress") for t in tensors_in(part)]
    return [part for part in parts if isinstance(part, Tensor)] + inner


def put_together(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the argument of `take_apart`, with `tensors` in place of the placeholders."""
    if isinstance(value, _Place):
        return tensors[value.index]
    return _mapped(value, lambda part: put_together(part, tensors))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to each of its parts; the same object if no part changes."""
    kind = type(value)
    names = _names(kind)
    if names is not None:
        old = [getattr(value, name) for name in names]
        new = [function(part) for part in old]
        changed = {name: b for name, a, b in zip(names, old, new, strict=True) if a is not b}
        return replace(cast(Any, value), **changed) if changed else value
    if kind in (tuple, list):
        new = [function(part) for part in value]
        return value if all(a is b for a, b in zip(value, new, strict=True)) else kind(new)
    if isinstance(value, dict):
        return {key: function(part) for key, part in value.items()}
    return value


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """Return the init fields of a dataclass, None for another class; cached, as every layer and pass needs them."""
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else None
