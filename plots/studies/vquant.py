"""Small versions of V-Quant's tables: the cost in accuracy of value-aware quantization (V-Quant, Section 5).

    accuracy_grid(seeds=3)       Tables 1 and 2: bits × AR, V-Quant and RV-Quant
        annealing(seeds=3)           Table 5: many large values early and few late, and the reverse
        inference()                  Figures 4 and 5: quantized weights and activations, and a PCA of their effect

Each returns plain numbers for JSON. All runs of a seed start from the same weights and see the same batches; the
forward pass is exact in training, so their first losses are equal.
"""

import copy
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...runtime.inference.vquant import ActivationAnnealing, calibrate, quantize, search, value_aware
from ...runtime.plan.memory import profile
from ..demo.data import Images, digits
from ..demo.digits import Schedule, accuracy, batches, network, train

Row = dict[str, Any]
Progress = Callable[[], object]
Phases = tuple[tuple[int | None, float], ...]

RATIOS = (0.0, 0.01, 0.02, 0.05)
SCHEDULE = Schedule(epochs=6, learning_rate=0.02)  # short, where coarse activations cost most
WIDTH = 12

# (bits, AR in percent) by phase; None is full precision. The first of each pair anneals, the second is its reverse.
PAIRS: tuple[tuple[Phases, ...], ...] = (
    (((3, 2), (2, 1), (2, 0)), ((2, 0), (2, 1), (3, 2))),
    (((None, 0), (3, 2), (2, 0)), ((2, 0), (3, 2), (None, 0))),
    (((3, 2), (3, 1), (3, 0)), ((3, 0), (3, 1), (3, 2))),
    (((3, 2), (1, 1), (1, 0)), ((1, 0), (1, 1), (3, 2))),
)


def configurations() -> list[tuple[str, int | None, float]]:
    """Return (method, bits, AR) of each row of the grid; the first is exact."""
    v = [("V-Quant", bits, ratio) for bits in (1, 2, 3, 4) for ratio in RATIOS]
    rv = [("RV-Quant", bits, ratio) for bits in (2, 3) for ratio in RATIOS]
    return [("exact", None, 0.0), *v, *rv]


def accuracy_grid(seeds: int, schedule: Schedule = SCHEDULE, progress: Progress = lambda: None) -> list[Row]:
    """Train with every configuration and seed; V-Quant with a separate mask for ReLU, RV-Quant with two zeros."""
    data = digits()
    rows = []
    for method, bits, ratio in configurations():
        runs, kept = [], 0
        for seed in range(seeds):
            model = _network(seed)
            if bits is not None:
                value_aware(model, bits, ratio, relu_codes=method == "RV-Quant")
            # What ReLUs and convolutions save of one batch: the tensors that V-Quant compresses.
            images, _ = next(batches(data, SCHEDULE, 0))
            saved = profile(copy.deepcopy(model), images).saved
            kept = sum(s.bytes for s in saved if "Norm" not in s.kind)
            runs.append(train(model, data, _seeded(schedule, seed)))
            progress()
        rows.append({"method": method, "bits": bits, "ratio": ratio, "kept_bytes": kept, **_summary(runs)})
    return rows


def annealing(seeds: int, schedule: Schedule = SCHEDULE, progress: Progress = lambda: None) -> list[Row]:
    """Train with schedules of three equal phases, which switch together with the learning rate.

    They use RV-Quant, as in the paper; those with a phase of 1 bit, which the paper lacks, use V-Quant.
    """
    data = digits()
    rows = []
    for phases in [phases for pair in PAIRS for phases in pair]:
        runs = []
        for seed in range(seeds):
            model = _network(seed)
            scheduler = annealer(model, phases, schedule.epochs, relu_codes=all(bits != 1 for bits, _ in phases))
            runs.append(train(model, data, _seeded(schedule, seed), after_epoch=scheduler.step))
            progress()
        rows.append({"phases": [list(phase) for phase in phases], **_summary(runs)})
    return rows


def annealer(model: nn.Module, phases: Phases, epochs: int, *, relu_codes: bool) -> ActivationAnnealing:
    """Convert `model`, in place, and return what switches between equally long phases after each epoch.

    Args:
        model: the model to convert; no ReLU itself.
        phases: (bits, AR in percent) of each; bits of None are full precision.
        epochs: of the training.
        relu_codes: RV-Quant, otherwise V-Quant.
    """
    value_aware(model, relu_codes=relu_codes)
    length = -(-epochs // len(phases))
    return ActivationAnnealing(model, [(i * length, bits, ratio / 100) for i, (bits, ratio) in enumerate(phases)])


def inference(
    schedule: Schedule = SCHEDULE,
    *,
    bits: Sequence[int] = (2, 3, 4, 5),
    ratios: Sequence[float] = (0.0, 0.01, 0.03),
    tolerance: float = 0.01,
    progress: Progress = lambda: None,
) -> dict[str, Any]:
    """Quantize a trained network, with and without an epoch of fine-tuning, and find the smallest sufficient one.

    Args:
        schedule: settings of the full-precision training.
        bits, ratios: values to try, for weights and activations alike.
        tolerance: acceptable loss of accuracy, absolute: the paper's 1 %.
        progress: called after each candidate.
    """
    data = digits()
    model = _network(0)
    train(model, data, schedule)
    exact = accuracy(model, data)
    calibration = [data.training[:256]]
    tuning = Schedule(epochs=1, learning_rate=0.001, seed=100)

    def measured(quantized: nn.Module) -> float:
        progress()
        return accuracy(quantized, data)

    found = {
        name: search(
            *(model, measured, calibration),
            accuracy=exact - tolerance,
            bits=bits,
            weight_ratios=ratios,
            activation_ratios=ratios,
            fine_tune=tune,
        )
        for name, tune in (("after training", None), ("fine-tuned", lambda m: train(m, data, tuning)))
    }
    tables = {name: [_candidate(row) for row in result.rows] for name, result in found.items()}
    best = {name: None if result.best is None else _candidate(result.best) for name, result in found.items()}
    return {"accuracy": exact, "tolerance": tolerance, "rows": tables, "best": best, "pca": _pca(model, data)}


def _pca(model: nn.Module, data: Images) -> list[Row]:
    """Return the last layer's input of four classes in two principal components, taken from full precision."""
    chosen = data.test_classes < 4
    images, classes = data.test[chosen], data.test_classes[chosen]
    exact = _features(model, images)
    mean = exact.mean(0)
    axes = torch.linalg.svd(exact - mean, full_matrices=False).Vh[:2].T
    rows = []
    for name, bits, ratio in (("full", None, 0.0), ("", 3, 0.0), ("", 3, 0.001), ("", 3, 0.03)):
        shown = model
        if bits is not None:
            shown = quantize(copy.deepcopy(model), bits, ratio, ratio)
            calibrate(shown, [data.training[:256]])
        points = (_features(shown, images) - mean) @ axes
        rows.append(
            {
                "name": name or f"{bits} bits, {100 * ratio:g} %",
                "points": points.tolist(),
                "classes": classes.tolist(),
                "separation": _separation(points, classes),
            }
        )
    return rows


def _separation(points: torch.Tensor, classes: torch.Tensor) -> float:
    """Return the variance between the classes' means divided by that within the classes."""
    groups = [points[classes == c] for c in classes.unique()]
    means = torch.stack([group.mean(0) for group in groups])
    within = statistics.fmean(float((group - group.mean(0)).square().sum(1).mean()) for group in groups)
    return float((means - means.mean(0)).square().sum(1).mean()) / within


@torch.no_grad()
def _features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    model.eval()
    assert isinstance(model, nn.Sequential)
    return model[:-1](images)


def _network(seed: int) -> nn.Sequential:
    return network(seed, WIDTH)


def _seeded(schedule: Schedule, seed: int) -> Schedule:
    return Schedule(schedule.epochs, schedule.batch, schedule.learning_rate, seed)


def _summary(runs: Iterable[Any]) -> Row:
    listed = list(runs)
    accuracies = [run.accuracy for run in listed]
    return {
        "accuracies": accuracies,
        "accuracy": statistics.fmean(accuracies),
        "loss": statistics.fmean(run.losses[-1] for run in listed),
        "losses": [list(run.losses) for run in listed],
    }


def _candidate(row: Any) -> Row:
    c = row.configuration
    return {
        "bits": c.bits,
        "weight_ratio": c.weight_ratio,
        "activation_ratio": c.activation_ratio,
        "bits_per_weight": row.bits_per_weight,
        "weight_bytes": row.weight_bytes,
        "accuracy": row.accuracy,
    }
