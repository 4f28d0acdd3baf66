"""Plans of large models that never run: Llama-3-8B in 24, 48 and 80 GB, and how long a Llama-3-70B takes to plan.

    python -m fewbit.plots.studies.planner_estimated -o plots/results/planner-estimated.json
    fewbit plan fewbit.plots.studies.planner_estimated:lora --meta --memory 48GB --gpu h100 --optimizer adamw-fused

One sequence of 4,096 tokens, bfloat16, fused AdamW, an H100: bytes are counted on the meta device, errors and times are
estimated.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...runtime.plan.eager_planner import Planner
from ...runtime.plan.problem import Limits, Price
from ...runtime.plan.static import static_bytes
from ...runtime.plan.step import Step
from ...runtime.plan.zoo import build, inputs
from ...tables import FewbitError
from .. import compact_json

Row = dict[str, Any]
GPU, OPTIMIZER = "h100", "adamw-fused"
MEMORIES = (24, 48, 80)  # GB
RANK = 16


def lora(name: str = "llama-3-8b", sequence: int = 4096) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model on the meta device whose linear layers have adapters in float32, and a batch of one sequence."""
    from peft import LoraConfig, get_peft_model

    model, batch = whole(name, sequence)
    options = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        adapted = get_peft_model(model, options)  # pyright: ignore[reportArgumentType]
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted, batch


def whole(name: str = "llama-3-8b", sequence: int = 4096) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model on the meta device, all of whose weights learn, and a batch of one sequence."""
    ids = inputs(name, 1, sequence)["input_ids"]
    return build(name, sequence, dtype=torch.bfloat16), {"input_ids": ids, "labels": ids}


TRAININGS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {"LoRA": lora, "all weights": whole}


def planned(training: str, memory: int, make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> Row:
    """Return what a plan for so many GB says, or the least memory of any plan; and the seconds that it took."""
    model, batch = make()
    step = Step(model, (), batch)
    static = static_bytes(model, OPTIMIZER)
    planner = Planner(step, Limits(memory=memory * 10**9), Price(), static, GPU, True, False)
    start = time.perf_counter()
    known = planner.measured_eagerly()
    traced = time.perf_counter()
    row: Row = {"training": training, "memory": memory}
    try:
        plan = planner.best_eager(known)
    except FewbitError as error:
        row["refused"] = str(error)
    else:
        saved = {"saved": plan.saved, "exact_saved": plan.exact_saved}
        peak = {"peak": plan.peak.total, "exact_peak": plan.exact_peak}
        row |= {**peak, **saved, "error": plan.error, "bias": plan.bias, "time": plan.time}
    solved = time.perf_counter()
    return {**row, "tracing_seconds": traced - start, "planning_seconds": solved - traced}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each plan."""
    for row in rows:
        took = f"({row['tracing_seconds']:.1f} s to trace, {row['planning_seconds']:.1f} s to plan)"
        head = f"{row['training']:24} {row['memory']:4} GB: "
        if "refused" in row:
            yield f"{head}{row['refused']} {took}"
            continue
        gib = [row[key] / 2**30 for key in ("peak", "exact_peak", "saved", "exact_saved")]
        yield (
            f"{head}error {row['error']:.4f}, time {row['time']:.3f}, peak {gib[0]:.1f} of {gib[1]:.1f} GiB, "
            f"saved {gib[2]:.1f} of {gib[3]:.1f} GiB {took}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan for each training and memory, write the file, and print the plans."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON")
    chosen = parser.parse_args(arguments)
    rows = [planned(name, memory, make) for name, make in TRAININGS.items() for memory in MEMORIES]
    rows.append(planned("LoRA of Llama-3-70B", 200, lambda: lora("llama-3-70b")))
    compact_json.write(chosen.output, {"torch": torch.__version__, "gpu": GPU, "rows": rows})
    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    main()
