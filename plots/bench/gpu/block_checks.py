"""Checks of whole blocks: eager ways, the compile backend, and what it records as CUDA graphs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....runtime.convert.api import convert
from ....runtime.quantizers import PerGroup, Rotated
from ....runtime.saved.checkpoint import checkpoint
from ....runtime.saved.hooks import compress_saved_tensors
from .trying import Said, tried

_STEPS = 5  # under a mode that records at the second, and replays from the third on


class Block(nn.Module):
    """A transformer's block with the ops that most models save for: normalization, attention, a gated MLP, dropout."""

    def __init__(self, width: int = 256, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 704), nn.Linear(width, 704), nn.Linear(704, width)
        self.act, self.dropout = nn.SiLU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output (batch, tokens, width)."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.dropout(self.down(self.act(self.gate(y)) * self.up(y)))


def _blocks(device: str, count: int = 2, dropout: float = 0.1) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 128, 256, device=device)
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(count))).to(device), x


def _step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a step's loss and the gradients of all parameters, at one seed of dropout and rounding."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(x).square().mean()
    loss.backward()
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(gradients)


def compiled(device: str) -> Said:
    """Compile two blocks by the backend: the loss of `torch.compile` to the bit, and the gradient's error."""
    model, x = _blocks(device)
    loss, exact = _step(torch.compile(model, fullgraph=True), model, x)
    found: dict[str, Any] = {}
    for bits in ("auto", 8, 4, 2):

        def step(bits: Any = bits) -> dict[str, Any]:
            torch.compiler.reset()
            call = torch.compile(model, backend="fewbit", options={"bits": bits}, fullgraph=True)
            ours, gradient = _step(call, model, x)
            error = ((gradient - exact).norm() / exact.norm()).item()
            return {"same loss": torch.equal(ours, loss), "error": round(error, 4), "near": error < 1}

        yield tried(found, f"{bits} bits", step)


def eager(device: str) -> Said:
    """Take a step in each eager way: the exact forward pass to the bit, and the gradient's error."""
    model, x = _blocks(device)
    loss, exact = _step(model, model, x)
    found: dict[str, Any] = {}
    for name, way in EAGER.items():

        def step(way: Callable[[nn.Module], Any] = way) -> dict[str, Any]:
            own, _ = _blocks(device)
            around = way(own)
            if isinstance(around, torch.autograd.graph.saved_tensors_hooks):
                with around:
                    ours, gradient = _step(own, own, x)
            else:
                ours, gradient = _step(own, own, x)
            error = ((gradient - exact).norm() / exact.norm()).item()
            return {"same loss": torch.equal(ours, loss), "error": round(error, 4), "near": error < 1}

        yield tried(found, name, step)


def _levels_in_checkpoints(model: nn.Module) -> None:
    convert(model, level="L2")
    checkpoint(model, bits=8)


EAGER: Mapping[str, Callable[[nn.Module], Any]] = {
    "activations, 3 bits": lambda model: convert(model, bits=3),
    "L1": lambda model: convert(model, level="L1"),
    "L2": lambda model: convert(model, level="L2"),
    "L2, gated parts": lambda model: convert(model, level="L2", glu="parts"),
    "L3": lambda model: convert(model, level="L3"),
    "L4": lambda model: convert(model, level="L4"),
    "L5": lambda model: convert(model, level="L5"),
    "V-Quant": lambda model: convert(model, bits=3, outliers=0.02),
    "hooks, 4 bits": lambda model: compress_saved_tensors(PerGroup(bits=4)),
    "hooks, rotated": lambda model: compress_saved_tensors(Rotated(bits=4)),
    "checkpoints": lambda model: checkpoint(model, bits=None),
    "checkpoints, 8 bits": lambda model: checkpoint(model, bits=8),
    "checkpoints, offloaded": lambda model: checkpoint(model, bits=8, offload=True),
    "L2 in checkpoints": _levels_in_checkpoints,
}


def reduce_overhead(device: str) -> Said:
    """Train some steps under `mode="reduce-overhead"`, which records CUDA graphs: they run, and noise is fresh."""
    found: dict[str, Any] = {}
    for bits in ("auto", 4, 2):
        yield tried(found, f"{bits} bits", lambda bits=bits: _overhead(bits, device))


def _overhead(bits: Any, device: str) -> dict[str, bool]:
    """Return whether the last two of some steps have other noise, on the same numbers without dropout."""
    torch.compiler.reset()
    model, x = _blocks(device, 1, dropout=0.0)
    options = {"bits": bits, "triton.cudagraphs": device == "cuda"}  # what the mode sets; torch takes one of the two
    how: dict[str, Any] = {"options": options} if bits != "auto" or device == "cpu" else {"mode": "reduce-overhead"}
    step = torch.compile(model, backend="fewbit", **how)
    gradients = []
    for _ in range(_STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        step(x).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return {"fresh": not torch.equal(gradients[-1], gradients[-2]), "finite": bool(gradients[-1].isfinite().all())}
