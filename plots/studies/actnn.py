"""Training at ActNN's levels beside exact training: a small ResNet and a small transformer, several seeds.

    for seed in range(3): runs += train(TASKS["resnet"](), VARIANTS, seed)

All variants of a seed start from the same weights and see the same batches. The forward pass is exact, so their first
losses are equal. They take turns step by step, so that other load on the machine slows all of them equally.

The last two variants are those of Appendix E of the Few-bit Backward paper: layers at 4 bits, and GELU at 2 bits by
either method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.convert.api import convert
from ...runtime.layers import Activation
from ...runtime.plan.memory import profile, profile_call
from ..demo import trainer
from ..demo.data import Corpus, Images, digits, random_windows, spread_windows, standard_library
from ..demo.settings import Size
from ..demo.small_networks import EncoderTransformer, resnet
from ..demo.trainer import Curve, Trainee, learning_rate_factor
from .actnn_runs import Trained

Batch = tuple[Tensor, Tensor]

SHAPE = Size(width=64, depth=2, heads=4, context=64)  # of the transformer


@dataclass(frozen=True)
class Variant:
    """The settings in which runs differ.

    Attributes:
        name: display name.
        level, bits: arguments of `fewbit.convert`; without a level nothing is converted.
        table_bits: bits of the activations' tables, where they differ from the level's.
        derivative_bits: bits in which activations save their derivative as ActNN does, instead of a table.
        mixed: whether to train under autocast, in bfloat16.
    """

    name: str
    level: str | None = None
    bits: float | None = None
    table_bits: int | None = None
    derivative_bits: int | None = None
    mixed: bool = False

    def convert(self, model: nn.Module) -> None:
        """Convert `model` to this variant."""
        if self.derivative_bits:
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.GELU):
                        setattr(parent, name, Activation(child, bits=self.derivative_bits))
        if self.level:
            convert(model, self.bits, level=self.level)
        if self.table_bits:
            convert(model, self.table_bits)


VARIANTS = (
    Variant("exact"),
    Variant("L2, 4 bits", "L2"),
    Variant("L2, 2 bits", "L2", 2),
    Variant("L3, 2 bits", "L3", 2),
    Variant("L3, 1.5 bits", "L3", 1.5),
    Variant("exact, AMP", mixed=True),
    Variant("L3, 2 bits, AMP", "L3", 2, mixed=True),
    Variant("L2, GELU 2 bits few-bit", "L2", table_bits=2),
    Variant("L2, GELU 2 bits ActNN", "L2", derivative_bits=2),
)


class Task(Protocol):
    """A data set, a model for it and its training settings."""

    @property
    def name(self) -> str:
        """Display name."""
        ...

    @property
    def steps(self) -> int:
        """Number of updates."""
        ...

    @property
    def learning_rate(self) -> float:
        """The largest learning rate."""
        ...

    def model(self) -> nn.Module:
        """Return a model with weights drawn from torch's generator."""
        ...

    def batch(self, draw: torch.Generator) -> Batch:
        """Return inputs and targets."""
        ...

    def held_out(self) -> Batch:
        """Return inputs and targets that are not trained on."""
        ...


@dataclass(frozen=True)
class DigitsTask:
    """Classification of scikit-learn's digits by a ResNet with GELU."""

    data: Images
    steps: int = 120
    size: int = 64
    learning_rate: float = 3e-3
    name: str = "ResNet, digits"

    def model(self) -> nn.Module:
        """Return a residual network."""
        return resnet(nn.GELU)

    def batch(self, draw: torch.Generator) -> Batch:
        """Return images and classes."""
        chosen = torch.randint(len(self.data.training), (self.size,), generator=draw)
        return self.data.training[chosen], self.data.training_classes[chosen]

    def held_out(self) -> Batch:
        """Return images and classes."""
        return self.data.test, self.data.test_classes


@dataclass(frozen=True)
class TextTask:
    """Prediction of the next character of the standard library's source by a transformer."""

    corpus: Corpus
    steps: int = 100
    size: int = 16
    learning_rate: float = 3e-3
    shape: Size = SHAPE
    name: str = "transformer, text"

    def model(self) -> nn.Module:
        """Return an `EncoderTransformer`."""
        return EncoderTransformer(self.shape)

    def batch(self, draw: torch.Generator) -> Batch:
        """Return windows of text and the characters that follow each."""
        return _parted(random_windows(self.corpus.training, self.size, self.shape.context, draw))

    def held_out(self) -> Batch:
        """Return windows of text and the characters that follow each."""
        return _parted(spread_windows(self.corpus.validation, 256, self.shape.context))


TASKS: dict[str, Callable[[], Task]] = {
    "resnet": lambda: DigitsTask(digits(normalized=False)),
    "transformer": lambda: TextTask(standard_library()),
}


def train(
    task: Task, variants: tuple[Variant, ...], seed: int, steps: int, after_step: Callable[[], object] = lambda: None
) -> list[Trained]:
    """Train every variant on the CPU for `steps` steps; return the runs in their order."""
    made = [_Made(task, variant, seed) for variant in variants]
    draw = torch.Generator().manual_seed(seed)
    trainer.train([one.trainee(steps) for one in made], (task.batch(draw) for _ in range(steps)), after_step)
    example, held_out = task.batch(draw), task.held_out()
    return [one.finish(example, held_out) for one in made]


def block_ratio(bits: float, level: str = "L3") -> float:
    """Return the factor by which one more Conv–BN–ReLU keeps less than exactly: 64/5.25 = 12.2 at 2 bits.

    Measured for one block of 32 channels, added to a chain of eight, on 16 images of 32×32, by
    `fewbit.memory.profile`. In exact training a ReLU saves its output, the same tensor that the next convolution saves.
    """
    exact, compressed = [], []
    for blocks in (8, 9):
        torch.manual_seed(0)
        layers = [m for _ in range(blocks) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
        model, x = nn.Sequential(*layers), torch.randn(16, 32, 32, 32)
        exact.append(profile(model, x).total)
        convert(model, bits, level=level)
        model(x).sum().backward()  # mixed precision needs to see a gradient
        compressed.append(profile(model, x).total)
    return (exact[1] - exact[0]) / (compressed[1] - compressed[0])


class _Made:
    """The model of a variant, and the records of its training."""

    def __init__(self, task: Task, variant: Variant, seed: int) -> None:
        self.task, self.variant, self.seed, self.curve = task, variant, seed, Curve()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = task.model()
        variant.convert(self.model)

    def trainee(self, steps: int) -> Trainee:
        optimizer = torch.optim.AdamW(self.model.parameters(), self.task.learning_rate)
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
        return Trainee(self.model, self.loss, optimizer, schedule, 1.0, self.draw_alike, self.curve)

    def draw_alike(self, step: int) -> None:
        """Seed dropout equally in all variants, as far as they draw alike; rounding uses the same generator."""
        torch.manual_seed(1_000_003 * self.seed + step)

    def loss(self, _: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(*self.scores(batch))

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return scores (n, classes) and the classes (n,)."""
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.variant.mixed):
            scores = self.model(x)
        return scores.float().flatten(0, -2), y.flatten()

    def finish(self, example: Batch, held_out: Batch) -> Trained:
        saved = profile_call(self.model, lambda: self.loss(self.model, example))
        inside = sum(one.bytes for one in saved.saved if one.module)  # the loss belongs to the root module, ""
        self.model.eval()
        with torch.no_grad():
            scores, classes = self.scores(held_out)
        loss, right = F.cross_entropy(scores, classes), (scores.argmax(1) == classes).double().mean()
        return Trained(
            *(self.task.name, self.variant.name, self.seed, tuple(self.curve.losses), tuple(self.curve.seconds)),
            *(loss.item(), right.item(), inside),
        )


def _parted(windows: Tensor) -> Batch:
    return windows[:, :-1], windows[:, 1:]
