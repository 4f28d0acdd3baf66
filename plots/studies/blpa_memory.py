"""Memory that BLPA keeps: the law O(W + 1 + αL) measured, and the largest batches of Table 2.

    law = memory_law([4, 8, 12])         saved and peak bytes of networks of one stage, by depth and by bits
    law.slope(4) / law.slope(None)       α: 1/8
    largest_batches(11 * 2**30)          Table 2 by formula
    largest_batch_by_trial(step)         and by trial, on a GPU

The law assumes layers of one size, so it is measured on networks with one stage. W is 2 in residual networks.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.layers.preact import PreActLayer
from ...runtime.memory.peak import peak_of
from ...runtime.models import PreActResNet, preact_resnet
from ...runtime.models.preact_resnet import EXPANSION
from ...runtime.plan.largest_batch import largest_by_trial
from ...runtime.plan.memory import largest_batch, parameter_bytes, profile
from ...tables import FewbitError

# (layers, width) of Table 2, with the paper's largest batches on 11 GiB: exact and with 4 bits.
TABLE_2 = {
    (1001, 64): (26, 182),
    (1001, 16): (134, 876),
    (488, 16): (264, 1468),
    (254, 16): (474, 2154),
    (164, 16): (688, 2522),
}
COPIES = 3  # weights, gradients and momentum
WIDTH_OF_GRAPH = 2  # W: full activations that wait to be used


@dataclass(frozen=True)
class Kept:
    """Memory of one network of one stage, in bytes for one batch.

    Attributes:
        layers: number of pre-activation layers, without the head.
        bits: bits of each activation; None is exact.
        saved: bytes kept from forward to backward.
        peak: peak memory of forward and backward.
    """

    layers: int
    bits: int | None
    saved: int
    peak: int


@dataclass(frozen=True)
class Law:
    """Saved and peak bytes against depth.

    Attributes:
        rows: one for each depth and number of bits.
        activation: bytes of the largest activation in full precision.
    """

    rows: tuple[Kept, ...]
    activation: int

    def slope(self, bits: int | None, what: str = "saved") -> float:
        """Return bytes per layer, by least squares; `what` is saved or peak."""
        return self._line(bits, what)[0]

    def fixed(self, bits: int | None, what: str = "saved") -> float:
        """Return the bytes that are constant in depth, in units of the largest activation: about W + 1 for the peak."""
        return self._line(bits, what)[1] / self.activation

    def _line(self, bits: int | None, what: str) -> tuple[float, float]:
        points = [(row.layers, getattr(row, what)) for row in self.rows if row.bits == bits]
        slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
        return slope, intercept


def memory_law(
    units: Sequence[int] = (4, 8, 16), *, bits: Sequence[int | None] = (None, 8, 4), width: int = 4, batch: int = 128
) -> Law:
    """Measure networks of one stage of `units` bottlenecks, on images of 8×8."""
    x, y = torch.randn(batch, 3, 8, 8), torch.randint(10, (batch,))
    rows = []
    for b in bits:
        for count in units:
            stem = nn.Conv2d(3, EXPANSION * width, 3, padding=1, bias=False)
            model = PreActResNet((count,), 10, width, EXPANSION * width, stem, bits=b, naive=False, fused=True)
            saved = profile(model, x).total
            rows.append(Kept(3 * count, b, saved, peak_of(lambda model=model: _step(model, x, y))))
    return Law(tuple(rows), 4 * batch * EXPANSION * width * 64)


def _step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


# ---- Table 2 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LargestBatch:
    """One network of Table 2.

    Attributes:
        depth, width: size of the network.
        exact, few: largest batches by the formula, exact and with few bits.
        paper_exact, paper_few: largest batches of the paper, with 4 bits.
        buffers_exact, buffers_few: number of full largest activations per image for which the paper's batch leaves
            room beside the memory kept by all layers; the formula counts W + 1 = 3.
    """

    depth: int
    width: int
    exact: int
    few: int
    paper_exact: int
    paper_few: int
    buffers_exact: float
    buffers_few: float


@dataclass(frozen=True)
class Need:
    """Memory for one image of a network: αL + W + 1 of the law.

    Attributes:
        kept: bytes kept by all layers, αL.
        activation: bytes of the largest activation in full precision.
    """

    kept: float
    activation: int

    @property
    def total(self) -> float:
        """Bytes of one image."""
        return self.kept + (WIDTH_OF_GRAPH + 1) * self.activation


def inputs_of_image(model: nn.Module, size: int = 32) -> list[int]:
    """Return the elements of the input of each pre-activation layer, for one image of size×size; on the meta device."""
    inputs: list[int] = []
    for module in model.modules():
        if isinstance(module, PreActLayer):
            module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].numel()))
    with torch.no_grad(), torch.device("meta"):
        model.eval()(torch.empty(1, 3, size, size))
    return inputs


def largest_batches(memory: int, bits: int = 4) -> list[LargestBatch]:
    """Return the networks of Table 2 with their largest batches in `memory` bytes, by formula."""
    rows = []
    for (depth, width), paper in TABLE_2.items():
        with torch.device("meta"):
            network = preact_resnet(depth, width=width)
        model, inputs = parameter_bytes(network), inputs_of_image(network)
        needs = [Need(sum(inputs) * b / 8, 4 * max(inputs)) for b in (32, bits)]
        exact, few = (largest_batch(memory, model, need.total, copies=COPIES) for need in needs)
        room = memory - COPIES * model
        full, some = ((room / batch - need.kept) / need.activation for batch, need in zip(paper, needs, strict=True))
        rows.append(LargestBatch(depth, width, exact, few, *paper, full, some))
    return rows


@dataclass(frozen=True)
class Trial:
    """The largest batch that ran, and the median time of a step divided by it."""

    batch: int
    seconds_per_sample: float


def trial_on_gpu(depth: int, width: int, bits: int | None, rounds: int = 5) -> Trial:
    """Find the largest batch that trains on the current GPU, to 1 %, and time it.

    Raises:
        FewbitError: no GPU is available.
    """
    if not torch.cuda.is_available():
        raise FewbitError("there is no GPU to try batches on")
    model = preact_resnet(depth, width=width, bits=bits).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(batch: int) -> None:
        x = torch.randn(batch, 3, 32, 32, device="cuda")
        y = torch.randint(10, (batch,), device="cuda")
        _step(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    batch = largest_batch_by_trial(step, torch.cuda.OutOfMemoryError, torch.cuda.empty_cache, tolerance=0.01)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - start)
    return Trial(batch, statistics.median(seconds) / batch)


def largest_batch_by_trial(
    step: Callable[[int], Any],
    failure: type[BaseException],
    recover: Callable[[], Any] = lambda: None,
    tolerance: float = 0.0,
) -> int:
    """Return the largest batch for which `step` does not raise `failure`, by doubling and then bisection.

    With a `tolerance` such as 0.02 the search ends once the result is within that share of the largest batch.
    """

    def fits(batch: int) -> bool:
        with suppress(failure):
            step(batch)
            return True
        recover()  # only after the handler: the exception's frames hold the tensors of the step
        return False

    found = largest_by_trial(fits, tolerance=tolerance)
    if not found:
        raise FewbitError("not even one sample fits")
    return found
