"""Fine-tuning by transformers' Trainer with the callback, whole and with LoRA, beside exact training.

    python -m fewbit.plots.studies.trainer_callback -o plots/results/trainer-callback.json

A Llama of .8 million parameters is trained on the standard library's modules for 400 steps, exactly; then, for each
seed, fine-tuned for 200 steps on Python's reference manual, whole and with LoRA's adapters in all linear layers,
exactly (twice, the second time with weights nudged by 1e-6, which tells how far chance alone goes) and with each method
at 4 bits. All runs of a seed see the same batches. Validation is on the manual's last tenth.

What would refute it: a method's mean difference from exact training, over seeds, beyond the spread of exact training
over seeds.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.quantizers import PerGroup
from .. import compact_json
from ..demo.data import documentation, standard_library
from ..intervals import interval

LENGTH, BATCH, PRETRAINING, STEPS = 128, 8, 400, 200
EXACT, NUDGED = "exact", "exact, nudged"
METHODS: Mapping[str, Mapping[str, Any]] = {
    "L2, gated parts": {"method": {"level": "L2", "glu": "parts"}},
    "hooks, 4 bits": {"method": {"saved": PerGroup(4)}},
    "checkpoints, 4 bits": {"method": {"checkpoint": 4}},
    "plan, error 0.1": {"error": 0.1},
}
TUNINGS = ("whole", "LoRA")
Row = dict[str, Any]


def llama() -> Any:
    """Return the model, of four layers of width 128."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 128}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return LlamaForCausalLM(config)


def windows(text: Tensor) -> list[dict[str, Any]]:
    """Return a text in samples of `LENGTH` tokens."""
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).tolist()
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def _collated(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


def trained(model: nn.Module, data: list[Any], steps: int, rate: float, seed: int, callback: Any = None) -> Any:
    """Train a model by the Trainer; return the callback."""
    from transformers.trainer import Trainer
    from transformers.training_args import TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=rate,
            warmup_steps=steps // 20,
            seed=seed,
            save_strategy="no",
            logging_steps=steps,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        callbacks = [] if callback is None else [callback]
        Trainer(model, arguments, train_dataset=data, data_collator=_collated, callbacks=callbacks).train()  # pyright: ignore[reportArgumentType]
    return callback


@torch.no_grad()
def validated(model: nn.Module, data: list[Any]) -> float:
    """Return the mean loss on samples."""
    model.eval()
    batches = [_collated(data[i : i + 32]) for i in range(0, len(data), 32)]
    return fmean(float(model(**batch).loss) for batch in batches)


def runs_of(
    seed: int, tuning: str, names: Sequence[str], state: Mapping[str, Tensor], data: list[Any], held_out: list[Any]
) -> Iterator[Row]:
    """Yield a row for each of `names`."""
    from ...integrations.transformers import FewbitCallback

    for name in names:
        torch.manual_seed(seed)
        model = llama()
        model.load_state_dict(state)
        if name == NUDGED:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + 1e-6 * torch.randn_like(p))
        rate = 1e-3
        if tuning == "LoRA":
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(seed)
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05))
            rate = 3e-3
        callback = FewbitCallback(**METHODS[name]) if name in METHODS else FewbitCallback(method={})
        trained(model, data, STEPS, rate, seed, callback)
        assert callback.kept is not None
        row: Row = {"seed": seed, "tuning": tuning, "method": name, "loss": validated(model, held_out)}
        yield row | {"saved": callback.kept.saved, "peak": callback.kept.peak}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each way to train: its loss less exact training's, and the bytes of a step."""
    for tuning in TUNINGS:
        own = [row for row in rows if row["tuning"] == tuning]
        exact = {row["seed"]: row for row in own if row["method"] == EXACT}
        for name in dict.fromkeys(row["method"] for row in own):
            found = [row for row in own if row["method"] == name]
            gaps = [row["loss"] - exact[row["seed"]]["loss"] for row in found]
            losses = [row["loss"] for row in found]
            saved, peak = (found[0][key] / exact[found[0]["seed"]][key] for key in ("saved", "peak"))
            yield (
                f"{tuning:6} {name:20} loss {fmean(losses):.4f}, less exact {interval(gaps)};"
                f" saved ×{saved:.3f}, peak ×{peak:.3f}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the seeds that the file does not have yet, write it after each, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; seeds that it has are not run again")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows: list[Row] = json.loads(chosen.output.read_text())["runs"] if chosen.output.exists() else []
    torch.manual_seed(0)
    base = llama()
    trained(base, windows(standard_library().training), PRETRAINING, 2e-3, 0)
    manual = documentation()
    data, held_out = windows(manual.training), windows(manual.validation)
    for seed in range(chosen.seeds):
        for tuning in TUNINGS:
            had = {row["method"] for row in rows if (row["seed"], row["tuning"]) == (seed, tuning)}
            names = [name for name in (EXACT, NUDGED, *METHODS) if name not in had]
            if not names:
                continue
            rows += runs_of(seed, tuning, names, base.state_dict(), data, held_out)
            compact_json.write(chosen.output, {"steps": STEPS, "runs": rows})
        print(*lines(rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
