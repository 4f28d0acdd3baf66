"""Layers that `transformers` and `timm` define themselves, in place of torch's.

    Conv1D                                          torch.addmm(bias, x, weight): the weight is a Linear's transposed
    LlamaRMSNorm, T5LayerNorm, Gemma2RMSNorm, …     x / √(mean x² + ε) · w, or · (1 + w): 175 classes, written five ways
    timm's BatchNormAct2d                           batch normalization, dropout and activation in one

Neither package is imported: a class is recognized by the source of its methods (`is_written_as`), so it may be of any
package. Its compressed form is a subclass of it, made on first use, so that `isinstance` still holds.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn

from .base import CompressedLayer, apply, compresses, saver_text
from .batch_norm import BatchNorm2d
from .layer_norm import CompressedNormalization, Gradients, RootMeanSquare
from .linear import linear
from .normalization import CompressedNorm

# ---- source ----------------------------------------------------------------------------------------------------------
#
# The same operations on the same attributes compute the same function, whatever the names of the class and variables:
#
#     is_written_as(type(module), """
#     def forward(self, x):
#         return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
#     """)


@cache
def is_written_as(cls: type, source: str) -> bool:
    """Return whether the methods of `cls` that `source` defines consist of the same statements.

    Names of variables, docstrings and annotations are ignored; decorated methods never match.
    """
    functions = [part for part in ast.parse(textwrap.dedent(source)).body if isinstance(part, ast.FunctionDef)]
    return all(_source_of(cls, function.name) == _statements(function) for function in functions)


@cache
def _source_of(cls: type, name: str) -> str | None:
    """Return the statements of a method, or None if it cannot be read."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(cls, name)))).body
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return None
    return _statements(function) if isinstance(function, ast.FunctionDef) else None


def _statements(function: ast.FunctionDef) -> str | None:
    """Return the statements of a function with its variables numbered; None if it has decorators, defaults or *args."""
    given = function.args
    if function.decorator_list or given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
        return None
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    used = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    assigned = [node.id for node in used if isinstance(node.ctx, ast.Store)]
    numbers = {name: str(i) for i, name in enumerate(dict.fromkeys([a.arg for a in given.args] + assigned))}
    for node in used:
        node.id = numbers.get(node.id, node.id)  # a global, such as torch, keeps its name
    return "\n".join([str(len(given.args)), *map(ast.dump, body)])


# ---- forms -----------------------------------------------------------------------------------------------------------


class _Form(CompressedLayer):
    """Base of the compressed forms.

    Attributes:
        former: the original class, which follows `_Form` in the method resolution order.
        way: the source that it matches.
    """

    former: ClassVar[type[nn.Module]]
    way: ClassVar["_Way"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Refer to the former class in copies and pickles, because this class cannot be imported by name."""
        return _empty, (self.former,), vars(self)


class Conv1D(_Form):
    """`Conv1D` of transformers, which saves its input in few bits."""

    nf: int
    nx: int
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output: torch's `linear` is the same `addmm`."""
        return linear(x, self.weight.t(), self.bias, self.saver)

    def __repr__(self) -> str:
        return f"Conv1D(nf={self.nf}, nx={self.nx}, {saver_text(self.saver)})"


class RMSNorm(_Form, CompressedNorm):
    """An RMS normalization of transformers, which saves its normalized input in few bits."""

    weight: Tensor

    @property
    def epsilon(self) -> float:
        """ε, which is added to the mean square."""
        return getattr(self, self.way.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if not compresses(x, self.weight):
            return super().forward(x)
        norm = _AsWritten(tuple(self.weight.shape), self.epsilon, super().forward, self.way.offset)
        return apply(CompressedNormalization, x, self.weight, None, norm, self.saver, self.copies)


class BatchNormAct(_Form, BatchNorm2d):
    """timm's `BatchNormAct2d`, which saves its normalized input in few bits; its activation saves for itself."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output."""
        if not compresses(input, self.weight, self.bias):
            return self.former.forward(self, input)
        return self.act(self.drop(BatchNorm2d.forward(self, input)))


@dataclass(frozen=True)
class _AsWritten(RootMeanSquare):
    """RMS normalization with the module's own forward and our gradient.

    Attributes:
        original: the module's own forward.
        offset: added to the weight.
    """

    original: Callable[[Tensor], Tensor]
    offset: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        return self.original(x), None, self.rstd(x)

    def backward(
        self,
        grad: Tensor,
        normed: list[Tensor],
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wanted: list[bool],
    ) -> Gradients:
        assert weight is not None
        return super().backward(grad, normed, mean, rstd, weight.to(rstd.dtype) + self.offset, bias, wanted)


@dataclass(frozen=True)
class _Way:
    """The source of a supported class.

    Attributes:
        like: the class of torch.nn that saves the same tensors.
        source: its methods.
        epsilon: the attribute of a normalization that holds ε.
        offset: added to its weight.
    """

    like: type[nn.Module]
    source: str
    epsilon: str = ""
    offset: float = 0.0


_ROOT_MEAN_SQUARE = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return """
_WAYS = (
    _Way(
        nn.Linear,
        """
        def forward(self, x):
            size_out = x.size()[:-1] + (self.nf,)
            x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
            x = x.view(size_out)
            return x
        """,
    ),
    _Way(nn.RMSNorm, _ROOT_MEAN_SQUARE + "self.weight * hidden_states.to(input_dtype)", "variance_epsilon"),
    _Way(nn.RMSNorm, _ROOT_MEAN_SQUARE + "(self.weight * hidden_states).to(input_dtype)", "variance_epsilon"),
    _Way(
        nn.RMSNorm,
        _ROOT_MEAN_SQUARE + "(self.weight.to(torch.float32) * hidden_states).to(input_dtype)",
        "variance_epsilon",
    ),
    _Way(
        nn.RMSNorm,
        """
        def forward(self, hidden_states):
            variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            if self.weight.dtype in [torch.float16, torch.bfloat16]:
                hidden_states = hidden_states.to(self.weight.dtype)
            return self.weight * hidden_states
        """,
        "variance_epsilon",
    ),
    _Way(
        nn.RMSNorm,
        """
        def forward(self, x):
            output = self._norm(x.float())
            output = output * (1.0 + self.weight.float())
            return output.type_as(x)

        def _norm(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        """,
        "eps",
        1.0,
    ),
    _Way(
        nn.BatchNorm2d,
        """
        def forward(self, x):
            _assert(x.ndim == 4, f'expected 4D input (got {x.ndim}D input)')
            if self.momentum is None:
                exponential_average_factor = 0.0
            else:
                exponential_average_factor = self.momentum
            if self.training and self.track_running_stats:
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
                    if self.momentum is None:
                        exponential_average_factor = 1.0 / float(self.num_batches_tracked)
                    else:
                        exponential_average_factor = self.momentum
            if self.training:
                bn_training = True
            else:
                bn_training = (self.running_mean is None) and (self.running_var is None)
            x = F.batch_norm(
                x,
                self.running_mean if not self.training or self.track_running_stats else None,
                self.running_var if not self.training or self.track_running_stats else None,
                self.weight,
                self.bias,
                bn_training,
                exponential_average_factor,
                self.eps,
            )
            x = self.drop(x)
            x = self.act(x)
            return x
        """,
    ),
)
_FORMS: dict[type[nn.Module], type[_Form]] = {nn.Linear: Conv1D, nn.RMSNorm: RMSNorm, nn.BatchNorm2d: BatchNormAct}


def like(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class of torch.nn that saves the same tensors as `cls`; None if `cls` matches no supported source."""
    way = _way(cls)
    return way and way.like


@cache
def form_of_class(cls: type[nn.Module]) -> type[CompressedLayer]:
    """Return the compressed form of a class that is `like` one of torch.nn."""
    way = _way(cls)
    assert way is not None
    form = _FORMS[way.like]
    return type(cls.__name__, (form, cls), {"former": cls, "way": way, "__doc__": form.__doc__})


@cache
def _way(cls: type[nn.Module]) -> _Way | None:
    return next((way for way in _WAYS if is_written_as(cls, way.source)), None)


def _empty(cls: type[nn.Module]) -> CompressedLayer:
    """Return a layer of the form of `cls`, without attributes."""
    form = form_of_class(cls)
    return form.__new__(form)
