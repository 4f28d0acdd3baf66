"""Checks of whole blocks: eager ways, the compile backend, what it records as CUDA graphs, plans, and losses."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....runtime.convert.api import convert
from ....runtime.convert.chunked_loss import ChunkedLoss
from ....runtime.plan.planner import fit
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

        def step(name: str = name, way: Callable[[nn.Module], Any] = way) -> dict[str, Any]:
            own, _ = _blocks(device)
            around = way(own)
            if isinstance(around, torch.autograd.graph.saved_tensors_hooks):
                with around:
                    ours, gradient = _step(own, own, x)
            else:
                ours, gradient = _step(own, own, x)
            error = ((gradient - exact).norm() / exact.norm()).item()
            most = 0.05 if name.startswith("checkpoints") else 1.0  # with another mask of dropout they err by more
            return {"same loss": torch.equal(ours, loss), "error": round(error, 4), "near": error < most}

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


PLANS: Mapping[str, Mapping[str, Any]] = {
    "eager": {},
    "without recomputing": {"recompute": False},
    "compiled": {"compiled": True},
}
_PART = 0.6  # of what an exact step takes beside weights, gradients and the optimizer's state


def plans(device: str) -> Said:
    """Train six blocks by plans for three fifths of the exact step's memory, and hold the allocator's peak to it."""
    count = 6 if device == "cuda" else 1
    warm, x = _blocks(device, count)
    _peaks(warm, warm, x)  # libraries take their workspaces
    del warm
    found: dict[str, Any] = {}
    model, _ = _blocks(device, count)
    exact, _ = _peaks(model, model, x)
    state = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    for name, how in PLANS.items():

        def step(how: Mapping[str, Any] = how) -> dict[str, Any]:
            own, _ = _blocks(device, count)
            memory = int(state + _PART * (exact - state)) if device == "cuda" else 2**30
            name = "adamw-fused" if device == "cuda" else "adamw"
            fitted = fit(own, x, loss=_square, memory=memory, optimizer=name, **how)
            (peak, requested), plan = _peaks(own, own, x), fitted.plan
            numbers = {"memory": memory, "exact": exact, "planned": plan.peak.total, "peak": peak}
            # What is left of a block, up to a MiB of each that is larger, the allocator gives away with it.
            numbers["requested"] = requested
            methods = Counter(choice.method for choice in plan.choices)
            said = {"error": plan.error, "time": plan.time, "methods": dict(methods)}
            return {**numbers, **said, "within": peak <= memory}

        yield tried(found, name, step)


def _square(y: Tensor) -> Tensor:
    return y.square().mean()


def _peaks(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, int]:
    """Return the most bytes of the third step of a training, above what is there without the model, as the allocator
    gave them and as they were asked for; 0 on the CPU."""
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    before = torch.cuda.memory_allocated() - held if x.is_cuda else 0
    optimizer = torch.optim.AdamW(model.parameters(), fused=x.is_cuda)
    for _ in range(3):
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        _square(call(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not x.is_cuda:
        return 0, 0
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


class Language(nn.Module):
    """A block between an embedding and a head of 8,192 words: the loss of the next one."""

    def __init__(self, words: int = 8192) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(words, 256), Block(dropout=0.0), nn.Linear(256, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of tokens int64 (batch, length)."""
        logits = self.head(self.block(self.embedding(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def losses_in_chunks(device: str) -> Said:
    """Convert a language model's head, as it is and compiled: torch's gradients, at a lower peak."""

    def step(way: Callable[[nn.Module], Callable[[Tensor], Tensor]], dtype: torch.dtype) -> tuple[Tensor, int]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Language().to(device, dtype)
        tokens = torch.randint(8192, (4, 512), device=device)
        call = way(model)
        for _ in range(2):  # the first compiles
            model.zero_grad()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            call(tokens).backward()
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]), peak

    def compiled_exactly(model: nn.Module) -> Callable[[Tensor], Tensor]:
        options: dict[str, Any] = {"bits": None}
        return torch.compile(model, backend="fewbit", options=options)

    config = ChunkedLoss("head")
    ways = {"eager": lambda model: model, "compiled": compiled_exactly}
    found: dict[str, Any] = {}
    for dtype, least in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):  # torch's own logits have 8 bits there
        for name, way in ways.items():

            def both(way: Callable[[nn.Module], Any] = way, dtype: Any = dtype, least: float = least) -> dict[str, Any]:
                exact, most = step(way, dtype)
                ours, peak = step(lambda model: way(convert(model, config).model), dtype)
                error = ((ours - exact).norm() / exact.norm()).item()
                fewer = peak < most or device != "cuda"
                return {"error": error, "near": error < least, "exact peak": most, "peak": peak, "fewer": fewer}

            yield tried(found, f"{name}, {dtype}".replace("torch.", ""), both)
