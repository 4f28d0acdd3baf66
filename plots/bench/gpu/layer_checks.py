"""Check of single layers at L2 as autocast and cuDNN see them, which no CPU shows.

Each case was a fault that readers found in torch's sources (27 November 2026): torch's own op refused the arguments, or
the layer returned another dtype, or drew another mask.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ....runtime.convert.api import convert
from .trying import Said, tried


class _Transposed(nn.Module):
    """Batch normalization between transpositions, (batch, length, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _BiasAlone(nn.Module):
    """Batch normalization whose bias alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.detach().transpose(1, 2))


# By name: the layer, in 16 bits under autocast where that is True.
LAYERS: Mapping[str, tuple[Callable[[], nn.Module], bool]] = {
    "LayerNorm, autocast": (lambda: nn.LayerNorm(64), True),
    "GroupNorm, autocast": (lambda: nn.GroupNorm(4, 16), True),
    "RMSNorm, 16 bits": (lambda: nn.RMSNorm(64), True),
    "Softplus, autocast": (nn.Softplus, True),
    "BatchNorm between transpositions": (_Transposed, False),
    "BatchNorm, bias alone": (_BiasAlone, False),
    "Dropout in place": (lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True)), False),
}


def layers(device: str) -> Said:
    """Take a step of each layer: torch's output to the bit, in its dtype, and gradients near torch's."""
    found: dict[str, object] = {}
    for name, (make, halves) in LAYERS.items():
        yield tried(found, name, lambda make=make, halves=halves: _beside_torch(make, halves, device))


def _beside_torch(make: Callable[[], nn.Module], halves: bool, device: str) -> dict[str, bool]:
    """Return whether a converted layer is like torch's."""
    dtype = torch.bfloat16 if halves else torch.float32
    theirs = make().to(device, dtype)
    ours = copy.deepcopy(nn.Sequential(theirs))  # whose parts are replaced, and not itself
    convert(ours, level="L2")
    torch.manual_seed(0)
    x = torch.randn(8, 16, 64, device=device, dtype=dtype)

    def step(layer: nn.Module) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=halves):
            y = layer(leaf * 1)
        (y.float() * torch.randn(y.shape, device=device)).mean().backward()  # a norm's own square has no gradient
        return y, [t.grad for t in (leaf, *layer.parameters()) if t.grad is not None]

    (exact, gradients), (found, near) = step(theirs), step(ours)
    errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(near, gradients, strict=True)]
    return {"same": torch.equal(exact, found), "dtype": exact.dtype == found.dtype, "near": bool(max(errors) < 0.5)}
