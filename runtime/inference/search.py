"""Search for the smallest bits and ratios that keep a model accurate enough (V-Quant, Section 4.7).

    result = search(model, accuracy_of, batches, accuracy=0.97)
    print(result); result.best.configuration

There are few candidates, so each is made and measured; the best is the smallest that is accurate enough.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.columns import columns
from .layers import TunedLayer
from .post_training import Configuration, calibrate, quantize


@dataclass(frozen=True)
class Candidate:
    """A configuration with its size and accuracy.

    Attributes:
        configuration: bits and ratios.
        weight_bytes: of the packed weights.
        weights: number of weights.
        accuracy: result of `evaluate`; None if not evaluated, because a smaller candidate is accurate enough.
    """

    configuration: Configuration
    weight_bytes: int
    weights: int
    accuracy: float | None

    @property
    def bits_per_weight(self) -> float:
        """Bits of a packed weight, outliers and their positions included."""
        return 8 * self.weight_bytes / self.weights

    @property
    def bits_per_activation(self) -> float:
        """Bits of an activation: b + 16·AR, as positions are not stored; 32 in full precision."""
        ratio = self.configuration.activation_ratio
        return 32.0 if ratio is None else self.configuration.bits + 16 * ratio

    @property
    def size(self) -> tuple[int, float]:
        """Sort key of candidates: the bitwidth, then bits of a weight and an activation together."""
        return self.configuration.bits, self.bits_per_weight + self.bits_per_activation


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `str(result)` is a table.

    Attributes:
        rows: all candidates, the smallest first.
        required: the required accuracy.
    """

    rows: tuple[Candidate, ...]
    required: float

    @property
    def best(self) -> Candidate | None:
        """The smallest candidate that is accurate enough, or None."""
        return next((row for row in self.rows if row.accuracy is not None and row.accuracy >= self.required), None)

    def __str__(self) -> str:
        head = ("bits", "weights AR", "activations AR", "bits/weight", "bits/activation", "accuracy", "")
        return "\n".join(columns([head, *map(self._line, self.rows)], left=1))

    def _line(self, row: Candidate) -> tuple[str, ...]:
        c = row.configuration
        activations = "full" if c.activation_ratio is None else f"{100 * c.activation_ratio:g} %"
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.4f}"
        sizes = (f"{row.bits_per_weight:.2f}", f"{row.bits_per_activation:.2f}")
        mark = "smallest that is enough" if row is self.best else ""
        return (str(c.bits), f"{100 * c.weight_ratio:g} %", activations, *sizes, accuracy, mark)


def search(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    batches: Iterable[Any],
    *,
    accuracy: float,
    bits: Sequence[int] = (3, 4, 5),
    weight_ratios: Sequence[float] = (0.0, 0.01, 0.03),
    activation_ratios: Sequence[float | None] = (0.0, 0.01, 0.03),
    fine_tune: Callable[[nn.Module], object] | None = None,
    exhaustive: bool = True,
) -> SearchResult:
    """Return the bits and ratios that keep a trained model accurate enough, with size and accuracy of every candidate.

    Args:
        model: trained; it is copied for each candidate and not changed.
        evaluate: model -> accuracy, the larger the better.
        batches: for `calibrate`.
        accuracy: the required accuracy.
        bits, weight_ratios, activation_ratios: all their combinations are tried.
        fine_tune: trains a quantized model for a while, in place, before it is evaluated.
        exhaustive: False stops at the smallest that is accurate enough; larger ones then have no accuracy.

    Raises:
        FewbitError: a number is out of range, or there is nothing to try.

    Example:
        found = fewbit.vquant.search(model, lambda m: 1.0, [x], accuracy=0.9, bits=(4,), exhaustive=False)
        found.best
    """
    configurations = [Configuration(*numbers) for numbers in itertools.product(bits, weight_ratios, activation_ratios)]
    if not configurations:
        raise FewbitError("search needs at least one number of bits and one ratio")
    batches = list(batches)
    pending: list[Candidate] = []
    for c in configurations:
        layers = [layer for layer in _quantized(model, c).modules() if isinstance(layer, TunedLayer)]
        codes = [layer.codes(name) for layer in layers for name in layer.names]
        pending.append(Candidate(c, sum(each.nbytes for each in codes), sum(each.form.numel for each in codes), None))
    pending.sort(key=lambda row: row.size)
    rows: list[Candidate] = []
    for row in pending:
        done = not exhaustive and SearchResult(tuple(rows), accuracy).best is not None
        rows.append(row if done else _measured(model, row, evaluate, batches, fine_tune))
    return SearchResult(tuple(rows), accuracy)


def _quantized(model: nn.Module, c: Configuration) -> nn.Module:
    return quantize(copy.deepcopy(model), c.bits, c.weight_ratio, c.activation_ratio)


def _measured(
    model: nn.Module,
    row: Candidate,
    evaluate: Callable[[nn.Module], float],
    batches: list[Any],
    fine_tune: Callable[[nn.Module], object] | None,
) -> Candidate:
    quantized = _quantized(model, row.configuration)
    calibrate(quantized, batches)
    if fine_tune is not None:
        fine_tune(quantized)
    return Candidate(row.configuration, row.weight_bytes, row.weights, float(evaluate(quantized)))
