"""`make gpu-4`: a layer of Llama-3-8B and a model of Llama-3.2-1B's form, trained in every way that saves memory.

    for said in train(PROBLEMS["layer"], "compile, fewbit 4", "cuda"): print(said)

A way is a process of its own. Weights are random, in bfloat16, with fused AdamW; data and seeds are the same in all.
Blocks are compiled one by one, as torchtitan compiles them: they share one compilation. A row is written when the first
step is done, again with the memory, and again with the times, which are taken while no other way compiles or runs.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ....runtime.compile.backend import with_budget
from ....runtime.convert.api import convert
from ....runtime.plan.planner import fit
from ....runtime.quantizers import PerGroup
from ....runtime.saved.checkpoint import checkpoint
from ....runtime.saved.hooks import compress_saved_tensors
from ..timing import clock_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "FEWBIT_GPU_LOCK"  # names the file by which ways take turns
TIMED, WARM_UP = 10, 2
_RATE = 1e-4  # AdamW's

Data = tuple[Tensor, ...]  # the arguments of a problem's model


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        width, heads, key_heads, inner: of a block.
        layers: number of blocks; a model has embeddings and a head around them.
        vocabulary: of a model; None for the blocks alone, trained towards fixed numbers.
        batch, tokens: sequences, and the length of each.
    """

    width: int
    heads: int
    key_heads: int
    inner: int
    layers: int
    vocabulary: int | None
    batch: int
    tokens: int


PROBLEMS: Mapping[str, Problem] = {
    "layer": Problem(4096, 32, 8, 14336, 1, None, 4, 2048),
    "model": Problem(2048, 32, 8, 8192, 16, 128256, 2, 2048),
}


def toy(problem: Problem) -> Problem:
    """Return a problem of the same form that a CPU does at once."""
    vocabulary = problem.vocabulary and 256
    return Problem(64, 4, 2, 176, min(problem.layers, 2), vocabulary, 2, 64)


class Layers(nn.Module):
    """Blocks of a Llama without embeddings: the loss of their output (batch, tokens, width) towards fixed numbers."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.rotary = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error of the output."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        places = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=places, position_ids=positions)
            x = x[0] if isinstance(x, tuple) else x
        return F.mse_loss(x.float(), target.float())


class LanguageModel(nn.Module):
    """The loss of a causal Llama on its own tokens."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama import LlamaForCausalLM

        super().__init__()
        self.network = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the tokens int64 (batch, length)."""
        return self.network(input_ids=tokens, labels=tokens, use_cache=False).loss


def model_of(problem: Problem, device: str) -> nn.Module:
    """Return the problem's model in bfloat16, with the weights of seed 0."""
    from transformers.models.llama import LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": problem.width,
        "num_attention_heads": problem.heads,
        "num_key_value_heads": problem.key_heads,
        "intermediate_size": problem.inner,
        "num_hidden_layers": problem.layers,
        "vocab_size": problem.vocabulary or 256,
        "max_position_embeddings": problem.tokens,
    }
    config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LanguageModel(config) if problem.vocabulary else Layers(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def data_of(problem: Problem, device: str) -> Data:
    """Return the arguments of the problem's model: tokens, or numbers and what they are trained towards."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (problem.batch, problem.tokens)
    if problem.vocabulary:
        return (torch.randint(problem.vocabulary, shape, generator=generator, device=device),)
    how: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    x, target = (torch.randn(*shape, problem.width, **how) for _ in range(2))
    return x.requires_grad_(), target


# ---- ways ------------------------------------------------------------------------------------------------------------

Around = Callable[[], AbstractContextManager[Any]]
Prepare = Callable[[nn.Module, Data], object]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        prepare: changes a model in place, which may be tried on the data.
        around: makes the context of a forward pass.
        problems: that it is a way for.
    """

    prepare: Prepare = lambda model, data: None
    around: Around = nullcontext
    problems: Sequence[str] = ("layer", "model")


class Checkpointed(nn.Module):
    """A block whose forward pass is run again in the backward pass, by torch."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the block's output."""
        return torch_checkpoint(self.block, *inputs, use_reentrant=False, **keywords)


def _blocks(model: nn.Module) -> nn.ModuleList:
    found = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    return found[0]


def _compiled(backend: Any = "inductor", **options: Any) -> Prepare:
    def prepare(model: nn.Module, data: Data) -> None:
        for block in _blocks(model):
            block.compile(backend=backend, **({"options": options} if options else {}))

    return prepare


def _checkpointed(model: nn.Module, data: Data) -> None:
    blocks = _blocks(model)
    for i, block in enumerate(blocks):
        blocks[i] = Checkpointed(block)


def _compiled_checkpoints(model: nn.Module, data: Data) -> None:
    _checkpointed(model, data)
    _compiled()(model, data)


def _in_chunks(prepare: Prepare) -> Way:
    """Return a way with the loss in chunks of tokens beside it, whose logits no way of torch's own is without."""

    def both(model: nn.Module, data: Data) -> None:
        convert(model, loss="chunked")
        prepare(model, data)

    return Way(both, problems=("model",))


def _planned(memory: str) -> Way:
    """Return the way of a plan for a memory, weights and the optimizer's state in it; the loss may be in chunks."""
    return Way(
        lambda model, data: fit(model, *data, memory=memory, optimizer="adamw-fused"),
        problems=("model",),
    )


# The most telling first: a call may be broken off.
WAYS: Mapping[str, Way] = {
    "eager": Way(),
    "compile": Way(_compiled()),
    "compile, checkpoints": Way(_compiled_checkpoints),
    "compile, fewbit": Way(_compiled("fewbit")),
    "compile, fewbit 4": Way(_compiled("fewbit", bits=4)),
    "compile, loss in chunks": _in_chunks(_compiled()),
    "compile, checkpoints, loss in chunks": _in_chunks(_compiled_checkpoints),
    "compile, fewbit, loss in chunks": _in_chunks(_compiled("fewbit")),
    "compile, fewbit 2, loss in chunks": _in_chunks(_compiled("fewbit", bits=2)),
    "plan, 16 GiB": _planned("16GiB"),
    "plan, 13 GiB": _planned("13GiB"),
    "compile, budget 0.5": Way(_compiled(with_budget(0.5))),
    "checkpoints": Way(_checkpointed),
    "compile, fewbit 2": Way(_compiled("fewbit", bits=2)),
    "compile, fewbit 3": Way(_compiled("fewbit", bits=3)),
    "compile, fewbit 2, groups": Way(_compiled("fewbit", bits=2, quantizer="groups")),
    "compile, budget 0.3": Way(_compiled(with_budget(0.3))),
    "L2": Way(lambda model, data: convert(model, level="L2")),
    "L2, gated parts": Way(lambda model, data: convert(model, level="L2", glu="parts")),
    "hooks, 4 bits": Way(around=lambda: compress_saved_tensors(PerGroup(4))),
    "checkpoints, 8 bits": Way(lambda model, data: checkpoint(model, bits=8)),
    "offload": Way(around=lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())),
}


# ---- a training ------------------------------------------------------------------------------------------------------


class Training:
    """A problem's model, trained in one way.

    Args:
        problem: what is trained.
        way: a name in `WAYS`.
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, problem: Problem, way: str, device: str) -> None:
        self.device, self.way = device, WAYS[way]
        self.model, self.data = model_of(problem, device), data_of(problem, device)
        begun = time.perf_counter()
        self.way.prepare(self.model, self.data)
        self.prepared = time.perf_counter() - begun
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_RATE, fused=device == "cuda")
        self.losses: list[float] = []
        self.kept = 0

    def step(self) -> None:
        """Take a step; note the loss, and what is held between the passes."""
        torch.manual_seed(len(self.losses))
        begun = self._allocated()
        with self.way.around():
            loss = self.model(*self.data)
        self.kept = self._allocated() - begun
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for one in self.data:
            one.grad = None
        self.losses.append(loss.item())

    def memory(self) -> dict[str, int]:
        """Return the bytes of one step: the most allocated and reserved, held between the passes, and before it."""
        if self.device != "cuda":
            self.step()
            return {}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        static = self._allocated()
        self.step()
        torch.cuda.synchronize()
        most = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        torch.cuda.empty_cache()
        return {**most, "kept": self.kept, "static": static}

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


def train(problem: Problem, way: str, device: str) -> Iterator[dict[str, Any]]:
    """Yield what is known of a training, more each time: the first step, memory, times and losses.

    Args:
        problem: what is trained.
        way: a name in `WAYS`.
        device: ``cuda`` or ``cpu``.
    """
    with turn(alone=False):  # a plan measures steps
        training = Training(problem, way, device)
    size = sum(p.numel() for p in training.model.parameters())
    said: dict[str, Any] = {"parameters": size, "prepared s": round(training.prepared, 2)}
    with turn(alone=False):
        begun = time.perf_counter()
        training.step()
        said |= {"first step s": round(time.perf_counter() - begun, 2)}
        for _ in range(WARM_UP - 1):
            training.step()
        yield (said := {**said, "losses": training.losses[:]})
        yield (said := {**said, **training.memory()})
    with turn(alone=True):
        training.step()
        seconds = [clock_of(device)(training.step) for _ in range(TIMED)]
    times = {"ms": round(median(seconds) * 1e3, 3), "least ms": round(min(seconds) * 1e3, 3)}
    yield {**said, **times, "losses": training.losses}


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Run the block while nobody is alone, or alone: the processes that share a lock file time one after another."""
    path = os.environ.get(LOCK)
    if path is None or fcntl is None:
        yield
        return
    with Path(path).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def problem_of(name: str, layers: int | None = None, small: bool = False) -> Problem:
    """Return a problem, with another number of blocks, or as a toy."""
    problem = toy(PROBLEMS[name]) if small else PROBLEMS[name]
    return replace(problem, layers=layers) if layers and problem.vocabulary else problem


# ---- the table -------------------------------------------------------------------------------------------------------


def lines(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield a row of text for each training: memory in GiB beside what is there before a step, time beside eager's."""
    yield ("", "peak GiB", "beside static", "of eager's", "kept GiB", "ms", "of eager's", "first step s", "loss")
    for name, row in rows.items():
        if "losses" not in row:
            continue
        eager = rows.get(f"{name.split(': ')[0]}: eager", {})
        more, theirs = (one.get("peak", 0) - one.get("static", 0) for one in (row, eager))
        yield (
            name,
            f"{row.get('peak', 0) / 2**30:.2f}",
            f"{more / 2**30:.2f}",
            f"{more / theirs:.2f}" if theirs else "",
            f"{row.get('kept', 0) / 2**30:.2f}",
            f"{row['ms']:.1f}" if "ms" in row else "",
            f"{row['ms'] / eager['ms']:.2f}" if "ms" in row and "ms" in eager else "",
            f"{row.get('first step s', 0):.1f}",
            f"{row['losses'][-1]:.4f} ({len(row['losses'])})",
        )
