"""What of the tensors that autograd saves must not be rounded.

A saved-tensor hook sees a tensor and not its purpose. That is inferred from two things: the tensor's history in the
graph, and the torch function running while it is saved (hooks.py).

The gradient of a linear layer is linear in the tensors it saves, so rounding adds noise without bias; that of an
activation errs by no more than the rounding. Elsewhere a small error of a saved tensor becomes a large one of the
gradient:

    poles        where it divides, or a root, norm, logarithm or inverse is taken of it          `_POLES`: exact
    exponents    log-probabilities, log-sum-exp, masks that are added to scores                  exact
    choices      where the gradient asks which element was chosen, or which of two is larger      `_CHOICES`: exact
    sides        where it asks on which side of a bound one tensor lies                          `_SIDES`: in bits
    signs        where it jumps at 0 and asks for the value besides                              `_SIGNED`: codes, a bit
    turns        sin and cos, of which only the angle counts                                     `_PERIODIC`
    weights      what is computed of parameters alone: every sample would be multiplied by one error      exact
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.activation_spec import ROWS
from ..layers.batch_norm import FEWEST

# ---- functions -------------------------------------------------------------------------------------------------------

# Losses and linear algebra: see `_rule`.
_POLES = frozenset(
    (
        *("reciprocal", "rsqrt", "sqrt", "cumprod", "prod", "std", "norm", "renorm", "dist", "cdist", "pdist", "hypot"),
        *("pairwise_distance", "cosine_similarity", "normalize", "local_response_norm", "atan2", "arctan2"),
        *("log", "log2", "log10", "log1p", "logit", "xlogy", "logaddexp", "logaddexp2", "logsumexp", "logcumsumexp"),
        *("acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh", "erfinv", "lgamma", "digamma"),
        *("polygamma", "mvlgamma", "tan", "sinc", "cosh", "sinh", "corrcoef", "copysign", "weight_norm"),
        *("inverse", "pinverse", "det", "logdet", "slogdet", "svd", "qr", "matrix_exp", "matrix_power"),
        *("cholesky", "cholesky_solve", "cholesky_inverse", "triangular_solve", "addcdiv", "rtruediv", "rdiv"),
    )
)
# The gradient goes where input and result are equal, or where one of two is larger; fmod and remainder, by whole
# quotients. With a dimension max, min and median save indices alone.
_CHOICES = frozenset(
    (
        *("amax", "amin", "aminmax", "max", "min", "median", "nanmedian", "maximum", "minimum", "fmax", "fmin"),
        *("fmod", "remainder", "mod", "rmod"),
    )
)
# The same of functions that are told how to reduce, by the position of that argument.
_REDUCTIONS: Mapping[str, int] = {"scatter_reduce": 4, "index_reduce": 4, "segment_reduce": 1}
_LINEAR_REDUCTIONS = frozenset(("sum", "mean"))
_POWERS = frozenset(("pow", "rpow", "float_power", "lp_pool1d", "lp_pool2d", "lp_pool3d"))
# Functions with one operand that must not be rounded: its position and keyword. A weight that is no parameter is
# computed of some (weight_norm, an orthogonal map).
_EXACT_OPERANDS: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv", "idiv"), (1, "other")),
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"), (1, "weight")),
    **dict.fromkeys(("conv_transpose3d", "bilinear"), (1, "weight")),
    "scaled_dot_product_attention": (3, "attn_mask"),
    # Which pixels are mixed: a step of the rounding is a pixel at 4 bits.
    **dict.fromkeys(("grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), (1, "grid")),
}
# Normalizations of one sample, by the position and keyword of what gives the size of a group.
_NORMALIZATIONS: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), (1, "normalized_shape")),
    "group_norm": (1, "num_groups"),
    "instance_norm": (0, "input"),
}
# Of fewer numbers hardly anything is left once mean and deviation are gone: of two, nothing but the rounding.
_LEAST_NORMALIZED = 8
_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
# Functions that take part in attention: an error of scores becomes one of the exponent.
OF_SCORES = frozenset(
    (
        *("scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum", "softmax", "safe_softmax"),
        "multi_head_attention_forward",
    )
)
ACTIVATIONS = frozenset(row.name for row in ROWS if row.in_torch)
# Functions that divide each row by its own norm or deviation: a row of zeros, as of padding, has to stay one.
OF_ROWS = frozenset(("pow", "square", "layer_norm", "rms_norm"))
_DROPOUTS = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))
# At 0 their gradients jump: a sign that flips costs a tenth of it at 8 bits.
SIGNED = frozenset(("prelu", "elu", "selu"))
# A multiple of 2π makes no difference to them.
PERIODIC = frozenset(("sin", "cos"))


@dataclass(frozen=True)
class Sides:
    """Where the numbers of a tensor lie, which is all that a gradient asks of them.

    Attributes:
        tests: each tells which numbers are in one of the sets; no number is in two, NaN in none.
        numbers: one in place of those in each set, then one in place of all others.
    """

    tests: tuple[Callable[[Tensor], Tensor], ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Rule:
    """How a function saves.

    Attributes:
        name: of the function, without underscores, so that `x / y` and `x.div_(y)` match; "" outside of any.
        exact: whether nothing that it saves may be rounded.
        operand: history of an operand that must not be.
        sides: of the one tensor that it saves.
    """

    name: str = ""
    exact: bool = False
    operand: Any = None
    sides: Sides | None = None

    def may_be_dropouts(self, x: Tensor) -> bool:
        """Return whether `x`, without history, may be dropout noise: 0 or one other number, in floats on the CPU."""
        return x.device.type == "cpu" and ("dropout" in self.name or self.name in _DROPOUTS)


def rule_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """Return how `func` saves when it is called with these arguments."""
    name = _plain_name(getattr(func, "__name__", ""))
    reader = _READERS.get(name)
    return _rule(name) if reader is None else reader(name, args, kwargs)


@cache
def _plain_name(name: str) -> str:
    """Return a function's name without underscores, and without the overload of an operator of torch.ops."""
    return name.partition(".")[0].strip("_")


@cache
def _rule(name: str) -> Rule:
    """Return the rule of a function whatever its arguments."""
    loss = name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
    exact = name in _POLES or name in _CHOICES or loss or name.startswith(("linalg_", "special_"))
    return Rule(name, exact, sides=_SIDES.get(name))


# ---- rules that depend on arguments ----------------------------------------------------------------------------------


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], position: int, *keywords: str, default: Any = None
) -> Any:
    if len(args) > position:
        return args[position]
    return next((kwargs[keyword] for keyword in keywords if keyword in kwargs), default)


def _by_operands(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """Return the rule of a function by its operands: their history, number and size."""
    if name in _EXACT_OPERANDS:
        operand = _argument(args, kwargs, *_EXACT_OPERANDS[name])
        has_history = isinstance(operand, Tensor) and operand.grad_fn is not None
        return Rule(name, operand=origin(operand)) if has_history else _rule(name)
    if name in _PRODUCTS:  # one with a weight is a linear layer's
        return _rule("linear" if any(isinstance(x, Tensor) and (stays(x) or of_parameters(x)) for x in args) else name)
    if name in _MULTIPLICATIONS:  # x * x is a square
        return _rule("square" if len(args) > 1 and args[0] is args[1] else name)
    if name in _POWERS:
        exponent = _argument(args, kwargs, 1, "exponent")
        return _rule("pow" if isinstance(exponent, int | float) and (exponent >= 1 or exponent == 0) else "norm")
    if name in _REDUCTIONS:
        return Rule(name, exact=_argument(args, kwargs, _REDUCTIONS[name], "reduce") not in _LINEAR_REDUCTIONS)
    x = _argument(args, kwargs, 0, "input")
    if not isinstance(x, Tensor) or x.is_nested or x.dim() < 2:
        return _rule(name)
    if name == "batch_norm":
        few = _argument(args, kwargs, 5, "training", default=False) and x.numel() < FEWEST * x.shape[1]
        return Rule(name, operand=origin(x)) if few else _rule(name)
    given = _argument(args, kwargs, *_NORMALIZATIONS[name])
    if name == "group_norm":
        size = x.shape[1:].numel() // max(1, given)
    elif name == "instance_norm":
        size = x.shape[2:].numel()
    else:
        size = torch.Size((given,) if isinstance(given, int) else given).numel()
    return Rule(name, operand=origin(x)) if size < _LEAST_NORMALIZED else _rule(name)


def _by_bounds(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """Return the rule of a function whose gradient asks on which side of a bound, an argument, its input lies."""
    if name == "hardtanh":
        low, high = _argument(args, kwargs, 1, "min_val", default=-1), _argument(args, kwargs, 2, "max_val", default=1)
        return Rule(name, sides=_between(float(low), float(high)))
    if name in ("hardshrink", "softshrink"):
        bound = float(_argument(args, kwargs, 1, "lambd", default=0.5))
        return Rule(name, sides=Sides((lambda x: (x >= -bound) & (x <= bound),), (0.0, inf)))
    if name == "threshold":
        bound = float(_argument(args, kwargs, 1, "threshold"))
        return Rule(name, sides=Sides((lambda x: x <= bound,), (bound, inf)))
    low = None if name == "clamp_max" else _argument(args, kwargs, 1, "min")
    high = _argument(args, kwargs, 1 if name == "clamp_max" else 2, "max")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return Rule(name, exact=True)  # their gradients compare three tensors
    low, high = -inf if low is None else float(low), inf if high is None else float(high)
    return Rule(name, sides=Sides((lambda x: (x >= low) & (x <= high),), (_inside(low, high), nan)))


_MULTIPLICATIONS = frozenset(("mul", "multiply", "imul"))
_READERS: Mapping[str, Callable[[str, Sequence[Any], Mapping[str, Any]], Rule]] = {
    **dict.fromkeys((*_EXACT_OPERANDS, *_PRODUCTS, *_POWERS, *_MULTIPLICATIONS, *_REDUCTIONS), _by_operands),
    **dict.fromkeys((*_NORMALIZATIONS, "batch_norm"), _by_operands),
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "threshold"), _by_bounds),
    **dict.fromkeys(("hardshrink", "softshrink"), _by_bounds),
}

# ---- sides of bounds -------------------------------------------------------------------------------------------------


def _inside(low: float, high: float) -> float:
    """Return a number between two bounds."""
    if isfinite(low) and isfinite(high):
        return (low + high) / 2
    return low + 1 + abs(low) if isfinite(low) else high - 1 - abs(high) if isfinite(high) else 0.0


def _between(low: float, high: float) -> Sides:
    """Return the sides of a gradient that flows strictly between two bounds."""
    return Sides((lambda x: (x > low) & (x < high),), (_inside(low, high), high))


# relu passes the gradient of NaN on as of positive numbers, leaky_relu and rrelu do not.
_SIDES: Mapping[str, Sides] = {
    "relu": Sides((lambda x: x <= 0,), (-1.0, 1.0)),
    **dict.fromkeys(("leaky_relu", "rrelu"), Sides((lambda x: ~(x > 0),), (-1.0, 1.0))),
    "relu6": _between(0.0, 6.0),
    "hardsigmoid": _between(-3.0, 3.0),
    **dict.fromkeys(("abs", "absolute"), Sides((lambda x: x > 0, lambda x: x < 0), (1.0, -1.0, 0.0))),
}

# ---- histories -------------------------------------------------------------------------------------------------------

# Nodes that autocast and views put between a tensor and the copy that an op saves.
_SAME_VALUES = frozenset(
    name + "Backward0"
    for name in (
        *("Alias", "Detach", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy"),
        *("Transpose", "UnsafeView", "Unsqueeze", "View"),
    )
)
# Nodes whose output is the logarithm of a probability or of a sum of exponentials, whichever op saves it.
_LOGARITHMS = frozenset(f"{name}Backward0" for name in ("LogSoftmax", "Logsumexp", "Logcumsumexp"))
_LEAF = "torch::autograd::AccumulateGrad"
# Nodes that bring data in without an edge of the graph, by an index or by as many copies as there are samples.
_OF_DATA = frozenset(
    f"{name}Backward0"
    for name in ("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take", "Expand", "Repeat")
)
# A constant operand of these is no sample: a vector that a weight is multiplied by gives a statistic of the weight, as
# in spectral normalization; a mask of its size prunes it.
_WITH_VECTORS = frozenset(f"{name}Backward0" for name in ("Mv", "Dot", "Vdot"))
_BY_ELEMENTS = frozenset(f"{name}Backward0" for name in ("Mul", "Div", "Add", "Sub", "Rsub"))
_TOKEN = "fewbit.of_parameters"
_FARTHEST = 64  # nodes: a weight is computed in fewer


def stays(x: Tensor) -> bool:
    """Return whether `x` is a parameter or leaf, or its values in another shape or dtype."""
    if any(isinstance(t, nn.Parameter) or (t.is_leaf and t.requires_grad) for t in (x, x._base) if t is not None):
        return True
    node = origin(x)
    return node is not None and node.name() == _LEAF


def origin(x: Tensor) -> Any:
    """Return the graph node that computed the values of `x`; None if `x` has no history."""
    node = x.grad_fn
    while node is not None and node.name() in _SAME_VALUES and node.next_functions:
        node = node.next_functions[0][0]
    return node


def is_logarithm(node: Any) -> bool:
    """Return whether a node's output is a logarithm that the backward pass takes the exponential of."""
    return node.name() in _LOGARITHMS


def of_parameters(x: Tensor) -> bool:
    """Return whether `x` is computed of parameters alone, as weight_norm, spectral_norm and masks of weights do."""
    return x.grad_fn is not None and _is_of_parameters(x.grad_fn, [_FARTHEST])


def _is_of_parameters(node: Any, left: list[int]) -> bool:
    """Return it of a node's output; noted at the node, so that a step goes to each node once."""
    if node.name() == _LEAF:
        return isinstance(node.variable, nn.Parameter)
    known = node.metadata.get(_TOKEN)
    if known is None:
        left[0] -= 1
        inputs = [parent for parent, _ in node.next_functions if parent is not None]
        known = left[0] > 0 and bool(inputs) and node.name() not in _OF_DATA
        known = known and all(_is_of_parameters(parent, left) for parent in inputs)
        if known and len(inputs) < len(node.next_functions) and node.name() not in _WITH_VECTORS:  # a constant operand
            known = node.name() in _BY_ELEMENTS and _numel(node) <= max(map(_numel, inputs))
        node.metadata[_TOKEN] = known
    return known


def _numel(node: Any) -> int:
    return node.variable.numel() if node.name() == _LEAF else torch.Size(node._input_metadata[0].shape).numel()
