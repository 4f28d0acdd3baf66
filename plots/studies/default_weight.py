"""Gradient errors of whole models by the weight that their tables are solved for: the evidence for a default weight.

    python -m fewbit.plots.studies.default_weight -o default-weight.json     resumes where it was broken off
    best(rows, bits=(2, 3))                                                  the candidate that the rule chooses

A table is best for one distribution of inputs. Here every activation of a model, and nothing else, is saved by tables
for one candidate; ‖g − ĝ‖ / ‖g‖ is the relative error of the gradient of all parameters, the mean over two batches.
Models are measured fresh and after exact training, in float32 and under bfloat16 autocast.

The rule: of the candidates whose error is nowhere above `WORST` times that of ``uniform:-10,10``, the one whose error
is least on average, relative to it.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from ...fewbit_gen import solve
from ...runtime.activations.modules import FewBitActivation
from ...runtime.convert.api import convert
from ...tables import Table
from .. import compact_json
from ..demo import trainer
from ..demo.data import digits, endless_batches, endless_windows, standard_library
from ..demo.settings import Size
from ..demo.small_networks import BERT, GPT2, Llama, ViT, resnet
from ..demo.trainer import Loss, Trainee, cross_entropy, learning_rate_factor, next_character

UNIFORM = "uniform:-10,10"
CANDIDATES: tuple[str, ...] = (
    UNIFORM,
    *(f"normal:0,{deviation}" for deviation in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3)),
    *(f"laplace:0,{scale}" for scale in (0.2, 0.3, 0.5, 1, 2)),
    *(f"{1 - share:g}*normal:0,{deviation}+{share}*{UNIFORM}" for deviation in (0.3, 0.5, 1) for share in (0.03, 0.1)),
    *(f"0.5*normal:0,{narrow}+0.5*normal:0,{wide}" for narrow, wide in ((0.2, 1), (0.3, 2), (0.5, 2))),
)
BITS = (1, 2, 3, 4)
DTYPES = ("float32", "bfloat16")
STEPS = 200  # of exact training
WORST = 1.1
_SIZE = Size(width=96, depth=4, heads=4, context=64)
_MASKED, _MASK = 0.15, 0  # share of characters that BERT predicts, and the code that stands for them


@dataclass(frozen=True)
class Case:
    """A model with its loss, and the batches that it is trained and measured on.

    Attributes:
        make: constructs the model.
        loss: of the model on a batch.
        batches: an endless stream, equal for equal seeds.
    """

    make: Callable[[], nn.Module]
    loss: Loss
    batches: Callable[[int], Iterator[Any]]


def masked_character(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss, in nats, of predicting masked characters of `windows` from all others."""
    windows = windows[:, :-1]  # a window is one character longer than the context
    draw = torch.Generator().manual_seed(int(windows.sum()))
    masked = torch.rand(windows.shape, generator=draw) < _MASKED
    return F.cross_entropy(model(windows.masked_fill(masked, _MASK))[masked], windows[masked])


def _windows(seed: int) -> Iterator[Tensor]:
    return endless_windows(_text(), 16, _SIZE.context, seed)


def _images(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    return endless_batches(_digits(), 64, seed)


@cache
def _text() -> Tensor:
    return standard_library().training


_digits = cache(digits)

CASES: Mapping[str, Case] = {
    "GPT-2": Case(partial(GPT2, _SIZE), next_character, _windows),
    "BERT": Case(partial(BERT, _SIZE), masked_character, _windows),
    "Llama": Case(partial(Llama, _SIZE), next_character, _windows),
    "ViT": Case(partial(ViT, _SIZE, pixels=8, patch=2), cross_entropy, _images),
    "ResNet with GELU": Case(partial(resnet, nn.GELU), cross_entropy, _images),
}


def measure(name: str, steps: int, candidates: Sequence[str] = CANDIDATES) -> list[dict[str, Any]]:
    """Return a row for each dtype and number of bits, of a model after so many steps of exact training."""
    case = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.make()
    stream = case.batches(0)
    train(model, case.loss, stream, steps)
    batches = [next(stream) for _ in range(2)]
    rows = []
    for dtype in DTYPES:
        exact = [gradient(model, case.loss, batch, dtype) for batch in batches]
        for bits in BITS:
            errors: dict[str, float] = {}
            for weight in candidates:
                few = with_tables(model, bits, weight)
                found = [gradient(few, case.loss, batch, dtype) for batch in batches]
                error = fmean(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
                errors[weight] = float(f"{error:.4g}")
            rows.append({"model": name, "steps": steps, "dtype": dtype, "bits": bits, "errors": errors})
    return rows


def gradient(model: nn.Module, loss: Loss, batch: Any, dtype: str) -> Tensor:
    """Return the gradient of all parameters as one float64 vector; in bfloat16 under autocast."""
    model.zero_grad()
    half = dtype == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        value = loss(model, batch)
    value.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def with_tables(model: nn.Module, bits: int, weight: str) -> nn.Module:
    """Return a copy of a model whose activations save codes of the tables for `weight`."""
    names = {module.activation for module in _converted(model, bits).modules() if isinstance(module, FewBitActivation)}
    return _converted(model, bits, {name: _table(name, bits, weight) for name in names})


def _converted(model: nn.Module, bits: int, tables: Mapping[str, Table] | None = None) -> nn.Module:
    return convert(copy.deepcopy(model), bits, tables=tables).model


@cache
def _table(activation: str, bits: int, weight: str) -> Table:
    return solve(activation, bits, weight=weight, certify=False)


def train(model: nn.Module, loss: Loss, batches: Iterable[Any], steps: int) -> None:
    """Train `model` exactly, in place, for so many steps."""
    if not steps:
        return
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    given = (batch for _, batch in zip(range(steps), batches, strict=False))
    trainer.train([Trainee(model, loss, optimizer, schedule, largest_gradient=1.0)], given)


def ratios(rows: Iterable[Mapping[str, Any]], bits: Sequence[int] = BITS) -> dict[str, list[float]]:
    """Return each candidate's errors relative to those of `UNIFORM` in the same case, in the order of `rows`."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["bits"] in bits:
            for weight, error in row["errors"].items():
                found.setdefault(weight, []).append(error / row["errors"][UNIFORM])
    return found


def best(rows: Iterable[Mapping[str, Any]], bits: Sequence[int] = BITS) -> str:
    """Return the candidate of least mean ratio among those that are nowhere above `WORST`."""
    allowed = {weight: values for weight, values in ratios(rows, bits).items() if max(values) <= WORST}
    return min(allowed, key=lambda weight: fmean(allowed[weight]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file does not have yet, write it after every model, and print all ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; what it has is not measured again")
    parser.add_argument("--model", action="append", choices=CASES, help="default: all")
    chosen = parser.parse_args(arguments)
    rows = json.loads(chosen.output.read_text())["rows"] if chosen.output.exists() else []
    done = {(row["model"], row["steps"]) for row in rows}
    for name in chosen.model or CASES:
        for steps in (0, STEPS):
            if (name, steps) in done:
                continue
            rows += measure(name, steps)
            print(name, steps, flush=True)
            compact_json.write(chosen.output, {"rows": rows})
    for bits in (*((b,) for b in BITS), (2, 3), BITS):
        print(f"{bits} bits: {best(rows, bits)}")
        for weight, values in sorted(ratios(rows, bits).items(), key=lambda item: fmean(item[1])):
            print(f"    {weight:40} {fmean(values):.3f}   {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
