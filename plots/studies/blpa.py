"""Evaluation of BLPA (Section 4): training losses and gradient errors of a deep residual network on real images.

    training = train(VARIANTS, digits(), Settings(seed=0))      Figure 3: exact, 8 and 4 bits, naive, fewer features
    noise = gradient_noise(model, images, …)                    Figure 4: error of each layer's gradient, and SGD's

Variants start from the same weights, see the same batches, and take turns step by step. Exact and few-bit training have
the same forward pass, so their first losses are equal; those of naive training are not.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.layers.preact import PreActLayer
from ...runtime.models import PreActResNet, preact_resnet
from ...runtime.plan.memory import profile
from ...tables import FewbitError
from ..demo import trainer
from ..demo.data import Images
from ..demo.trainer import Curve, Trainee, cross_entropy


@dataclass(frozen=True)
class Settings:
    """Training settings.

    Attributes:
        depth, width: of the network; see `preact_resnet`.
        steps: updates.
        batch: images in a step.
        learning_rate: the largest. A tenth of it during warm-up, a tenth after half of the steps, and a hundredth after
            three quarters, as in the paper.
        momentum, weight_decay: of SGD; the paper's.
        seed: of weights, batches and flips.
        warmup: share of the steps used for warm-up. The paper's is `PAPER_WARMUP`, 400 of 64,000 steps; of 200 steps
            that is one or two, so our default is 5 %.
    """

    depth: int = 164
    width: int = 16
    steps: int = 200
    batch: int = 64
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 2e-4
    seed: int = 0
    warmup: float = 0.05

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise FewbitError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 <= self.warmup <= 0.5:
            raise FewbitError(f"warmup must be a share of the steps from 0 to 0.5, not {self.warmup}")


PAPER_WARMUP = 400 / 64_000


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: display name.
        bits: bits of each activation; None keeps them exact.
        naive: whether the forward pass uses the dequantized values.
        features: share of the width.
    """

    name: str
    bits: int | None = None
    naive: bool = False
    features: float = 1.0


VARIANTS = (
    Variant("exact"),
    Variant("8 bits", 8),
    Variant("4 bits", 4),
    Variant("naive, 8 bits", 8, naive=True),
    Variant("naive, 4 bits", 4, naive=True),
    Variant("exact, 1/4 of the features", features=0.25),
)


@dataclass(frozen=True)
class Run:
    """Results of one network's training.

    Attributes:
        variant: its name.
        losses: training loss at each step, in nats per image.
        seconds: of each step.
        test_loss, test_error: after the last step, computed exactly: nats per image, and share of misclassified images.
        saved_bytes: bytes that a forward pass of one batch saves for backward.
    """

    variant: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    test_loss: float
    test_error: float
    saved_bytes: int


@dataclass(frozen=True)
class Training:
    """Runs of one seed on one data set of images, in the order of their variants."""

    images: str
    settings: Settings
    runs: tuple[Run, ...]

    def run(self, variant: str) -> Run:
        """Return the run of a variant."""
        return next(run for run in self.runs if run.variant == variant)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Training":
        """Return the training that `to_dict` serialised; raises KeyError or TypeError if `data` is of another form."""
        runs = (Run(**{**r, "losses": tuple(r["losses"]), "seconds": tuple(r["seconds"])}) for r in data["runs"])
        return cls(str(data["images"]), Settings(**data["settings"]), tuple(runs))


def train(
    variants: Sequence[Variant], images: Images, settings: Settings, after_step: Callable[[], object] = lambda: None
) -> Training:
    """Train every variant with the same weights and batches, in turn; return the runs in the order of `variants`."""
    models, curves = [network(images, settings, variant) for variant in variants], [Curve() for _ in variants]
    trainees = [_trainee(model, settings, curve) for model, curve in zip(models, curves, strict=True)]
    trainer.train(trainees, _batches(images, settings), after_step)
    runs = (_run(*made, images) for made in zip(variants, models, curves, strict=True))
    return Training(images.name, settings, tuple(runs))


def learning_rate(step: int, settings: Settings) -> float:
    """Return the learning rate of `step` (0 to steps − 1)."""
    part = step / settings.steps
    factor = 0.1 if part < settings.warmup else 1.0 if part < 0.5 else 0.1 if part < 0.75 else 0.01
    return settings.learning_rate * factor


def network(images: Images, settings: Settings, variant: Variant = VARIANTS[0]) -> PreActResNet:
    """Return the network with the weights of the seed, equal for all variants of one width."""
    with torch.random.fork_rng(devices=[]):  # leaves the caller's generator unchanged
        torch.manual_seed(settings.seed)
        return preact_resnet(
            settings.depth,
            int(images.training_classes.max()) + 1,
            width=max(1, round(variant.features * settings.width)),
            in_channels=images.training.shape[1],
            bits=variant.bits,
            naive=variant.naive,
        )


def _trainee(model: PreActResNet, settings: Settings, curve: Curve) -> Trainee:
    options: Any = {"momentum": settings.momentum, "weight_decay": settings.weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), 1.0, **options)
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, settings))
    return Trainee(model, cross_entropy, optimizer, schedule, record=curve)


@torch.no_grad()
def _run(variant: Variant, model: PreActResNet, curve: Curve, images: Images) -> Run:
    model.eval()
    scores = torch.cat([model(part) for part in images.test.split(256)])
    model.train()
    with torch.enable_grad():
        saved = profile(copy.deepcopy(model), images.training[:64]).total
    return Run(
        variant=variant.name,
        losses=tuple(curve.losses),
        seconds=tuple(curve.seconds),
        test_loss=F.cross_entropy(scores, images.test_classes).item(),
        test_error=(scores.argmax(1) != images.test_classes).float().mean().item(),
        saved_bytes=saved,
    )


# ---- Figure 4 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerNoise:
    """Errors of the gradients of one convolution's weights, per weight.

    Attributes:
        layer: its number, counted from 1.
        name: name in the model.
        sgd: variance of exact gradients between batches.
        errors: bits → mean squared difference from the exact gradient of the same batch.
    """

    layer: int
    name: str
    sgd: float
    errors: Mapping[int, float]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON, whose keys are strings."""
        return {**vars(self), "errors": {str(bits): error for bits, error in self.errors.items()}}


def trained(
    images: Images,
    settings: Settings,
    after_step: Callable[[], object] = lambda: None,
    *,
    variant: Variant = VARIANTS[0],
    curve: Curve | None = None,
) -> PreActResNet:
    """Return the network of a variant after training, whose losses `curve` records."""
    model = network(images, settings, variant)
    trainer.train([_trainee(model, settings, curve or Curve())], _batches(images, settings), after_step)
    return model


def gradient_noise(
    model: PreActResNet,
    images: Images,
    *,
    bits: Sequence[int] = (8, 4),
    batches: int = 100,
    batch: int = 64,
    seed: int = 0,
    after_batch: Callable[[], object] = lambda: None,
) -> list[LayerNoise]:
    """Return the errors of each fused convolution's gradient and the noise of SGD, over random batches.

    Args:
        model: with fused layers; its parameters, running statistics and bits are left unchanged.
        images: batches come from the training part.
        bits: numbers of bits to compare.
        batches: number of batches, at least 2.
        batch: images per batch.
        seed: seed of the batches.
        after_batch: called after each batch, for a progress bar.
    """
    if batches < 2:
        raise FewbitError(f"a variance takes 2 batches or more, not {batches}")
    model = copy.deepcopy(model).train()
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PreActLayer) and isinstance(module.linear, nn.Conv2d)
    ]
    draw = torch.Generator().manual_seed(seed)
    sums = [torch.zeros_like(_weight(layer), dtype=torch.float64) for _, layer in layers]
    squares = [0.0] * len(layers)
    errors: list[dict[int, list[float]]] = [{b: [] for b in bits} for _ in layers]
    for _ in range(batches):
        x, y = _batch(images, batch, draw)
        exact = _gradients(model, layers, x, y, None)
        for index, gradient in enumerate(exact):
            sums[index] += gradient
            squares[index] += gradient.double().square().sum().item()
        for b in bits:
            for index, gradient in enumerate(_gradients(model, layers, x, y, b)):
                errors[index][b].append((gradient - exact[index]).square().mean().item())
        after_batch()
    result = []
    for number, (name, _) in enumerate(layers):
        variance = (squares[number] - sums[number].square().sum().item() / batches) / (batches - 1)
        means = {b: statistics.fmean(values) for b, values in errors[number].items()}
        result.append(LayerNoise(number + 1, name, variance / sums[number].numel(), means))
    return result


def _gradients(
    model: nn.Module, layers: Sequence[tuple[str, PreActLayer]], x: Tensor, y: Tensor, bits: int | None
) -> list[Tensor]:
    for module in model.modules():
        if isinstance(module, PreActLayer):
            module.bits = bits
    weights = [_weight(layer) for _, layer in layers]
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), weights))


def _weight(layer: PreActLayer) -> Tensor:
    weight: Any = layer.linear.weight
    return weight


def _batches(images: Images, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(settings.seed)
    return (_batch(images, settings.batch, draw) for _ in range(settings.steps))


def _batch(images: Images, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random images, shifted by up to a pixel, and their classes; photographs are mirrored at random too."""
    chosen = torch.randint(len(images.training), (count,), generator=draw)
    x = images.training[chosen]
    down, right = torch.randint(-1, 2, (2,), generator=draw).tolist()
    x = torch.roll(x, (down, right), (2, 3))
    if images.name not in ("digits", "mnist", "pairs"):  # mirrored digits are not digits
        mirrored = torch.rand(count, generator=draw) < 0.5
        x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(3), x)
    return x, images.training_classes[chosen]
