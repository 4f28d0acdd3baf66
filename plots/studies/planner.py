"""Plans against what is measured: peak, error and time, beside uniform bits, ActNN, and gradient checkpointing.

    python -m fewbit.plots.studies.planner -o plots/results/planner.json

Five small models of `transformers`, on the CPU, eagerly. For each

    budgets     plans for 20 memories from the least to that of exact training: peak and error, predicted and measured
    uniform     hooks with 2, 3, 4 and 6 bits for all tensors, and ActNN's level L3: their peak and error, and the error
                of the plan for the same peak that has the least error
    blocks      `torch.utils.checkpoint` around every block: its peak and time, and the time of plans for the same peak,
                by the default price and with time weighing ten times as much; steps of all in turn

Peaks are those of torch's allocator, the scratch memory of kernels included, with parameters and the state of AdamW.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.convert.api import convert, revert
from ...runtime.memory.allocator import allocations
from ...runtime.plan.document import Choice, Plan
from ...runtime.plan.eager_planner import Planner
from ...runtime.plan.planner import fit
from ...runtime.plan.problem import Limits, Price
from ...runtime.plan.static import static_bytes
from ...runtime.plan.step import Step
from ...runtime.quantizers import PerGroup
from ...runtime.saved.checkpoint import blocks_of
from ...runtime.saved.hooks import compress_saved_tensors
from ...tables import FewbitError
from .. import compact_json

BUDGETS = 20
UNIFORM = (2, 3, 4, 6)
DRAWS = 3
_VOCABULARY = 512

Batch = Mapping[str, Tensor]


def _tokens(count: int, length: int = 128) -> Batch:
    ids = torch.randint(0, _VOCABULARY, (count, length))
    return {"input_ids": ids, "labels": ids}


def _images(count: int, size: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(0, 10, (count,))}


def gpt2() -> tuple[nn.Module, Batch]:
    """Return GPT-2 of four layers, width 256, and 16 × 128 tokens."""
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": _VOCABULARY, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)), _tokens(16)


def llama() -> tuple[nn.Module, Batch]:
    """Return a Llama of four layers, width 256, and 16 × 128 tokens."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 704,
        "vocab_size": _VOCABULARY,
    }
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return LlamaForCausalLM(config), _tokens(16)


def vit() -> tuple[nn.Module, Batch]:
    """Return a ViT of four layers, width 192, and 16 images of 96 pixels."""
    from transformers.models.vit import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_attention_heads": 4,
    }
    config = ViTConfig(**sizes, image_size=96, patch_size=8)
    config.num_labels = 10
    return ViTForImageClassification(config), _images(16, 96)


def resnet() -> tuple[nn.Module, Batch]:
    """Return a ResNet-18 of an eighth to half the width, and 32 images of 64 pixels."""
    from transformers.models.resnet import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[32, 64, 128, 256], embedding_size=32, layer_type="basic")
    config.num_labels = 10
    return ResNetForImageClassification(config), _images(32, 64)


def mixtral() -> tuple[nn.Module, Batch]:
    """Return a mixture of four experts, four layers, width 128, and 16 × 128 tokens."""
    from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": _VOCABULARY,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, use_cache=False)), _tokens(16)


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model with dropout off, whose masks differ between compilations."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def gradient_of(model: nn.Module) -> Tensor:
    """Return the gradients of a model's parameters in one vector, in float64."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "resnet": resnet,
    "mixtral": mixtral,
}

Row = dict[str, Any]


class Bench:
    """One model and what is measured of it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model, batch = MODELS[name]()
        self.batch = dict(batch)
        self.model.train()
        self.static = static_bytes(self.model, "adamw")
        self.fixed = self.static.parameters + self.static.optimizer
        start = time.perf_counter()
        self.known = self.planner(Limits(error=1.0)).measured_eagerly()
        self.measuring = time.perf_counter() - start
        self.exact = self.gradient(0)

    def planner(self, limits: Limits, price: Price | None = None) -> Planner:
        """Return a planner for the model within limits."""
        step = Step(self.model, (), self.batch)
        return Planner(step, limits, price or Price(), self.static, None, True)

    def plan(self, limits: Limits, price: Price | None = None) -> Plan:
        """Return a plan within limits."""
        return self.planner(limits, price).solved(self.known)

    def step(self, around: AbstractContextManager[Any] | None = None) -> Any:
        """Run a step; return the model's output."""
        with around or nullcontext():
            output = self.model(**self.batch)
        output.loss.backward()
        return output

    def gradient(self, seed: int, around: AbstractContextManager[Any] | None = None) -> Tensor:
        """Return the gradient of a step whose dropout is always the same, and whose rounding is that of `seed`."""
        self.model.zero_grad()
        torch.manual_seed(seed)
        if any(isinstance(m, nn.Dropout) and m.p for m in self.model.modules()):
            torch.manual_seed(0)
        self.step(around)
        return gradient_of(self.model)

    def error(self, make: Callable[[], AbstractContextManager[Any]] = nullcontext) -> float:
        """Return the mean relative error of the gradient over draws."""
        draws = [self.gradient(seed, make()) for seed in range(1, 1 + DRAWS)]
        return fmean(float((g - self.exact).norm() / self.exact.norm()) for g in draws)

    def peak(self, around: AbstractContextManager[Any] | None = None) -> int:
        """Return the peak of a step, with what is there throughout."""
        self.model.zero_grad()
        gc.collect()
        taken = allocations(lambda: self.step(around), torch.device("cpu")).peak
        gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        return self.fixed + max(taken, gradients + self.static.update)

    def seconds(self) -> float:
        """Return the time of a step."""
        self.model.zero_grad()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    # ---- what is measured --------------------------------------------------------------------------------------------

    def budgets(self) -> Iterator[Row]:
        """Yield plans for memories from the least to that of exact training, predicted and measured."""
        least = self.plan(Limits(error=1.0))
        for i in range(BUDGETS):
            budget = int(least.peak.total + (least.exact_peak - least.peak.total) * i / (BUDGETS - 1)) + 1
            plan = self.plan(Limits(memory=budget))
            fitted = fit(self.model, plan=plan)
            row = {"budget": budget, "peak": plan.peak.total, "measured_peak": self.peak(), "error": plan.error}
            row |= {"measured_error": self.error(), "gap": plan.gap, "time": plan.time, "exact": plan.exact_peak}
            fitted.undo()
            yield {"model": self.name, "part": "budgets", **row}

    def uniform(self) -> Iterator[Row]:
        """Yield uniform bits and ActNN's L3, with the plan for the same peak."""
        for bits in UNIFORM:
            quantizer = PerGroup(bits)
            peak = self.peak(compress_saved_tensors(quantizer, finer=False))
            error = self.error(lambda quantizer=quantizer: compress_saved_tensors(quantizer, finer=False))
            yield self._beside(f"{bits} bits", peak, error)
        convert(self.model, level="L3")
        for _ in range(3):  # sensitivities are averages
            self.step()
        peak, error = self.peak(), self.error()
        revert(self.model)
        yield self._beside("L3", peak, error)

    def _beside(self, name: str, peak: int, error: float) -> Row:
        found = {"model": self.name, "part": "uniform", "method": name, "peak": peak, "error": error}
        try:
            plan = self.plan(Limits(memory=peak), Price(time=1e-5))
        except FewbitError:  # a plan gives some tensors more bits
            return found
        fitted = fit(self.model, plan=plan)
        found |= {"plan_peak": self.peak(), "plan_error": self.error()}
        fitted.undo()
        return found

    def blocks(self, runs: int = 7) -> Iterator[Row]:
        """Yield checkpointing around every block, with the plan for the same peak; steps in turn."""
        names = blocks_of(self.model)
        outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        exact = self.plan(Limits(memory=1 << 50))
        options = self.planner(Limits(error=1.0)).problem(self.known).options
        blocks = [o for o in options if o.method == "recompute" and o.bits is None and o.target in outermost]
        recomputed, covered = [o.target for o in blocks], {i for o in blocks for i in o.covers}
        choices = tuple(choice for i, choice in enumerate(exact.choices) if i not in covered) + tuple(
            Choice(name, "recompute", None, 0, 0, 0.0, 0.0, 0.0) for name in recomputed
        )
        checkpointing = replace(exact, choices=choices)
        fitted = fit(self.model, plan=checkpointing)
        peak = self.peak()
        fitted.undo()
        start = time.perf_counter()
        plan = self.plan(Limits(memory=peak))
        planning = time.perf_counter() - start
        fast = self.plan(Limits(memory=peak), Price(time=1.0))
        ways: dict[str, Plan | None] = {"exact": None, "checkpointing": checkpointing, "plan": plan, "fast": fast}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(runs + 1):
            for name, way in ways.items():
                running = None if way is None else fit(self.model, plan=way)
                self.seconds()
                taken = self.seconds()
                if run:
                    times[name].append(taken)
                if running is not None:
                    running.undo()
        fitted = fit(self.model, plan=plan)
        row = {"peak": peak, "plan_peak": self.peak(), "plan_error": self.error(), "plan_time": plan.time}
        row |= {"measuring_s": self.measuring, "planning_s": planning}
        fitted.undo()
        fitted = fit(self.model, plan=fast)
        row |= {"fast_error": self.error(), "fast_time": fast.time, "blocks": len(recomputed)}
        fitted.undo()
        yield {"model": self.name, "part": "blocks", **row, **{f"{n}_s": median(t) for n, t in times.items()}}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what a reader wants to know of the rows."""
    for name in MODELS:
        own = [row for row in rows if row["model"] == name]
        budgets = [row for row in own if row["part"] == "budgets"]
        if budgets:
            peaks = [row["measured_peak"] / row["peak"] for row in budgets]
            above = sum(row["measured_peak"] > row["budget"] for row in budgets)
            errors = [r["measured_error"] / r["error"] for r in budgets if r["error"] > 0]
            near = sum(1 / 1.5 <= e <= 1.5 for e in errors)
            yield (
                f"{name:8} {len(budgets)} budgets: measured peak/predicted {min(peaks):.4f} to {max(peaks):.4f}, "
                f"{above} above the budget; error measured/predicted {min(errors):.2f} to {max(errors):.2f}, "
                f"{near} of {len(errors)} within 1.5"
            )
        for row in (row for row in own if row["part"] == "uniform"):
            if "plan_error" not in row:
                yield f"{name:8} {row['method']:7} error {row['error']:.4f}, and no plan of so little memory"
                continue
            ratio = row["plan_error"] / row["error"] if row["error"] else float("nan")
            yield (
                f"{name:8} {row['method']:7} error {row['error']:.4f}, plan at its peak {row['plan_error']:.4f} "
                f"(×{ratio:.2f}), peaks {row['peak'] / 1e6:.1f} and {row['plan_peak'] / 1e6:.1f} MB"
            )
        for row in (row for row in own if row["part"] == "blocks"):
            one, two, three = (row[f"{way}_s"] / row["exact_s"] for way in ("checkpointing", "plan", "fast"))
            yield (
                f"{name:8} checkpointing ×{one:.3f}, plan at its peak ×{two:.3f} (÷ {two / one:.3f}; predicted "
                f"{row['plan_time']:.3f}), error {row['plan_error']:.4f}; with time ×10 in the price ×{three:.3f} "
                f"(÷ {three / one:.3f}; {row['fast_time']:.3f}), error {row['fast_error']:.4f}; "
                f"peaks {row['peak'] / 1e6:.1f} and {row['plan_peak'] / 1e6:.1f} MB; "
                f"measured in {row['measuring_s']:.1f} and planned in {row['planning_s']:.1f} s"
            )


PARTS = ("budgets", "uniform", "blocks")


def options_of(parts: Sequence[str], description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a study's options: the file, models, parts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; what it has is not measured again")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--part", action="append", choices=parts, help="default: all")
    return parser


def measure_missing(
    output: Path,
    models: Iterable[str],
    parts: Sequence[str],
    make: Callable[[str], Any],
    lines: Callable[[Sequence[Row]], Iterable[str]],
) -> None:
    """Measure what a file does not have yet, write it after every part, and print what came out.

    Args:
        output: the file.
        models: names.
        parts: names of the bench's methods that yield rows.
        make: makes the bench of a model, if anything is to be measured of it.
        lines: of rows, what a reader wants to know.
    """
    rows: list[Row] = json.loads(output.read_text())["rows"] if output.exists() else []
    for name in models:
        todo = [p for p in parts if not any(r["model"] == name and r["part"] == p for r in rows)]
        bench = make(name) if todo else None
        for part in todo:
            rows += getattr(bench, part)()
            compact_json.write(output, {"torch": torch.__version__, "rows": rows})
            print(*lines([r for r in rows if r["model"] == name and r["part"] == part]), sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file does not have yet, write it after every part, and print what came out."""
    chosen = options_of(PARTS, main.__doc__).parse_args(arguments)
    measure_missing(chosen.output, chosen.model or MODELS, chosen.part or PARTS, Bench, lines)


if __name__ == "__main__":
    main()
