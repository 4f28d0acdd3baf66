"""Plans of large models that never run: Llama-3-8B in 16 to 80 GB, and how long a Llama-3-70B takes to plan.

    python -m fewbit.plots.studies.planner_estimated -o plots/results/planner-estimated.json
    fewbit plan fewbit.plots.studies.planner_estimated:lora --meta --memory 48GB --gpu h100 --optimizer adamw-fused

One sequence of 4,096 tokens or of 32,768, bfloat16 or bitsandbytes' 4 bits, fused AdamW, an H100: bytes are counted on
the meta device, errors and times are estimated.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
MEMORIES = (16, 24, 48, 80)  # GB
RANK = 16


def lora(name: str = "llama-3-8b", sequence: int = 4096, bits: int = 16) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model on the meta device whose linear layers have adapters in float32, and a batch of one sequence.

    Args:
        name: of the model.
        sequence: tokens.
        bits: of the weights of all linear layers but the head: 16, or 4 by bitsandbytes.
    """
    from peft import LoraConfig, get_peft_model

    model, batch = whole(name, sequence)
    if bits == 4:
        in_4_bits(model)
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


def in_4_bits(model: nn.Module) -> None:
    """Put bitsandbytes' layers of 4 bits, with scales in 8 bits, in place of all linear ones but a head."""
    for module in [*model.modules()]:
        for name, layer in module.named_children():
            if type(layer) is nn.Linear and name != "lm_head":
                module.register_module(name, _in_4_bits(layer))


def _in_4_bits(layer: nn.Linear) -> nn.Module:
    """Return what bitsandbytes makes of a layer when it is moved to a GPU, which the meta device does not do."""
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    layers: Any = bitsandbytes.nn
    count, dtype, meta = layer.weight.numel(), layer.weight.dtype, torch.device("meta")
    numbers = {"code": torch.empty(256, device=meta), "blocksize": 256, "dtype": torch.float32}
    of_scales = QuantState(absmax=torch.empty(-(-count // (64 * 256)), device=meta), **numbers)
    state = QuantState(
        absmax=torch.empty(count // 64, dtype=torch.uint8, device=meta),
        shape=layer.weight.shape,
        code=torch.empty(16, device=meta),
        blocksize=64,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.empty((), device=meta),
        state2=of_scales,
    )
    sizes = layer.in_features, layer.out_features
    found = layers.Linear4bit(*sizes, layer.bias is not None, compute_dtype=dtype, quant_type="nf4", device=meta)
    codes = torch.empty(count // 2, 1, dtype=torch.uint8, device=meta)
    how = {"requires_grad": False, "quant_state": state, "blocksize": 64, "quant_type": "nf4"}
    found.weight = layers.Params4bit(codes, bnb_quantized=True, module=found, **how)
    return found


Make = Callable[[], tuple[nn.Module, dict[str, Any]]]
# Memories in GB of each.
TRAININGS: Mapping[str, tuple[Sequence[int], Make]] = {
    "LoRA": (MEMORIES, lora),
    "4-bit weights, LoRA": ((16, 24), partial(lora, bits=4)),
    "32,768 tokens, LoRA": ((80,), partial(lora, sequence=32768)),
    "all weights": ((24, 48, 80), whole),
}


def planned(training: str, memory: int, make: Make) -> Row:
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
    gc.disable()  # collections took a fifth of the time, as `fewbit.plan` knows; what they free is little
    rows = [planned(name, memory, make) for name, (memories, make) in TRAININGS.items() for memory in memories]
    rows.append(planned("LoRA of Llama-3-70B", 200, lambda: lora("llama-3-70b")))
    compact_json.write(chosen.output, {"torch": torch.__version__, "gpu": GPU, "rows": rows})
    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    main()
