"""Logits that are computed when something reads them: a cross-entropy of them goes over chunks of tokens instead.

    ChunkedHead(64, 1000)(hidden)         a tensor like any other, without memory: hidden states and the head
    F.cross_entropy(logits, labels)       `chunked_cross_entropy`, whoever calls it
    logits.argmax(-1)                     any other function computes the logits, bit for bit those of the linear layer

Between head and loss code casts, scales, caps and reshapes logits (`_HANDLERS`); that is noted and done in the chunks.
So a model keeps its forward pass, whatever it is: where its loss is another, it trains as before. Where no gradient is
recorded the head is torch's, and so it is in compiled code but by the backend fewbit (compile/chunked_loss.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ...tables import FewbitError
from ..tensors.traits import is_autocast, without_autocast
from .base import check_first_derivative
from .chunked_loss import loss_of
from .loss_over_chunks import AS_IT_IS, Head, LossOptions, Squash, product_dtype

__all__ = ["ChunkedHead", "DeferredLogits"]


class ChunkedHead(nn.Linear):
    """`torch.nn.Linear` whose output, as logits of a cross-entropy, is computed over chunks of tokens.

    (*, in_features) to (*, out_features), in float16, bfloat16, float32 or float64. While gradients are recorded the
    output holds no memory until something other than `torch.nn.functional.cross_entropy` reads it; then it is torch's,
    bit for bit. See `fewbit.layers.chunked_cross_entropy` for the loss and its errors.

    Args:
        args, kwargs: those of `torch.nn.Linear`.
        chunk_size: tokens of a chunk, as for `chunked_cross_entropy`.

    Raises:
        FewbitError: later, if logits are read after the weight has changed, as by ``optimizer.step()``.

    Example:
        head = fewbit.layers.ChunkedHead(64, 1000)
        logits = head(torch.randn(2, 32, 64))
        torch.nn.functional.cross_entropy(logits.view(-1, 1000), torch.randint(1000, (64,))).backward()
    """

    loss_chunk_size: int | None = None

    def __init__(self, *args: Any, chunk_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_chunk_size = LossOptions(chunk_size=chunk_size).chunk_size  # which checks it

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output, computed when it is read."""
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled() or type(self) is not ChunkedHead:
                return super().forward(input)
            return linear_in_graph(input, self.weight, self.bias, self.loss_chunk_size)
        tensors = (input, self.weight, self.bias)
        # Not where a wrapper, as FSDP around the head alone, changes the class and frees the weight after this call, as
        # DeepSpeed does, nor for tensors that are no plain memory.
        if (
            torch.is_grad_enabled()
            and type(self) is ChunkedHead
            and type(input) in _PLAIN
            and type(self.weight) in _PLAIN
            and not hasattr(self.weight, "ds_id")
            and not is_functorch_wrapped_tensor(input)
            and not input.is_inference()
            and input.is_floating_point()
            and input.layout == torch.strided
            and input.dim() > 0
            and any(t is not None and t.requires_grad for t in tensors)
        ):
            return deferred(tensors, product_dtype(input), self.loss_chunk_size)
        return super().forward(input)


_PLAIN = (Tensor, nn.Parameter, FakeTensor)


@torch.compiler.allow_in_graph
def linear_in_graph(input: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None) -> Tensor:
    """Return the logits: the call that Dynamo leaves in its graph, for compile/chunked_loss.py to find."""
    return F.linear(input, weight, bias)


def deferred(tensors: tuple[Tensor, Tensor, Tensor | None], dtype: torch.dtype, chunk_size: int | None) -> Tensor:
    """Return logits without memory.

    Args:
        tensors: hidden states, weight and bias of a head.
        dtype: in which it multiplies.
        chunk_size: as for `chunked_cross_entropy`.
    """
    versions = tuple(None if t is None else t._version for t in tensors)
    return _deferred(Source((Head(*tensors, dtype),), partial(_linear, dtype), tensors, versions, dtype, chunk_size))


def _linear(dtype: torch.dtype, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@dataclass(frozen=True, eq=False)
class Source:
    """What deferred logits are.

    Attributes:
        heads: whose sum they are, each with hidden states in the shape that the logits have now.
        compute: computes them from `tensors`, bit for bit as the code that asked for them would have.
        tensors: hidden states, weight and bias of each head, as the heads were called.
        versions: of these, at that time.
        dtype: of the logits.
        chunk_size: as for `chunked_cross_entropy`.
        squash: what is done to them in the chunks.
    """

    heads: tuple[Head, ...]
    compute: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]
    versions: tuple[int | None, ...]
    dtype: torch.dtype
    chunk_size: int | None
    squash: Squash = AS_IT_IS

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        return (*self.heads[0].hidden.shape[:-1], self.heads[0].weight.shape[0])

    def check(self) -> None:
        """Raise FewbitError if the logits would be others by now."""
        if any(t is not None and t._version != v for t, v in zip(self.tensors, self.versions, strict=True)):
            raise FewbitError(
                "logits of a chunked loss are computed when they are read, and the head's weight or input has changed "
                "since: read them before optimizer.step(), or fewbit.revert the model"
            )

    def then(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **changes: Any) -> "Source":
        """Return the source of ``func(logits, *args, **kwargs)``."""
        before = self.compute
        return replace(self, compute=lambda *tensors: func(before(*tensors), *args, **kwargs), **changes)

    def of_hidden(self, change: Callable[[Tensor], Tensor]) -> tuple[Head, ...]:
        """Return the heads with changed hidden states."""
        return tuple(replace(head, hidden=change(head.hidden)) for head in self.heads)


def _deferred(source: Source) -> "DeferredLogits":
    return _Defer.apply(source, *source.tensors)


class _Defer(torch.autograd.Function):
    """Hidden states, weights, biases -> logits without memory: what uses them in unforeseen ways gets its gradient."""

    @staticmethod
    def forward(ctx: Any, source: Source, *tensors: Tensor | None) -> "DeferredLogits":
        """Return the logits."""
        ctx.source = source
        ctx.save_for_backward(*tensors)
        return DeferredLogits.of(source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the steps that were deferred."""
        check_first_derivative()
        wanted = ctx.needs_input_grad[1:]
        saved = [None if t is None else t.detach() for t in ctx.saved_tensors]
        leaves = [t.requires_grad_() for t, want in zip(saved, wanted, strict=True) if t is not None and want]
        with torch.enable_grad(), without_autocast(grads[0]):
            found = iter(torch.autograd.grad(ctx.source.compute(*saved), leaves, grads[0]))
        return None, *(next(found) if want else None for want in wanted)


class DeferredLogits(Tensor):
    """Logits of a `ChunkedHead`, without memory until they are read."""

    _source: Source
    _value: Tensor | None

    @classmethod
    def of(cls, source: Source) -> "DeferredLogits":
        """Return the logits of `source`."""
        wrap: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        device = source.heads[0].hidden.device
        logits = wrap(cls, source.shape, dtype=source.dtype, device=device, storage_size=0)
        logits._source, logits._value = source, None
        return logits

    def value(self) -> Tensor:
        """Compute the logits; return the same tensor from then on."""
        if self._value is None:
            self._source.check()
            with torch.no_grad(), without_autocast(self):
                self._value = self._source.compute(*self._source.tensors)
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is done to the logits, or compute them."""
        kwargs = kwargs or {}
        handle = _HANDLERS.get(func)
        if handle is not None and args and not torch.compiler.is_compiling():
            found = [a for a in args if isinstance(a, DeferredLogits)]
            # Changed in place, they are no longer what their source says.
            if found and all(x._version == 0 and not x.retains_grad for x in found):
                result = handle(func, args, kwargs)
                if result is not NotImplemented:
                    return result
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_VALUES:
                args = tree_map_only(DeferredLogits, torch.ops.aten.alias, args)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the logits."""
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.value, (args, kwargs or {}))
        return func(*args, **kwargs)


# Those that read memory, or copy the object.
_OF_VALUES = frozenset(
    (
        *(Tensor.__repr__, Tensor.__format__, Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.tolist, Tensor.numpy),
        *(Tensor.__array__, Tensor.data_ptr, Tensor.storage, Tensor.__dlpack__),
    )
)

# ---- what is noted ---------------------------------------------------------------------------------------------------

_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The cross-entropy of whole rows of logits."""
    if not isinstance(input, DeferredLogits) or not isinstance(target, Tensor) or input.dim() > 2:
        return NotImplemented
    if input.is_meta and target.is_cpu:
        target = target.to("meta")  # those that a loss holds, of a step that is traced without values
    if target.dtype != torch.int64 or target.shape != input.shape[:-1] or target.device != input.device:
        return NotImplemented
    if reduction not in ("mean", "sum") or any(x is not None for x in (weight, size_average, reduce)):
        return NotImplemented
    source = input._source
    source.check()
    options = LossOptions(ignore_index, reduction, label_smoothing, 0.0, source.squash, source.chunk_size)
    loss = loss_of(source.heads, target, options)
    return loss if is_autocast(input) else loss.to(input.dtype)  # where it is on, torch's loss is float32 too


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another shape of the tokens, whole rows of logits."""
    x, *rest = args
    if any(isinstance(a, torch.dtype | Tensor) for a in (*rest, *kwargs.values())) or x._value is not None:
        return NotImplemented
    shape = func(torch.empty(x.shape, device="meta"), *rest, **kwargs).shape
    if not shape or shape[-1] != x.shape[-1]:
        return NotImplemented
    heads = x._source.of_hidden(lambda hidden: hidden.reshape(*shape[:-1], hidden.shape[-1]))
    return _deferred(x._source.then(func, tuple(rest), kwargs, heads=heads))


def keeps_rows(index: tuple[Any, ...], dims: int) -> bool:
    """Return whether an index into logits of so many dimensions takes whole rows of them."""
    taken = sum(
        part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else part is not ... for part in index
    )
    reaches_last = taken >= dims or (any(part is ... for part in index) and index[-1] is not ...)
    whole = isinstance(index[-1], slice) and index[-1] == slice(None)
    return not any(isinstance(part, bool) for part in index) and (whole or not reaches_last)


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Some of the tokens, whole rows of logits."""
    x, index = args
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is ... or isinstance(part, int | slice | Tensor) for part in parts) or x._value is not None:
        return NotImplemented
    if not keeps_rows(parts, x.dim()):
        return NotImplemented
    heads = x._source.of_hidden(lambda hidden: hidden[index])
    return _deferred(x._source.then(func, (index,), {}, heads=heads))


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another dtype, as float32 for the loss; sums over logits are in float32 at least in any case."""
    x, *rest = args
    given = torch.float32 if func is Tensor.float else rest[0] if len(rest) == 1 else kwargs.get("dtype")
    if len(rest) + len(kwargs) > 1 or x._value is not None:
        return NotImplemented
    if given == x.dtype or (isinstance(given, torch.device | str) and torch.device(given) == x.device):
        return x
    summed = given in SUMMED_IN_FLOAT32 and x.dtype in SUMMED_IN_FLOAT32
    return _deferred(x._source.then(func, tuple(rest), kwargs, dtype=given)) if summed else NotImplemented


def _scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product with a number, or a quotient."""
    x, factor = args if isinstance(args[0], DeferredLogits) else args[::-1]
    is_quotient = func in _QUOTIENTS
    if kwargs or not isinstance(factor, Real) or isinstance(factor, bool) or x._value is not None:
        return NotImplemented
    by = 1 / float(factor) if is_quotient and factor else float(factor)
    if is_quotient and not factor:
        return NotImplemented
    return _deferred(x._source.then(func, (factor,), {}, squash=x._source.squash.times(by)))


def _tanh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cap of Gemma 2."""
    (x,) = args
    if x._source.squash.tanh or x._value is not None or kwargs:
        return NotImplemented
    return _deferred(x._source.then(func, (), {}, squash=replace(x._source.squash, tanh=True)))


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum with logits of another head, as that of an adapter, or with a constant for each word, as BART's."""
    x, other = args if isinstance(args[0], DeferredLogits) else args[::-1]
    if kwargs or x._source.squash.tanh or x._value is not None:
        return NotImplemented
    if isinstance(other, DeferredLogits):
        a, b = x._source, other._source
        if b.squash.tanh or other._value is not None or a.shape != b.shape or x is other:
            return NotImplemented
        heads = tuple(replace(h, factor=h.factor * source.squash.before) for source in (a, b) for h in source.heads)
        of_a = len(a.tensors)

        def compute(*tensors: Tensor | None) -> Tensor:
            return func(a.compute(*tensors[:of_a]), b.compute(*tensors[of_a:]))

        dtype = torch.promote_types(a.dtype, b.dtype)
        sizes = [size for size in (a.chunk_size, b.chunk_size) if size]
        tensors, versions = (*a.tensors, *b.tensors), (*a.versions, *b.versions)
        return _deferred(Source(heads, compute, tensors, versions, dtype, min(sizes, default=None)))
    is_bias = isinstance(other, Tensor) and other.shape[-1:] == x.shape[-1:] and other.numel() == x.shape[-1]
    if not is_bias or other.requires_grad or other.dtype != x.dtype or x._source.squash != AS_IT_IS:
        return NotImplemented
    first, *more = x._source.heads
    bias = other.reshape(-1) if first.bias is None else first.bias + other.reshape(-1)
    return _deferred(x._source.then(func, (other,), {}, heads=(replace(first, bias=bias), *more)))


SUMMED_IN_FLOAT32 = (torch.float16, torch.bfloat16, torch.float32)
_QUOTIENTS = frozenset((Tensor.__truediv__, Tensor.div, Tensor.true_divide, torch.div, torch.true_divide))
_RESHAPES = (
    *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.squeeze, Tensor.unsqueeze),
    *(torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze),
)
_HANDLERS: dict[Any, _Handler] = {
    F.cross_entropy: lambda _, args, kwargs: _cross_entropy(*args, **kwargs),
    **dict.fromkeys(_RESHAPES, _reshape),
    Tensor.__getitem__: _index,
    **dict.fromkeys((Tensor.float, Tensor.to), _cast),
    # Contiguous memory, which they have.
    Tensor.contiguous: lambda _, args, kwargs: args[0] if len(args) == 1 and not kwargs else NotImplemented,
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, *_QUOTIENTS), _scale),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _add),
}
