"""The decisions of a call that is computed again: taken the first time, kept in bits, and taken over the second time.

    decides by                  what is kept                            the second time
    integers or truth values    they themselves (topk, >, pooling)      stand in place of those of x̂
    a kink or a comparison      on which side x lies (relu, clamp)      x̂ is moved to that side, if it is not there
    which element is result     that mask (amax, median)                the result is x̂ there, and nowhere else
    integers among floats       the low byte (round, sign, floor)       the number of that byte next to x̂'s
    a step between jumps        its low byte (remainder, fake_quantize) x̂ is moved into that step
    numbers with one another    the operands (cdist in other norms)     they themselves

They are taken below autograd, where a function has one name and one order of arguments, whatever its spelling was. That
costs some 15 µs for each operation, so functions that decide nothing (`_SMOOTH`) are called directly: a name that is
missing there costs time and nothing else.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...tables import FewbitError
from ..tensors.packing import pack_mask, packed_size, unpack_mask
from ..tensors.traits import is_abstract, written_by
from .rules import (
    BY_RESULT,
    COMPARED,
    KINKS,
    SIGNED,
    STEPS,
    Again,
    Call,
    both_extremes,
    by_comparison,
    by_kinks,
    by_operands,
    by_result,
    by_sign,
    by_step,
    nearest_of_byte,
    norm,
    relu,
    sampling,
    scattered,
)
from .writes import may_write

# ---- the rule of each operator ---------------------------------------------------------------------------------------
#
# A new operator that decides is a line in one of the tables; integers and truth values need none.

Rule = Callable[[Call], Any]


@cache
def rule_of(func: Any) -> Rule | None:
    """Return what is done with an operator; None if it decides nothing."""
    space, _, full = func._schema.name.partition("::")
    if space == "fewbit" or "out" in func._overloadname:
        return None
    if space != "aten":
        return _integers
    name = full.removesuffix("_")
    for rule, names in _RULES.items():
        if name in names:
            return rule
    if name in _BY_INDEX and any(argument.name == "dim" for argument in func._schema.arguments):
        return _by_index
    if name in BY_RESULT:
        return by_result
    if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_UNDECIDED) or name.endswith("_like"):
        return None
    return _integers


# What is drawn is drawn again; pivots belong to the factors that are computed with them.
_UNDECIDED = ("linalg_", "_linalg_", "lu_", "new_", "empty", "_cudnn", "_scaled_dot_product", "_efficient", "_flash")


def _integers(call: Call) -> Any:
    """Integers and truth values that come of floating-point numbers."""
    result = call.run()
    outputs: Any = result if isinstance(result, tuple | list) else (result,)
    decided = [t for t in outputs if isinstance(t, Tensor) and not (t.is_floating_point() or t.is_complex())]
    if not decided or call.is_exact:
        return result
    if torch.Tag.dynamic_output_shape in call.function.tags:
        return _whole(call, result)
    most = None
    if call.name in ("argmax", "argmin", "bucketize", "searchsorted"):
        whole = call.name.startswith("arg") and call.argument("dim") is None
        most = max(t.numel() if whole else max(t.shape, default=1) for t in call.tensors())
    elif call.name in _POOLING:
        most = math.prod(call.x.shape[-_POOLING[call.name] :])
    for output in decided:
        _put(call, output, most)
    if call.name in _POOLING and call.is_again:
        (values, indices), dims = outputs[:2], _POOLING[call.name]
        values.copy_(call.x.flatten(-dims).gather(-1, indices.flatten(-dims)).view(indices.shape))
    return result


# Pooling that returns where its values come from, by the number of dimensions that this counts through.
_POOLING = {
    **dict.fromkeys(("max_pool2d_with_indices", "adaptive_max_pool2d", "fractional_max_pool2d"), 2),
    **dict.fromkeys(("max_pool3d_with_indices", "adaptive_max_pool3d", "fractional_max_pool3d"), 3),
}


_BY_INDEX = frozenset(("topk", "kthvalue", "mode", "sort", "max", "min", "median", "nanmedian", "cummax", "cummin"))


def _by_index(call: Call) -> Any:
    """Values and where they are along a dimension."""
    result = call.run()
    values, indices = result
    if call.is_exact:
        return result
    most = max(call.x.shape, default=1)
    _put(call, indices, most)
    if not call.is_again:
        return result
    dim = call.argument("dim")
    dim = -1 if dim is None else dim
    if call.x.dim() == 0 or indices.dim() == call.x.dim():
        values.copy_(call.x.gather(dim, indices))
    else:
        values.copy_(call.x.gather(dim, indices.unsqueeze(dim)).squeeze(dim))
    return result


def _whole(call: Call, result: Any = None) -> Any:
    """What is kept as it is: numbers of Python, and tensors whose shape depends on values."""
    result = call.run() if result is None else result
    if call.is_exact:
        return result
    outputs = result if isinstance(result, tuple | list) else (result,)
    decided = [call.decide(output) for output in outputs]
    return type(result)(decided) if isinstance(result, tuple | list) else decided[0]


def _by_byte(call: Call) -> Any:
    """Floating-point numbers that are integers, or 0 and 1: of those near x̂'s, the one of the same low byte."""
    if call.is_exact or (call.name == "div" and call.argument("rounding_mode") is None):
        return call.run()
    result = call.run()
    if not result.is_floating_point():
        return result if result.is_complex() else _put(call, result)
    decided = nearest_of_byte(call, result)
    return result.copy_(decided) if call.is_again else result


def _put(call: Call, result: Tensor, most: int | None = None) -> Tensor:
    """Put what was decided the first time into a result."""
    decided = call.decide(result, result.shape, most)
    return result.copy_(decided) if call.is_again else result


_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")  # which in place give 0 and 1
_ROUNDING = ("round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside", "floor_divide", "div", "bernoulli")
_DRAWN = ("multinomial", "poisson", "binomial", "_standard_gamma")
_UNIQUE = ("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")

_RULES: dict[Rule, frozenset[str]] = {
    relu: frozenset(("relu",)),
    by_kinks: frozenset(KINKS),
    by_comparison: frozenset(("maximum", "minimum", "fmax", "fmin")),
    _by_byte: frozenset((*_ROUNDING, *_COMPARISONS)),
    both_extremes: frozenset(("aminmax",)),
    norm: frozenset(("linalg_vector_norm",)),
    by_sign: frozenset(SIGNED),
    by_step: frozenset(STEPS),
    scattered: frozenset(("scatter_reduce", "index_reduce")),
    by_operands: frozenset(COMPARED),
    sampling: frozenset(("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")),
    _whole: frozenset(("_local_scalar_dense", "equal", "angle", "frexp", *_DRAWN, *_UNIQUE)),
}


# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Decision:
    """A recorded decision.

    Attributes:
        function: name of the operator that took it.
        part: truth values in bits, integers in the least type that holds them, or a number of Python.
        shape, dtype: of the decision; None for a number of Python.
    """

    function: str
    part: Any
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, function: str, value: Any, most: int | None = None) -> "_Decision":
        """Return the record of a value, whose integers lie between 0 and `most`, if that is given."""
        if not isinstance(value, Tensor):
            return cls(function, value)
        own = part = value.detach()
        if part.dtype == torch.bool:
            part = part if is_abstract(part) else pack_mask(part)
        elif most is not None:  # a bound of the integers, without a look at them
            narrow = ((torch.uint8, 1 << 8), (torch.int16, 1 << 15), (torch.int32, 1 << 31))
            part = part.to(next((dtype for dtype, size in narrow if most < size), part.dtype))
        part = part.clone() if part is own else part  # the call may change its own in place
        return cls(function, part, value.shape, value.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, where it has values."""
        if self.shape is None:
            return 0
        return packed_size(self.shape.numel(), 1) if self.dtype == torch.bool else self.part.nbytes

    def value(self) -> Any:
        """Return what was recorded."""
        if self.shape is None:
            return self.part
        if self.dtype == torch.bool and not is_abstract(self.part):
            return unpack_mask(self.part, self.shape.numel()).view(torch.bool).view(self.shape)
        return self.part.to(self.dtype)


class Deciding(TorchFunctionMode):
    """Records the decisions of a call's first time, or puts those in place of the second's.

    Args:
        decisions: of the first time.
        exact: memory of tensors that are the same both times, by which nothing is decided anew.
        again: the second time, None in the first.
        before_write: called in the first time with each tensor that is about to be changed in place.
    """

    def __init__(
        self,
        decisions: list[_Decision],
        exact: frozenset[int],
        again: Again | None = None,
        before_write: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.again, self.exact, self.before_write = again, exact, before_write
        self._decisions, self._left = decisions, iter(decisions)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" or (func in _SMOOTH and not may_write(func, args, kwargs)):
            return func(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_OURS):
            return func(*args, **kwargs)
        if self.again is None:
            with _Operators(self):  # kept, it would be a cycle, which keeps a block's codes until it is collected
                return func(*args, **kwargs)
        self.again.begin()
        self.again.deferred = True  # so that the operation that saves the last tensor can still replace it
        try:
            with _Operators(self):
                result = func(*args, **kwargs)
        finally:
            self.again.deferred = False
        self.again.stop()
        return result

    def decide(self, function: str, value: Any, most: int | None = None, shape: torch.Size | None = None) -> Any:
        """Return what the first call decided, which is `value`, or what it returns, if this is the first.

        Args:
            function: name of the operator.
            value: what it decides, or a function that returns it, which is not called the second time.
            most: no integer is above it.
            shape: of the decision, which is to be the same both times.
        """
        if self.again is None:
            value = value() if callable(value) else value
            self._decisions.append(_Decision.of(function, value, most))
            return value
        decision = next(self._left, None)
        if decision is None or decision.function != function or shape not in (None, decision.shape):
            raise FewbitError(
                f"fewbit.checkpoint: when a block was computed again, it called {function} another number of times or "
                "on other shapes, so it cannot be computed again: choose `blocks` without it"
            )
        return decision.value()


# Our own code decides by the codes that it saves, not by the numbers of a model.
_RUNTIME = __name__.removesuffix(".saved.decisions")
_OURS = tuple(f"{_RUNTIME}.{part}" for part in ("quantizers", "backends", "tensors", "ops", "saved"))


_DETACH = torch.ops.aten.detach.default


class _Operators(TorchDispatchMode):
    """Sees the operators that a function of torch consists of, below autograd."""

    def __init__(self, mode: Deciding) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a tensor of tensors, whose operators come here in their turn
        kwargs, mode = kwargs or {}, self._mode
        if func is _DETACH:  # as the hooks of the second time do, between what an operation saves and its beginning
            return func(*args, **kwargs)
        is_mutable = func._schema.is_mutable
        try:
            if is_mutable and mode.before_write is not None:
                for written in written_by(func, args, kwargs):
                    mode.before_write(written)
            rule = rule_of(func)
            if rule is not None:
                name = func._schema.name.partition("::")[2]
                return rule(Call(name.removesuffix("_"), func, args, kwargs, mode.again, mode.exact, mode.decide))
            if mode.again is not None and not is_mutable:
                mode.again.stop()
            return func(*args, **kwargs)
        finally:
            if mode.again is not None:
                mode.again.begin()


# Functions by which nothing is decided: what blocks call most. It is for speed alone.
# fmt: off
_NAMES = (
    "linear", "bilinear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "outer", "embedding",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "avg_pool1d", "avg_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "interpolate", "layer_norm", "rms_norm", "group_norm", "batch_norm",
    "add", "sub", "mul", "true_divide", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", "log1p",
    "sin", "cos", "tanh", "sigmoid", "erf", "addcmul", "lerp", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "__pow__", "__matmul__", "__rmatmul__",
    "gelu", "silu", "mish", "softplus", "softmax", "log_softmax", "logsumexp", "logsigmoid", "glu", "dropout",
    "dropout1d", "dropout2d", "scaled_dot_product_attention", "multi_head_attention_forward", "cross_entropy",
    "nll_loss", "mse_loss", "mean", "sum", "var", "std", "cumsum", "tril", "triu",
    "view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as",
    "contiguous", "chunk", "split", "narrow", "t", "cat", "stack", "pad", "select", "movedim", "swapaxes", "view_as",
    "reshape_as", "detach", "float", "half", "bfloat16", "double", "zeros_like", "ones_like", "empty_like", "rand_like",
    "randn_like", "new_zeros", "new_ones", "new_empty", "size", "dim", "numel", "stride", "is_contiguous", "data_ptr",
    "is_floating_point", "is_complex", "requires_grad_", "get_device", "__len__", "__hash__",
)
# fmt: on
_OWNERS: tuple[Any, ...] = (torch, Tensor, F)
_SMOOTH = frozenset(getattr(owner, name) for name in _NAMES for owner in _OWNERS if hasattr(owner, name))
