"""The gradient of normalizations (ActNN, Appendix B.2), through x̄ = (x − m)·r, from one copy of x̄ or two.

    h = ∇y·w,      ∇x = r (h − mean(h) − x̄ · mean(x̄ h))

x̄ is compressed, not x as in the paper; m and r are saved exactly, so either gives the other. A group of 256 elements
may span channels, or short rows, of very different deviations, and is rounded by steps of its whole range: in x, those
of small deviation are lost, and their r is large. In x̄ all deviations are 1. At 2 bits the gradient of a vision
transformer with initial weights, whose class token is small, was off by 170 times its norm with x, and by half of its
norm with x̄.

x̄ occurs twice in ∇x. From one compressed copy the product is biased by Var[x̄] h/n, which is small if n, the number of
elements in the mean, is large; this is what ActNN does in practice. Two copies, compressed independently, make the
gradient of x unbiased at twice the memory. Measured (`plots/studies/bias.py`), the bias from one copy at 2 bits is
0.8 % of the gradient's norm over 64 features, 0.3 % over 256 and 0.1 % for 8 channels of 16 images of 8×8, the last not
distinguishable from 0; at 4 bits at most 0.04 %. ∇w = Σ x̄ ∇y and ∇b = Σ ∇y are unbiased with either.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...tables import FewbitError
from ...tables.errors import shown
from .. import ops
from ..quantizers import Compressed
from ..tensors.graphs import is_capturing
from ..tensors.traits import is_abstract
from .base import DEFAULT_LAYER_BITS, CompressedLayer
from .saver import Saver, Whole, as_saver, tensors_in

LEAST_WEIGHT = 0.01  # of the largest, below which dividing by it would magnify the rounding of y
CALLS = 64  # of a layer on a GPU between two looks at its weight, which wait for the GPU


class KeepOutput(Saver):
    """The saver of layer and RMS normalizations that save their output y in place of their input (arXiv 2406.16282).

    A layer behind that trains its weight saves y in any case, so nothing is added; x̄ = (y − b) / w has the rounding of
    y. A layer whose weights come near 0 saves its input as it is. Each layer has a saver of its own.

    Example:
        norm = fewbit.layers.LayerNorm(768, saver=fewbit.layers.KeepOutput())
    """

    def __init__(self) -> None:
        self._calls = 0
        self._divides = True

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` as it is: what has no output to keep."""
        return Whole(x)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Learn nothing."""

    def divides_by(self, weight: Tensor | None, offset: float) -> bool:
        """Return whether y can be divided by `weight` + `offset`; on a GPU as of up to `CALLS` calls ago."""
        if weight is None or is_compiling() or is_abstract(weight):
            return self._divides
        # A look would wait, which a CUDA graph cannot.
        if weight.device.type != "cpu" and is_capturing(weight.device.index):
            return self._divides and self._calls > 0
        if weight.device.type == "cpu" or self._calls % CALLS == 0:
            size = (weight + offset).abs()
            self._divides = bool(size.amin() > LEAST_WEIGHT * size.amax())
        self._calls += 1
        return self._divides

    def __repr__(self) -> str:
        return "KeepOutput()"


def divided(y: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor:
    """Return x̄ from y, in `dtype`."""
    if bias is not None:
        y = y - bias.to(dtype)
    if weight is None:
        return y.to(dtype)
    factor = weight.to(dtype) + offset
    least = LEAST_WEIGHT * factor.abs().amax()  # since the last look some may have come nearer to 0
    factor = torch.where(factor.abs() < least, least.copysign(factor), factor)
    return y / factor if bias is None else y.to(dtype).div_(factor)


class CompressedNorm(CompressedLayer):
    """Mixin of the normalizations.

    Args:
        args, kwargs: torch's own.
        bits, saver: as for every compressed layer.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits` or `saver` is refused by `CompressedLayer`, or `copies` is not 1 or 2.
    """

    copies: int = 1

    def __init__(
        self, *args: Any, bits: int = DEFAULT_LAYER_BITS, saver: Saver | None = None, copies: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(*args, bits=bits, saver=saver, **kwargs)
        if isinstance(copies, bool) or copies not in (1, 2):
            raise FewbitError(f"copies is 1 or 2, not {shown(copies)}")
        self.copies = copies

    def extra_repr(self) -> str:
        """Return torch's own arguments, the saver, and the copies if there are two."""
        return super().extra_repr() + (", copies=2" if self.copies == 2 else "")


def copies_of(x: Tensor, saver: Saver, copies: int, *, rows: bool = False) -> tuple[Compressed, ...]:
    """Return independent compressed copies of `x`; with `rows`, each row of its last dimension by itself."""
    compress = as_saver(saver).compress_rows if rows else saver.compress
    first = compress(x)
    if copies == 1:
        return (first,)
    if is_compiling() and not isinstance(first, Whole):
        x = ops.another(x, tensors_in(first)[0])  # the compiler would merge two equal calls
    return first, compress(x)


def standardised(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """Return x̄ in the dtype of `x`; `mean` (None for 0) and `rstd` broadcast against it."""
    return (x * rstd if mean is None else (x - mean).mul_(rstd)).to(x.dtype)


def restored(x̄: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """Return x from x̄, in the dtype of `x̄`."""
    return (x̄ / rstd if mean is None else (x̄ / rstd).add_(mean)).to(x̄.dtype)


def input_gradient(h: Tensor, normed: list[Tensor], rstd: Tensor, dims: list[int], *, centred: bool = True) -> Tensor:
    """Return ∇x from one copy of x̄ or two.

    Args:
        h: ∇y·w, float32 or float64.
        normed: the copies of x̄, of the shape of `h`.
        rstd: r, broadcastable to `h`.
        dims: dimensions of the means.
        centred: whether m was subtracted; else its term is absent (RMSNorm).
    """
    first, *second = (n.to(h.dtype) for n in normed)
    inner = h - first * ((second[0] if second else first) * h).mean(dims, keepdim=True)
    return rstd * (inner - h.mean(dims, keepdim=True) if centred else inner)
