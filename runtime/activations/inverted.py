"""Activations that save their output and one bit, in place of their input (inverted activations, arXiv 2407.15545).

    y = f(x),  side = x > x*          x* is where f, GELU say, has its only minimum
    f'(x) = g(√(y − f(x*)), side)     for on either side of x* an output has one input

A layer that trains its weight saves y in any case, so what is added is one bit an element, and the derivative is exact
up to the interpolation of g, of which a thousand values are kept for each side: by 1e-4 of float32. The root makes g
smooth at the minimum, where f' is one of y itself.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...tables import FewbitError
from ...tables.errors import shown
from ..backends.forwards import forward_of
from ..tensors.packing import pack, pack_mask, unpack, unpack_mask

Keep = Literal["codes", "output"]  # what an activation saves of its derivative

FUNCTIONS = ("gelu", "gelu_tanh")
POINTS = 1024  # of g, on each side
PART = 1 << 14  # elements of which the derivative is taken at once
ROOM = 64  # bytes that it takes for each of them
FARTHEST = 12.0  # |x| beyond which the derivative is that of x = ±FARTHEST: 0 and 1 in float32


@dataclass(frozen=True)
class Inverse:
    """The derivative of a function as one of its output.

    Attributes:
        minimum: where the function is least.
        least: the function there.
        ends: √(y − least) at the last value of g, left and right of the minimum.
        slopes: g at equal distances of the root, (2, POINTS), left side first, float32.
    """

    minimum: float
    least: float
    ends: tuple[float, float]
    slopes: Tensor

    def derivative(self, y: Tensor, right: Tensor) -> Tensor:
        """Return f' from f(x) and whether x is above the minimum, in float32, or float64 for such."""
        slopes = self.slopes.to(y.device)
        root = (y.to(torch.promote_types(y.dtype, torch.float32)) - self.least).clamp_(min=0).sqrt_()
        left_end, right_end = self.ends
        place = root * torch.where(right, (POINTS - 1) / right_end, (POINTS - 1) / left_end)
        place = place.clamp_(max=POINTS - 1)
        below = place.nan_to_num(0.0).to(torch.int32).clamp_(max=POINTS - 2)  # NaN is none of the places
        flat = slopes.view(-1)
        index = torch.where(right, below + POINTS, below)
        return torch.lerp(flat[index].to(place.dtype), flat[index + 1].to(place.dtype), place - below)


@cache
def inverse_of(function: str) -> Inverse:
    """Return the derivative of a function in `FUNCTIONS` as one of its output, from its values in float64."""
    forward = forward_of(function).call

    def sampled(first: float, last: float) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.linspace(first, last, 1 << 18, dtype=torch.float64, device="cpu").requires_grad_()
        with torch.enable_grad():
            y = forward(x)
            (slope,) = torch.autograd.grad(y.sum(), x)
        return x.detach(), y.detach(), slope

    low, high = -2.0, 0.0  # f' changes its sign there
    for _ in range(4):
        x, _, slope = sampled(low, high)
        at = int((slope < 0).sum()) - 1
        low, high = float(x[at]), float(x[at + 1])
    minimum = (low + high) / 2
    least = float(forward(torch.tensor(minimum, dtype=torch.float64, device="cpu")))
    ends, slopes = [], []
    for far in (-FARTHEST, FARTHEST):
        _, y, slope = sampled(minimum, far)
        root = (y - least).clamp(min=0).sqrt()
        ends.append(float(root[-1]))
        grid = torch.linspace(0, ends[-1], POINTS, dtype=torch.float64, device="cpu")
        above = torch.searchsorted(root.contiguous(), grid).clamp(1, len(root) - 1)
        share = (grid - root[above - 1]) / (root[above] - root[above - 1]).clamp(min=1e-300)
        slopes.append(torch.lerp(slope[above - 1], slope[above], share.clamp(0, 1)))
    return Inverse(minimum, least, (ends[0], ends[1]), torch.stack(slopes).float())


def check_keep(keep: object) -> None:
    """Raise FewbitError unless `keep` is one of `Keep`."""
    if keep not in ("codes", "output"):
        raise FewbitError(f"keep is 'codes' or 'output', not {shown(keep)}")


def inverted(x: Tensor, function: str, inverse: Inverse) -> Tensor:
    """Return f(x); save f(x) and one bit for each element.

    Args:
        x: floating-point, any shape.
        function: of `FUNCTIONS`.
        inverse: of the function.
    """
    return _Inverted.apply(x, inverse.slopes, function, inverse.minimum, inverse.least, inverse.ends)


class _Inverted(torch.autograd.Function):
    """x -> f(x)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slopes: Tensor, function: str, minimum: float, least: float, ends: tuple[float, float]
    ) -> Tensor:
        """Return f(x); save it, and on which side of the minimum x is."""
        ctx.inverse = slopes, minimum, least, ends
        y = forward_of(function).call(x)
        right = x > minimum
        ctx.save_for_backward(y, pack(right.to(torch.uint8), 1) if is_compiling() else pack_mask(right))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        y, bits = ctx.saved_tensors
        slopes, minimum, least, ends = ctx.inverse
        inverse = Inverse(minimum, least, ends, slopes)
        right = (unpack(bits, 1, y.numel()) if is_compiling() else unpack_mask(bits, y.numel())).to(torch.bool)
        if is_compiling():
            return (grads[0] * inverse.derivative(y.detach(), right.view(y.shape))).to(y.dtype), *(None,) * 5
        # A part at a time: a derivative takes several tensors of its size for a moment.
        y, grad = y.detach().flatten(), grads[0].flatten()
        found = torch.empty_like(y)
        for start in range(0, len(y), PART):
            part = slice(start, start + PART)
            found[part] = grad[part] * inverse.derivative(y[part], right[part])
        return found.view(grads[0].shape), *(None,) * 5
