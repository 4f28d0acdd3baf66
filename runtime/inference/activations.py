"""Quantizes activations at inference, with a range and a threshold for each layer, found once on sample data.

No elements are sorted during inference. Values above the threshold in magnitude are kept in 16 bits, the rest is
rounded to 2^b levels over the calibrated range (V-Quant, Section 4.7, leaves low-cost sorting open).
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...tables import FewbitError
from ..quantizers import Outlier

_SAMPLES = 1 << 14  # magnitudes of a batch sampled for the threshold


class StraightThrough(torch.autograd.Function):
    """x, q -> q; the gradient passes to x unchanged (straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: Tensor) -> Tensor:
        """Return `quantized`, bit for bit."""
        return quantized.view_as(quantized)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return grads[0], None


class InputQuantizer(nn.Module):
    """The input of a layer in b bits, with the ratio AR of largest magnitudes in 16 bits.

    Before calibration it returns its input. Beyond the calibrated range, values are clamped at AR = 0 and kept in
    16 bits otherwise, so that AR is a mean over the calibration data. NaN stays NaN.

    Attributes:
        bits: b, 1 to 8.
        ratio: AR, from 0 to 1.
        value_dtype: of the large values.
        range: minimum and maximum of the rest, and the magnitude above which values are large: float32 (3,); NaN before
            calibration.

    Raises:
        FewbitError: an attribute is not one of the values above.
    """

    bits: int
    ratio: float
    value_dtype: torch.dtype
    range: Tensor

    def __init__(self, bits: int, ratio: float, value_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.bits, self.ratio, self.value_dtype = bits, ratio, value_dtype
        self._check()
        self.register_buffer("range", torch.full((3,), torch.nan, dtype=torch.float32))
        self._seen: list[Tensor] | None = None
        self._ends: tuple[float, float] = (torch.inf, -torch.inf)

    def _check(self) -> None:
        Outlier(self.bits, self.ratio, value_dtype=self.value_dtype)
        if self.value_dtype is None:
            raise FewbitError("value_dtype of an InputQuantizer is float16, bfloat16 or float32 of torch, not None")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        try:
            self._check()
            right = self.range.shape == (3,) and self.range.is_floating_point()
        except AttributeError:
            right = False
        if not right:
            raise FewbitError("a pickled InputQuantizer holds bits, ratio, value_dtype and a range of three numbers")

    def begin(self) -> None:
        """Start calibration: observe inputs and return them unchanged."""
        self._seen, self._ends = [], (torch.inf, -torch.inf)

    def finish(self) -> None:
        """Set threshold and range from the inputs observed since `begin`.

        Raises:
            FewbitError: there was no finite input.
        """
        seen, self._seen = torch.cat(self._seen or [torch.empty(0, device="cpu")]), None
        low, high = self._ends
        if not seen.numel() or low > high:
            raise FewbitError("calibration saw no finite input of a layer: give batches that reach every layer")
        above = round(self.ratio * seen.numel())
        threshold = max(-low, high)
        if above:
            threshold = float(seen.sort().values[-above - 1]) if above < seen.numel() else -1.0
        low, high = max(low, -abs(threshold)), min(high, abs(threshold))
        ends = [min(low, high), max(low, high), threshold]
        self.range.copy_(torch.tensor(ends, dtype=torch.float32, device="cpu"))

    def stop(self) -> None:
        """Stop calibration."""
        self._seen = None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` quantized to b bits and 16 bits; its gradient passes unchanged."""
        if self._seen is not None:
            finite = x.detach()[x.isfinite()].float()
            if finite.numel():
                low, high = self._ends
                self._ends = min(low, float(finite.amin())), max(high, float(finite.amax()))
                stride = max(1, finite.numel() // _SAMPLES) | 1  # odd, so that it does not align with rows
                self._seen.append(finite[::stride].abs().cpu())
            return x
        if bool(self.range[2].isnan()):
            return x
        return StraightThrough.apply(x, self.quantized(x.detach()))  # pyright: ignore[reportReturnType]

    def quantized(self, x: Tensor) -> Tensor:
        """Return the quantized values of `x`."""
        low, high, threshold = self.range.to(x.dtype)
        step = ((high - low) / ((1 << self.bits) - 1)).clamp(min=torch.finfo(torch.float16).tiny)
        rest = ((x.clamp(low, high) - low) / step).round() * step + low
        return torch.where(x.abs() > threshold, x.to(self.value_dtype).to(x.dtype), rest) if self.ratio else rest

    def share(self, x: Tensor) -> float:
        """Return the share of the elements of `x` that are kept in 16 bits."""
        return float((x.abs() > self.range[2]).float().mean()) if self.ratio else 0.0

    def extra_repr(self) -> str:
        """Return bits and ratio."""
        return f"bits={self.bits}, ratio={self.ratio}"
