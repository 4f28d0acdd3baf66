"""The base of all compressed layers.

A compressed layer *is* torch's layer: a subclass with torch's arguments, parameters, buffers and state_dict. Only the
tensors that its backward pass needs go through `saver`. The forward pass calls torch's own ops, so the outputs are
torch's bit for bit; the backward pass calls torch's own ops on the decompressed input. As E[decompress(compress(x))] =
x, a gradient that is linear in x is unbiased (ActNN, Theorem 1). The input gradients of normalizations and softmax are
not linear, and unbiased only from two copies, nor are those of attention: normalization.py, softmax.py and attention.py
state the bias.

If there is nothing to compress (gradients disabled, frozen weights, integers), the layer runs torch's code unchanged.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import disable, is_compiling

from ...tables import FewbitError
from ...tables.errors import shown
from ..quantizers import PerGroup
from ..tensors.traits import DTYPES, is_dense
from .saver import (
    TRACES_FUNCTIONS,
    TRACES_SIZES,
    QuantizerSaver,
    Saver,
    as_saver,
    put_together,
    take_apart,
    tensors_in,
)

DEFAULT_LAYER_BITS = 4  # as ActNN's L1 and L2


class CompressedLayer(nn.Module):
    """Mixin, before a class of torch.nn, that saves tensors through `saver`.

    Args:
        args, kwargs: torch's own.
        bits: of `PerGroup`, 1 to 8 for each element; 0.125 more for the groups of 256 elements, and up
            to 0.5 where those do not fit into a token's features (`PerGroup.within`).
        saver: a `Saver` to use instead of `PerGroup(bits)`.

    Attributes:
        saver: may be changed at any time.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.
    """

    saver: Saver

    def __init__(self, *args: Any, bits: int = DEFAULT_LAYER_BITS, saver: Saver | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if saver is None:
            saver = QuantizerSaver(PerGroup(bits=bits))
        elif isinstance(saver, type) or not callable(getattr(saver, "compress", None)) or not hasattr(saver, "observe"):
            raise FewbitError(
                f"saver has compress(x) and observe(gradient, rstd), as QuantizerSaver(PerGroup()); {shown(saver)}"
            )
        self.saver = saver

    def extra_repr(self) -> str:
        """Return torch's own arguments and the saver."""
        return ", ".join(filter(None, (super().extra_repr(), saver_text(self.saver))))


def saver_text(saver: Saver) -> str:
    """Return the text of `saver` in a layer's repr."""
    if isinstance(saver, QuantizerSaver) and isinstance(saver.quantizer, PerGroup):
        return f"bits={saver.quantizer.bits}"
    return f"saver={saver}" if type(saver).__repr__ is not object.__repr__ else f"saver={type(saver).__name__}"


def compresses(x: object, *parameters: Tensor | None) -> bool:
    """Return whether a layer with these inputs records a gradient and saves floating-point numbers that fit a saver."""
    if not torch.is_grad_enabled() or not isinstance(x, Tensor):
        return False
    if x.dtype not in DTYPES or not is_dense(x) or x.numel() == 0:
        return False
    return any(t is not None and t.requires_grad for t in (x, *parameters))


def batched(x: Tensor, dimensions: int) -> Tensor:
    """Return `x`, with a batch dimension of 1 added if it has fewer than `dimensions` dimensions."""
    return x if x.dim() >= dimensions else x.unsqueeze(0)


# ---- for the autograd functions --------------------------------------------------------------------------------------


class CompressedFunction(Function):
    """Base of the layers' functions, to be called through `apply`.

    Attributes:
        eager: the same function with a `jvp` that refuses forward mode (torch's compiler traces none with `jvp`), and
            with results that are no views (`owned`).
        apply_listing: applies the same function, which returns the parts of what it keeps after its results: torch's
            compiler takes sizes that depend on values from results alone.
    """

    eager: ClassVar[type[Function]]
    apply_listing: ClassVar[Callable[..., tuple[Tensor, ...]]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "eager" in vars(cls):
            return
        of_class = {"eager": None, "__module__": cls.__module__, "__doc__": cls.__doc__}
        run, run_backward = cls.forward, cls.backward

        def forward(ctx: Any, *arguments: Any) -> Any:
            y = run(ctx, *arguments)
            if isinstance(y, tuple):
                return tuple(part if any(part is a for a in arguments) else owned(part) for part in y)
            return y if any(y is a for a in arguments) else owned(y)  # one that was changed in place stays itself

        eager = {"forward": staticmethod(forward), "jvp": staticmethod(refuse)}
        cls.eager = type(cls)(cls.__name__, (cls,), {**of_class, **eager})

        def list_forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            y = run(ctx, *arguments)
            results = y if isinstance(y, tuple) else (y,)
            parts = tensors_in(ctx.compressed)
            ctx.mark_non_differentiable(*parts)
            ctx.results = len(results)
            return *results, *parts

        def list_backward(ctx: Any, *gradients: Tensor) -> Any:
            return run_backward(ctx, *gradients[: ctx.results])

        lists = {"forward": staticmethod(list_forward), "backward": staticmethod(list_backward)}
        listing: Any = type(cls)(cls.__name__, (cls,), {**of_class, **lists})
        cls.apply_listing = staticmethod(lambda *arguments: listing.apply(*arguments))


def owned(y: Tensor) -> Tensor:
    """Return `y` as a tensor that is no view, in the same memory.

    Torch refuses to change a view in place that was made inside of a `Function`, for the function's gradient would be
    lost. Most of its layers return such views: a Linear with bias flattens its input, a convolution of a single image
    adds a dimension, attention transposes. In eager torch all of these have a result of their own.
    """
    return y.data if not is_compiling() and y._is_view() else y


def apply(function: type[CompressedFunction], *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``; a compiled graph ends there if this torch does not trace it."""
    if not is_compiling():
        if torch._C._are_functorch_transforms_active():
            raise FewbitError(
                "compressed layers work under no transform of torch.func (grad, vmap, jvp): fewbit.revert(model), "
                "or convert activations alone, with bits= and no level"
            )
        return function.eager.apply(*arguments)
    if not TRACES_FUNCTIONS or any(isinstance(a, Saver) and not a.is_traced for a in arguments):
        return _apart(function, *arguments)
    if not any(isinstance(a, Saver) and a.has_dynamic_sizes for a in arguments):
        return function.apply(*arguments)
    return function.apply_listing(*arguments)[0] if TRACES_SIZES else _apart(function, *arguments)


# A compiled graph ends here.
_apart: Any = disable(lambda function, *arguments: function.eager.apply(*arguments))


def keep(ctx: Any, compressed: Any, *others: Tensor | None) -> None:
    """Save the tensors of `compressed` (one `Compressed`, several in a tuple, or None) and `others` for backward.

    In eager torch autograd holds the tensors, and the context what puts them together. In a graph that is traced the
    compiler follows the tensors of any object.
    """
    ctx.is_traced = is_compiling()  # a compiler that gives up may leave the backward pass to eager torch
    ctx.others = len(others)
    if ctx.is_traced:
        ctx.compressed = compressed
        ctx.save_for_backward(*others, *tensors_in(compressed))
        return
    tensors: list[Tensor] = []
    ctx.skeleton = take_apart(compressed, tensors)
    ctx.save_for_backward(*others, *tensors)


def kept(ctx: Any) -> tuple[Any, ...]:
    """Return the arguments of `keep`; call it once in a backward pass, because checkpoints recompute them."""
    saved = ctx.saved_tensors
    compressed = ctx.compressed if ctx.is_traced else put_together(ctx.skeleton, saved[ctx.others :])
    return compressed, *saved[: ctx.others]


def observed(saver: Saver, compressed: Any, gradient: Tensor, rstd: Tensor | None = None) -> Any:
    """Return `compressed`, what `kept` returned, after `saver` has observed the gradient.

    In compiled code an observation without a result would be left out, so that what is decompressed depends on it.
    """
    if is_compiling():
        return as_saver(saver).observed_in_graph(compressed, gradient, rstd)
    saver.observe(gradient, rstd)
    return compressed


def check_first_derivative() -> None:
    """Raise RuntimeError in a backward pass with create_graph=True.

    Raising only when the result is differentiated would be too late: a result without a graph counts as a constant, and
    the Hessian would come out as 0.
    """
    if torch.is_grad_enabled() and not is_compiling():  # a compiled graph has no second derivative, and torch says so
        refuse()


def refuse(*_: Any) -> NoReturn:
    """Raise RuntimeError: there is no such derivative."""
    raise RuntimeError(
        "fewbit's compressed layers have no second derivative (create_graph=True) and no forward mode: "
        "use torch's own layer here"
    )
