"""What all compressed layers share.

A compressed layer *is* torch's layer: a subclass with torch's arguments, parameters, buffers and state_dict. Only what
its backward pass needs of the input goes through `saver`. Forward it calls torch's own ops, so the outputs are torch's
bit for bit; backward it calls torch's own ops on the decompressed input. As E[decompress(compress(x))] = x, a gradient
that is linear in x is unbiased (ActNN, Theorem 1). Not linear are the input gradients of normalisations and softmax,
which are unbiased from two copies alone, and those of attention: normalization.py, softmax.py and attention.py state
the bias.

Where nothing can or need be compressed (no gradient asked for, frozen weights, integers), it is torch's layer entirely.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import disable

from ...tables import FewbitError
from ...tables.errors import shown
from ..quantizers import Compressed, PerGroup
from ..tensors.dtypes import DTYPES
from .saver import QuantizerSaver, Saver, put_together, take_apart

DEFAULT_LAYER_BITS = 4  # as ActNN's L1 and L2


class CompressedLayer(nn.Module):
    """Mixin, before a class of torch.nn: what it saves goes through `saver`.

    Args:
        args, kwargs: torch's own.
        bits: of `PerGroup`, 1 to 8 for each element; 0.125 more for the groups of 256 elements, and up
            to 0.5 where those do not fit into a token's features (`PerGroup.within`).
        saver: what compresses, in place of bits.

    Attributes:
        saver: may be changed at any time.

    Raises:
        FewbitError: `bits` or `saver` is none.
    """

    saver: Saver

    def __init__(self, *args: Any, bits: int = DEFAULT_LAYER_BITS, saver: Saver | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saver = check_saver(saver) if saver is not None else QuantizerSaver(PerGroup(bits=bits))

    def extra_repr(self) -> str:
        """Return torch's own arguments and what compresses."""
        return ", ".join(filter(None, (super().extra_repr(), saver_text(self.saver))))


def saver_text(saver: Saver) -> str:
    """Return how `saver` reads in a layer's repr."""
    if isinstance(saver, QuantizerSaver) and isinstance(saver.quantizer, PerGroup):
        return f"bits={saver.quantizer.bits}"
    return f"saver={saver}" if type(saver).__repr__ is not object.__repr__ else f"saver={type(saver).__name__}"


def check_saver(saver: Any) -> Saver:
    """Return `saver`; raises `FewbitError` if it is none."""
    if isinstance(saver, type) or not callable(getattr(saver, "compress", None)) or not hasattr(saver, "observe"):
        raise FewbitError(
            f"saver has compress(x) and observe(gradient, rstd), as QuantizerSaver(PerGroup()); {shown(saver)}"
        )
    return saver


def compresses(x: object, *parameters: Tensor | None) -> bool:
    """Tell whether a layer with these inputs records a gradient and saves floating-point numbers that fit a saver."""
    if not torch.is_grad_enabled() or not isinstance(x, Tensor):
        return False
    if x.dtype not in DTYPES or x.layout != torch.strided or x.numel() == 0:
        return False
    return any(t is not None and t.requires_grad for t in (x, *parameters))


def batched(x: Tensor, dimensions: int) -> Tensor:
    """Return `x`, or if it has fewer dimensions than `dimensions`, the same as the only sample of a batch."""
    return x if x.dim() >= dimensions else x.unsqueeze(0)


# ---- for the autograd functions --------------------------------------------------------------------------------------


def _apply(function: type[Function], *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``. A compiler ends its graph there, and traces nothing of what compresses."""
    return function.apply(*arguments)


apply: Any = disable(_apply)


def keep(ctx: Any, compressed: Any, *others: Tensor | None) -> None:
    """Let autograd hold the tensors of `compressed` (one `Compressed`, several in a tuple, or None) and `others`."""
    tensors: list[Tensor] = []
    ctx.skeleton = take_apart(compressed, tensors)
    ctx.save_for_backward(*others, *tensors)
    ctx.others = len(others)


def kept(ctx: Any) -> tuple[Any, ...]:
    """Return what `keep` was given; to be called once in a backward pass, for checkpoints recompute it."""
    saved = ctx.saved_tensors
    return put_together(ctx.skeleton, saved[ctx.others :]), *saved[: ctx.others]


def decompressed(compressed: Compressed | None, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor in the dtype in which the gradient is computed (autocast's), or None for None."""
    return None if compressed is None else compressed.decompress().to(dtype)


def check_first_derivative() -> None:
    """Raise RuntimeError in a backward pass with create_graph=True.

    It would be wrong to wait until the result is differentiated: a result without a graph counts as a constant, and the
    Hessian would come out as 0.
    """
    if torch.is_grad_enabled():
        refuse()


def refuse(*_: Any) -> NoReturn:
    """Raise RuntimeError: there is no such derivative."""
    raise RuntimeError(
        "fewbit's compressed layers have no second derivative (create_graph=True) and no forward mode: "
        "use torch's own layer here"
    )
