"""What each operator decides, and how the second time takes over the decision of the first (decisions.py).

A rule is a function of a call: it returns the operator's result, and records or takes over what is decided. A new
operator that decides is a line in one of the tables; integers and truth values need none.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .kinks import KINKS, SIGNED, STEPS, by_comparison, by_kinks, by_sign, by_step, nearest_of_byte, relu, sampling
from .selections import BY_RESULT, COMPARED, both_extremes, by_operands, by_result, norm, scattered

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
