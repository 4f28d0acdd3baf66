"""`fewbit bench losses`: training steps with the loss in chunks of tokens beside torch's: time, memory, gradient.

A Llama whose logits are its largest tensors trains all weights, all but a frozen head, or adapters, eager and compiled.
With chunks and without are copies of one model, which take turns; peaks are of a step in a process of its own, beyond
parameters and their gradients.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor, nn

from ...cli.progress import with_progress
from ...runtime.convert.api import convert
from ...runtime.memory.allocator import return_freed_memory
from ...tables.columns import columns
from ..studies.adapters import Adapted
from .processes import ProcessDied, added_peak_bytes, call_apart
from .report import MET, Report, bench_command, rounds_option, this_machine
from .timing import computing, take_turns

TIME_BAR = 1.05  # times the step without chunks, on the CPU
WORDS, TOKENS, WIDTH = 16_000, 1024, 256
TRAINS = ("all weights", "frozen head", "adapters")
# How the step is compiled: not at all, exactly by the backend fewbit, or in its default bits.
COMPILED: dict[str, dict[str, Any] | None] = {"eager": None, "compiled, exact": {"bits": None}, "compiled, auto": {}}


@dataclass(frozen=True)
class Row:
    """One training with the loss in chunks, beside the same without.

    Attributes:
        trains: a name of `TRAINS`.
        how: a name of `COMPILED`.
        torch_ms, chunked_ms: medians of processor time of a step.
        ratio: median over rounds of the second divided by the first in the same round.
        torch_peak, chunked_peak: rise of resident memory in a step; None where the system cannot tell.
        difference: of the gradients, relative to their norm; with few bits they differ by rounding.
    """

    trains: str
    how: str
    torch_ms: float
    chunked_ms: float
    ratio: float
    torch_peak: int | None
    chunked_peak: int | None
    difference: float

    @property
    def met(self) -> bool:
        """Whether the step is within the bar."""
        return self.ratio <= TIME_BAR

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, the bar and whether it is met as JSON values."""
        return {**asdict(self), "bar": TIME_BAR, "met": self.met}


def model_of(trains: str) -> nn.Module:
    """Return a Llama of two layers with the weights of seed 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    if trains == "adapters":
        for layer in model.requires_grad_(False).model.layers:
            for block, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "down_proj")):
                setattr(block, name, Adapted(getattr(block, name), rank=8))
    model.lm_head.weight.requires_grad_(trains == "all weights")
    return model


def tokens() -> Tensor:
    """Return random tokens int64 (4, 256)."""
    return torch.randint(0, WORDS, (4, TOKENS // 4), generator=torch.Generator().manual_seed(0))


class Training:
    """A copy of a model with one loss, trained in one way."""

    def __init__(self, model: nn.Module, how: str, chunked: bool) -> None:
        self.model = copy.deepcopy(model)
        if chunked:
            convert(self.model, loss="chunked")
        options = COMPILED[how]
        self.call: Callable[..., Any] = self.model
        if options is not None:
            self.call = torch.compile(self.model, backend="fewbit", options=dict(options))

    def step(self, ids: Tensor) -> None:
        """Run forward and backward pass."""
        self.call(input_ids=ids, labels=ids).loss.backward()

    def gradients(self, ids: Tensor) -> Tensor:
        """Return the gradients of a step in one vector, and free them."""
        self.model.zero_grad()
        torch.manual_seed(0)
        self.step(ids)
        found = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        self.model.zero_grad()
        return found


@bench_command("losses", threads=True)
@click.option("--trains", type=click.Choice(TRAINS), multiple=True, default=TRAINS, help="What is trained.")
@click.option("--how", type=click.Choice([*COMPILED]), multiple=True, default=[*COMPILED], help="How the step runs.")
@rounds_option(9, "Steps of each.")
def command(trains: Sequence[str], how: Sequence[str], rounds: int) -> Iterator[Report]:
    """Train with the loss in chunks of tokens and with torch's: time, memory, gradient.

    Example: fewbit bench losses --trains "all weights" --how eager
    """
    here, rows = this_machine(), []
    cases = [(t, h) for t in trains for h in how]
    for case in with_progress(cases, len(cases), "measuring"):
        rows.append(measure(*case, rounds))
        settings = {"words": WORDS, "tokens": TOKENS, "width": WIDTH, "rounds": rounds}
        values = {"torch": here.torch, "threads": here.threads, **settings, "rows": [row.to_dict() for row in rows]}
        yield Report(values, [f"torch {here.torch}, {here.where}, processor time", *_lines(rows)])


def measure(trains: str, how: str, rounds: int = 9) -> Row:
    """Return one row; both losses take turns after two rounds of warm-up."""
    torch.compiler.reset()  # else Dynamo would compile no more of the same code after eight models
    ids, model = tokens(), model_of(trains)
    plain, chunked = (Training(model, how, chunks) for chunks in (False, True))
    true = plain.gradients(ids)
    difference = float((chunked.gradients(ids) - true).norm() / true.norm())
    runs = {"torch": partial(plain.step, ids), "chunked": partial(chunked.step, ids)}
    freed = {"torch": plain.model.zero_grad, "chunked": chunked.model.zero_grad}
    times = take_turns(runs, rounds, clock=computing, after=lambda who: freed[who](), rotate=True)
    middles = 1000 * times.median("torch"), 1000 * times.median("chunked")
    peaks = _peak_apart(trains, how, False), _peak_apart(trains, how, True)
    return Row(trains, how, *middles, times.ratio("chunked", to="torch"), *peaks, difference)


def _peak_apart(trains: str, how: str, chunked: bool) -> int | None:
    try:
        return call_apart(peak_of_step, trains, how, chunked, torch.get_num_threads())
    except ProcessDied:
        return None


def peak_of_step(trains: str, how: str, chunked: bool, threads: int) -> int | None:
    """Return how far resident memory rises in a step, after two that compile and allocate gradients."""
    return_freed_memory()  # at once: blocks that malloc has kept are used again
    torch.set_num_threads(threads)
    training, ids = Training(model_of(trains), how, chunked), tokens()

    def step() -> None:
        training.model.zero_grad(set_to_none=False)
        training.step(ids)

    step()
    step()
    return added_peak_bytes(step)


def _lines(rows: Sequence[Row]) -> list[str]:
    head = ("trains", "step", "torch ms", "chunked ms", "ratio", "peak MiB", "chunked", "gradient", "met")
    body = [
        (
            *(row.trains, row.how, f"{row.torch_ms:.0f}", f"{row.chunked_ms:.0f}", f"{row.ratio:.3f}"),
            *("" if peak is None else f"{peak / 2**20:.0f}" for peak in (row.torch_peak, row.chunked_peak)),
            *(f"{row.difference:.1e}", MET[row.met]),
        )
        for row in rows
    ]
    return list(columns([head, *body], left=2))
