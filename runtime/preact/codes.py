"""What a pre-activation layer keeps: one packed code of A₂, which serves all that the backward pass asks.

    packed = compress(A₂, …)                   A₂ becomes A₃ where it lies; only the packed code stays
    codes.activated()                          Ã₃, for the gradient of the linear part's weights (equation 5)
    codes.through_normalisation(∇A₃, …)        the gradients of x, γ and β (equations 6 to 8)

Equations (6) to (8) use two things of A₂: its sign, which is exact, and Ã₁.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import flat, with_stride
from ..packing import unpack
from ..quantizers.common import KINDS, Form, as_kind, has_kernels
from ..quantizers.fixed_point import dequantize_reference, quantize_reference
from . import cpu
from .cpu import OFFSET, SLOPE, ZERO
from .meaning import Meaning, for_coding, meaning_of

CHANNEL_DIM = 1


def compress(A: Tensor, γ: Tensor, β: Tensor, bits: int, slope: float, normalised: Callable[[], Tensor]) -> Tensor:
    """Return the packed code of A₂ and turn it into A₃ = max(A₂, slope·A₂), in place.

    Args:
        A: A₂ = γ∘A₁ + β, dense, channels in dimension 1; overwritten.
        γ, β: (C,).
        bits: K.
        slope: of the leaky ReLU; 0 is ReLU.
        normalised: returns A₁; called where a γ is 0, so that A₂ does not tell.
    """
    inner = A.stride(CHANNEL_DIM)
    # Without kernels (a GPU) nothing waits to see whether there is such a γ.
    if not _has_kernels(A) or int(γ.count_nonzero()) < γ.numel():
        shape = [1, -1] + [1] * (A.dim() - 2)
        coded = with_stride(torch.where((γ == 0).view(shape), normalised().to(A.dtype), A), A.stride())
        meaning = meaning_of(*for_coding(γ, β), bits, inner, kernels=False)
        packed = quantize_reference(as_kind(coded, keep_positive=True), meaning.channels, inner, bits)
        activate_(A, slope)
        return packed
    return cpu.encode(A, meaning_of(γ, β, bits, inner, kernels=True), slope)


def activate_(A: Tensor, slope: float) -> Tensor:
    """Return A₃ in the memory of A₂."""
    return torch.nn.functional.leaky_relu_(A, slope) if slope else A.relu_()


@dataclass(frozen=True, eq=False)
class Codes:
    """The packed code of A₂ with all that it takes to read it.

    Attributes:
        packed: codes in memory order, uint8 (⌈n/8⌉·K,).
        form: of A₂.
        meaning: of the codes.
        slope: of the leaky ReLU.
    """

    packed: Tensor
    form: Form
    meaning: Meaning
    slope: float

    @classmethod
    def read(cls, packed: Tensor, form: Form, γ: Tensor, β: Tensor, bits: int, slope: float) -> "Codes":
        """Return the codes that `compress` made under the same γ and β."""
        kernels = _has_kernels(packed) and form.dtype in KINDS
        return cls(packed, form, meaning_of(γ, β, bits, form.stride[CHANNEL_DIM], kernels=kernels), slope)

    def activated(self) -> Tensor:
        """Return Ã₃, in the form of A₂."""
        out = self.form.empty()
        if self._kernels:
            cpu.decode(self.packed, self.meaning, self.slope, out)
            return out
        c = self.meaning.channels
        dequantize_reference(self.packed, c, self._inner, self.meaning.bits, out)
        return torch.where(self._in_form(self._positive()), out, self.slope * out if self.slope else 0)

    def through_normalisation(
        self, gradient: Tensor, γ: Tensor, inverse_deviation: Tensor, by_batch: bool, into_input: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the gradients of the layer's input (None unless `into_input`), of γ and of β.

        Args:
            gradient: ∇A₃, of the shape and dtype of A₂; its memory may be used for the result.
            γ: (C,).
            inverse_deviation: (σ² + ε)^{−1/2}, (C,).
            by_batch: whether mean and variance are those of the batch. If not, all is exact.
            into_input: whether the input needs a gradient.
        """
        gradient = with_stride(gradient, self.form.stride)
        if not self._kernels:
            return self._reference(gradient, γ, inverse_deviation, by_batch, into_input)
        totals = cpu.sums(self.packed, self.meaning, self.slope, gradient)
        dβ, dγ = totals
        if into_input:
            factors = self._factors(totals, γ, inverse_deviation, by_batch).float()
            cpu.normalise(self.packed, self.meaning, self.slope, gradient, self.meaning.by_column(factors))
        return gradient if into_input else None, dγ, dβ

    def _factors(self, totals: Tensor, γ: Tensor, inverse_deviation: Tensor, by_batch: bool) -> Tensor:
        """Return s, p and q, (3, C): the input's gradient is s∘(∇A₂ − p − q∘Ã₁)."""
        factors = torch.zeros(3, self.meaning.count, dtype=torch.float64, device=totals.device)
        torch.mul(γ, inverse_deviation, out=factors[0])
        if by_batch:
            torch.div(totals, self.form.numel // max(1, self.meaning.count), out=factors[1:])
        return factors

    def _reference(
        self, gradient: Tensor, γ: Tensor, inverse_deviation: Tensor, by_batch: bool, into_input: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        g, positive = flat(gradient).to(wide), self._positive()
        g = torch.where(positive, g, g * self.slope if self.slope else 0)
        channel = self._channel(g)
        middle = unpack(self.packed, self.meaning.bits, g.numel()).to(wide) + (0.5 - (1 << (self.meaning.bits - 1)))
        table = self.meaning.table
        normal = table[OFFSET][channel] + middle * table[SLOPE][channel]
        totals = torch.zeros(2, self.meaning.count, dtype=torch.float64, device=g.device)
        totals[0].index_add_(0, channel, g.double())
        totals[1].index_add_(0, channel, (g * normal).double())
        dβ, dγ = totals
        if not into_input:
            return None, dγ, dβ
        s, p, q = self._factors(totals, γ, inverse_deviation, by_batch).to(wide)
        return self.form.filled((g - p[channel] - q[channel] * normal) * s[channel]), dγ, dβ

    @property
    def _kernels(self) -> bool:
        return _has_kernels(self.packed) and self.form.dtype in KINDS

    @property
    def _inner(self) -> int:
        return self.form.stride[CHANNEL_DIM]

    def _channel(self, like: Tensor) -> Tensor:
        index = torch.arange(self.form.numel, device=like.device)
        return index // max(self._inner, 1) % max(self.meaning.count, 1)

    def _positive(self) -> Tensor:
        """Return whether A₂ > 0, bool (n,), in memory order."""
        code = unpack(self.packed, self.meaning.bits, self.form.numel).int()
        return code >= self.meaning.table[ZERO].view(torch.int32)[self._channel(code)]

    def _in_form(self, values: Tensor) -> Tensor:
        out = self.form.empty(values.dtype)
        flat(out).copy_(values)
        return out


def _has_kernels(x: Tensor) -> bool:
    return has_kernels(x) and (x.dtype in KINDS or x.dtype == torch.uint8)
