"""`fewbit bench alternatives`: every way to train with less memory, on the kinds of models that people train.

    for row in measure("llama"): row.way, row.kept, row.peak, row.time, row.error

For each task a model is copied once for each way; all take turns step by step. Memory is that of torch's allocator in
one step, eager or compiled, beside parameters: what is held between the passes, and the most at any time, with the
gradients. Errors are of one step's gradient, relative to the exact one; dropout is off, for compiled code draws other
masks.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ...cli.progress import with_progress
from ...runtime.compile.backend import with_budget
from ...runtime.convert.api import convert
from ...runtime.memory.allocator import allocations, mark
from ...runtime.plan.planner import fit
from ...runtime.plan.static import static_bytes
from ...runtime.quantizers import PerGroup
from ...runtime.saved.checkpoint import checkpoint, outermost_blocks
from ...runtime.saved.hooks import compress_saved_tensors
from ...tables import FewbitError
from ...tables.columns import columns
from ..studies.planner import Batch, gpt2, gradient_of, llama, mixtral, resnet, vit, without_dropout
from .report import Report, bench_command, rounds_option, this_machine
from .timing import clock_of, take_turns

aten = torch.ops.aten
DRAWS = 3  # of rounding, over which errors are averaged
EXACT, CHECKPOINTING = "exact", "checkpointing"


def _lora() -> tuple[nn.Module, Batch]:
    """Return the Llama with LoRA's adapters in all linear layers; raise FewbitError without peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise FewbitError("the task lora takes peft: pip install peft") from None
    model, batch = llama()
    adapted: Any = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))  # pyright: ignore[reportArgumentType]
    return adapted, batch


def _long() -> tuple[nn.Module, Batch]:
    """Return a deeper Llama, width 128, and one sequence of 2,048 tokens."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": 12, "hidden_size": 128, "intermediate_size": 352, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    ids = torch.randint(0, 512, (1, 2048))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


TASKS: Mapping[str, tuple[str, Callable[[], tuple[nn.Module, Batch]]]] = {
    "gpt2": ("GPT-2, 4 layers of 256, 16 x 128 tokens", gpt2),
    "llama": ("Llama, 4 layers of 256, 16 x 128 tokens", llama),
    "lora": ("the same Llama with LoRA of rank 16", _lora),
    "long": ("Llama, 12 layers of 128, 1 x 2,048 tokens", _long),
    "vit": ("ViT, 4 layers of 192, 16 images of 96 x 96", vit),
    "cnn": ("ResNet-18 of half the width, 32 images of 64 x 64", resnet),
    "experts": ("Mixtral, 4 layers of 128, 4 experts, 16 x 128 tokens", mixtral),
}
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        prepare: changes a model in place; returns what to call, if not the model.
        around: makes the context of a forward pass.
    """

    prepare: Callable[[nn.Module], Any] = lambda model: None
    around: Around = nullcontext


@dataclass(frozen=True)
class Float8:
    """A quantizer that saves tensors as float8 (e4m3), each with a scale, as trainings in fp8 save their operands."""

    def compress(self, x: Tensor) -> "Float8Compressed":
        """Return `x` compressed."""
        scale = x.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return Float8Compressed((x / scale).to(torch.float8_e4m3fn), scale)


@dataclass(frozen=True)
class Float8Compressed:
    """A tensor in float8 and its scale, whose dtype is the tensor's."""

    codes: Tensor
    scale: Tensor

    def decompress(self) -> Tensor:
        """Return the tensor."""
        return self.codes.to(self.scale.dtype) * self.scale

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.codes.nbytes + self.scale.nbytes


def _compiled(backend: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=backend, **options)


def _unchanged(prepare: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    """Return `prepare` without its result, for what changes a model in place."""

    def prepared(model: nn.Module) -> None:
        prepare(model)

    return prepared


def _layers_in_checkpoints(model: nn.Module) -> None:
    convert(model, level="L2")
    checkpoint(model, bits=8)


# What torch recommends to save in selective checkpointing: results of matrix products, convolutions and attention, of
# which all but the last are its compiler's `compute_intensive_ops` too.
_SAVED = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def _checkpointed(model: nn.Module, saved: Sequence[Any] = ()) -> None:
    """Surround each block with torch's own checkpoint, which saves what the ops `saved` return."""
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, [*saved])} if saved else {}
    for name in outermost_blocks(model):
        block = model.get_submodule(name)
        vars(block)["forward"] = partial(torch_checkpoint, block.forward, use_reentrant=False, **contexts)


def _compiled_checkpoints(model: nn.Module, saved: Sequence[Any] = ()) -> Any:
    """Compile a model whose blocks are in torch's checkpoint, as everybody does who compiles and checkpoints."""
    _checkpointed(model, saved)
    return torch.compile(model)


WAYS: Mapping[str, Way] = {
    EXACT: Way(),
    CHECKPOINTING: Way(_unchanged(partial(checkpoint, bits=None))),
    "selective checkpointing": Way(partial(_checkpointed, saved=_SAVED)),
    "save_on_cpu": Way(around=torch.autograd.graph.save_on_cpu),
    "float8, hooks": Way(around=lambda: compress_saved_tensors(Float8())),
    "activations, 3 bits": Way(_unchanged(partial(convert, bits=3))),
    "L2": Way(_unchanged(partial(convert, level="L2"))),
    "L2, gated parts": Way(_unchanged(partial(convert, level="L2", glu="parts"))),
    "L3": Way(_unchanged(partial(convert, level="L3"))),
    "hooks, 4 bits": Way(around=lambda: compress_saved_tensors(PerGroup(4))),
    "L2, parts, hooks": Way(
        _unchanged(partial(convert, level="L2", glu="parts")), lambda: compress_saved_tensors(PerGroup(4))
    ),
    "L2, hooks": Way(_unchanged(partial(convert, level="L2")), lambda: compress_saved_tensors(PerGroup(4))),
    "checkpoints, 8 bits": Way(_unchanged(partial(checkpoint, bits=8))),
    "checkpoints, 4 bits": Way(_unchanged(partial(checkpoint, bits=4))),
    "L2 in checkpoints": Way(_layers_in_checkpoints),
}
# Where there is a device, whose host has other memory.
ON_DEVICE: Mapping[str, Way] = {"compile, save_on_cpu": Way(_compiled("inductor"), torch.autograd.graph.save_on_cpu)}
PLAN, COMPILED_PLAN = "plan, same peak", "compile, plan, same peak"  # as checkpointing
COMPILED: Mapping[str, Way] = {
    "compile": Way(_compiled("inductor")),
    "compile, checkpointing": Way(_compiled_checkpoints),
    "compile, selective": Way(partial(_compiled_checkpoints, saved=_SAVED)),
    "compile, budget 0.5": Way(_compiled(with_budget(0.5))),
    "compile, budget 0.25": Way(_compiled(with_budget(0.25))),
    "compile, fewbit": Way(_compiled("fewbit")),
    "compile, fewbit 4": Way(_compiled("fewbit", options={"bits": 4})),
}
_OF_GATES, _OTHERS = ("L2, gated parts", "L2, parts, hooks"), ("L2, hooks",)  # where there are gates, and where none
_WITHOUT_GATES = ("gpt2", "vit", "cnn", "experts")


@dataclass(frozen=True)
class Row:
    """One way to train on one task.

    Attributes:
        task, way: names.
        kept: bytes between the passes, with the model's output.
        peak: most bytes at once, with the parameters' gradients.
        time: median over rounds of a step's time divided by the exact one's.
        error: relative error of the gradient.
        wrong: the error that the way ended with; all else is then 0.
    """

    task: str
    way: str
    kept: int = 0
    peak: int = 0
    time: float = 0.0
    error: float = 0.0
    wrong: str = ""


class Training:
    """A model that is trained in one way.

    Args:
        model: changed in place.
        batch: keywords of the model.
        way: to train.
    """

    def __init__(self, model: nn.Module, batch: Batch, way: Way) -> None:
        self.model, self.batch, self.way = model, batch, way
        prepared = way.prepare(model)
        self.call: Any = model if prepared is None else prepared

    def step(self) -> Any:
        """Run both passes; return the output."""
        self.model.zero_grad()
        with self.way.around():
            output = self.call(**self.batch)
        mark()
        output.loss.backward()
        return output

    def gradient(self, seed: int) -> Tensor:
        """Return the gradient of a step whose rounding is that of `seed`."""
        torch.manual_seed(seed)
        self.step()
        return gradient_of(self.model)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes kept between the passes, and the peak."""
        self.step()  # compiles, and lets mixed precision see a gradient
        self.model.zero_grad()
        gc.collect()
        record = allocations(self.step, device)
        before = record.marks[0] - 1
        return int(record.levels[before]) if before >= 0 else 0, record.peak


def measure(task: str, ways: Sequence[str], rounds: int, device: str = "cpu") -> list[Row]:
    """Return a row for each way on a task, the exact one first.

    Args:
        task: of `TASKS`.
        ways: of `WAYS`, `COMPILED`, `ON_DEVICE`, `PLAN` and `COMPILED_PLAN`, the first of them `EXACT`.
        rounds: timed steps of each, in turn.
        device: "cpu" or "cuda".

    Raises:
        FewbitError: the task takes a library that is not installed.
    """
    from torch._dynamo import config

    # Copies of a model share their code, of which Dynamo compiles few versions.
    with config.patch(recompile_limit=4 * len(ways)):
        return _measured(task, ways, rounds, device)


def _measured(task: str, ways: Sequence[str], rounds: int, device: str) -> list[Row]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, batch = TASKS[task][1]()
    without_dropout(model).train().to(device)
    batch = {name: x.to(device) for name, x in batch.items()}
    trainings: dict[str, Training] = {}
    memory: dict[str, tuple[int, int]] = {}
    wrong: dict[str, str] = {}
    for name in ways:
        try:
            way = {**WAYS, **COMPILED, **ON_DEVICE}.get(name) or _plan_for(
                memory[CHECKPOINTING][1], model, batch, name != PLAN
            )
            training = Training(copy.deepcopy(model), batch, way)
            memory[name] = training.memory(torch.device(device))
            trainings[name] = training
        except (FewbitError, RuntimeError) as error:  # such as a graph that a compiler refuses
            wrong[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    exact = trainings[EXACT].gradient(0)
    errors = {
        name: fmean(float((t.gradient(1 + i) - exact).norm() / exact.norm()) for i in range(DRAWS))
        for name, t in trainings.items()
    }
    runs = {name: training.step for name, training in trainings.items()}
    times = take_turns(runs, rounds, clock=clock_of(device), warm_up=1)
    return [
        Row(task, name, wrong=wrong[name])
        if name in wrong
        else Row(task, name, *memory[name], times.ratio(name, to=EXACT), errors[name])
        for name in ways
    ]


def _plan_for(peak: int, model: nn.Module, batch: Batch, compiled: bool) -> Way:
    """Return the way of a plan whose step has a peak that was measured, beside parameters and optimizer."""
    static = static_bytes(model, "sgd")
    memory = static.parameters + static.optimizer + peak
    return Way(_unchanged(lambda own: fit(own, batch, memory=memory, optimizer="sgd", compiled=compiled)))


def ways_of(task: str, compiled: bool, device: str = "cpu") -> list[str]:
    """Return the names of the ways that a task is measured with."""
    out = _OF_GATES if task in _WITHOUT_GATES else _OTHERS
    on_device = ON_DEVICE if device != "cpu" else ()
    return [
        *(name for name in WAYS if name not in out),
        PLAN,
        *((*COMPILED, *on_device, COMPILED_PLAN) if compiled else ()),
    ]


@bench_command("alternatives", threads=True, device=True)
@click.option("--task", "tasks", multiple=True, type=click.Choice([*TASKS]), help="Repeat for several.  [default: all]")
@click.option("--compiled/--no-compiled", default=True, help="Measure torch.compile too, which takes minutes.")
@rounds_option(7, "Timed steps of each.")
def command(device: str, tasks: Sequence[str], compiled: bool, rounds: int) -> Iterator[Report]:
    """Train in every way that saves memory: kept, peak, time and error.

    Checkpointing, whole and selective, eager and compiled, torch.compile's budgets, save_on_cpu, float8, and fewbit's
    methods, plans and compile backend, on small models of the kinds that people train: GPT-2, Llama, the same with
    LoRA, with a long context, a ViT, a ResNet, a mixture of experts.

    Example: fewbit bench alternatives --task llama --no-compiled
    """
    rows: list[Row] = []
    chosen = tasks or [*TASKS]
    for task in with_progress(chosen, len(chosen), "tasks"):
        rows += measure(task, ways_of(task, compiled, device), rounds, device)
        here = this_machine(device)
        values = {"torch": here.torch, "threads": here.threads, "device": here.device, "rounds": rounds}
        yield Report({**values, "rows": [asdict(row) for row in rows]}, [*lines_of(rows, here.where)])


def lines_of(rows: Sequence[Row], where: str) -> Iterator[str]:
    """Yield a table for each task."""
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        exact = own[0]
        body = [
            (row.way, row.wrong, "", "", "")
            if row.wrong
            else (
                *(row.way, f"{row.kept / exact.kept:.3f}", f"{row.peak / exact.peak:.3f}"),
                *(f"{row.time:.2f}", f"{row.error:.4f}"),
            )
            for row in own
        ]
        yield f"{TASKS[task][0]}, {where}"
        yield from columns([("way", "kept", "peak", "time", "error of the gradient"), *body], left=1)
        yield ""
    yield "Kept, peak and time are relative to the exact step."
