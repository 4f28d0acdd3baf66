"""Measures what rounding each saved tensor does to the gradient, by a few backward passes of one forward pass.

The sensitivity of a tensor is the squared error of the gradient, relative to its squared norm, for each unit of
variance that quantizing the tensor adds to its elements. The forward pass runs once, exactly, and saves all; in each
backward pass some tensors come back rounded at random, and all others as they were.

    one pass       all inputs of linear layers and convolutions at once: each errs in its own weight's gradient alone
    three a kind   tensors of equal layers: those of the first half of the layers, those of the second, all once more.
                   Of two draws the errors e₁ and e₂ have E⟨e₁, e₂⟩ = ‖bias‖², and E‖e‖² − ‖bias‖² is noise, which
                   averages out over steps

The errors of tensors rounded in one pass are independent, so that their squares add; those of a pass are shared equally
among its tensors. Variances at other numbers of bits are those of the tensors, quantized. Some samples of a batch are
enough (step.py, `Part`).

Rounding all but the largest numbers, kept exactly, is measured where it errs less than groups of as many bytes. It
rounds to the nearest level, which two draws do not tell from bias, but two halves of a tensor do: with the error e₁ if
the first half alone is rounded, and e₂ if the second is, 4⟨e₁, e₂⟩ = ‖bias‖².

Groups that are turned are measured for inputs of linear layers, by one pass more: their error lies evenly in a group,
and not where its values do.
"""

import gc
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...tables import FewbitError
from ..layers.huggingface import Conv1D
from ..layers.saver import Saver, last_innermost
from ..quantizers import Compressed, Outlier, PerGroup, Rotated
from ..tensors.traits import sum_of_squares
from .errors import (
    BITS,
    LINEAR,
    PROBE,
    ROTATED_BITS,
    Errors,
    alike,
    difference,
    errors_of_each,
    finite,
    noise_and_bias_of,
    product,
    together,
    total,
)
from .places import Places, Policy
from .step import Step
from .trace import Attention

SAMPLE = 1 << 18  # elements of a tensor that say what variance quantizing it has
_LINEAR = (nn.Linear, Conv1D, _ConvNd)


def measure_errors(step: Step, kinds: Mapping[str, str]) -> tuple[dict[str, Errors], ...]:
    """Return the errors of each saved tensor of a step by its place, from a few backward passes: in groups; with
    outliers, for the tensors that this serves; and in groups that are turned, for inputs of linear layers.

    Args:
        step: on real tensors.
        kinds: of each place; places of equal kind, of equal layers, are measured together.
    """
    with step.apart():
        prober = _Prober()
        with Places(step.model, prober):
            loss, output = step.forward()
        del output
        parameters = step.parameters
        modules, names = dict(step.model.named_modules()), {id(p): name for name, p in step.model.named_parameters()}
        owners = [names[id(p)].rpartition(".")[0] for p in parameters]
        gradient = _Gradient(loss, parameters, prober)
        exact = gradient.of(())
        scale = sum(sum_of_squares(g) for g in exact) or 1.0
        if not isfinite(scale):
            raise FewbitError("the gradient of this step is not finite, so what rounding does to it cannot be measured")
        probes = prober.living()
        result: dict[str, Errors] = {}
        rotated: dict[str, Errors] = {}
        # What serves the gradients of the weights of linear layers alone errs in these alone.
        of_linear = [probe for probe in probes if probe.function in LINEAR]
        local = [p for p in of_linear if all(isinstance(modules.get(user), _LINEAR) for user in p.users)]
        for found, turned in ((result, False), (rotated, True)) if local else ():
            first = gradient.of(local, turned=turned)
            of_module: defaultdict[str, float] = defaultdict(float)
            for owner, g, h in zip(owners, exact, first, strict=True):
                of_module[owner] += sum_of_squares(h - g) / scale
            for probe in local:
                noise = sum(of_module[user] for user in probe.users)
                found[probe.place] = probe.errors_turned(noise) if turned else probe.errors(noise, 0.0)
        rest = [p for p in probes if p.place not in result]
        for equal in alike(rest, lambda probe: kinds.get(probe.place, probe.place)):
            for probe, (noise, bias) in errors_of_each(equal, partial(gradient.wrong, exact), scale):
                result[probe.place] = probe.errors(noise, bias)
        served = [probe for probe in probes if _serves(probe)]
        outliers: dict[str, Errors] = {}
        for segment in together(served, lambda probe: kinds.get(probe.place, probe.place)):
            noise, bias = gradient.errors_of_halves(segment, exact)
            for probe in segment:
                outliers[probe.place] = _scaled(noise, bias, outliers_variances(probe.x))
        del loss, gradient, served
    gc.collect()
    return finite(result), finite(outliers), finite(rotated)


def measure_attentions(step: Step, attentions: Iterable[Attention]) -> dict[str, Errors]:
    """Return the errors of computing each attention again from codes, with its output in codes, by name.

    Args:
        step: on real tensors.
        attentions: of the step; those of equal operands are measured together, in `SEGMENTS`.
    """
    kinds = {a.name: a.kind for a in attentions}
    result: dict[str, Errors] = {}
    if not kinds:
        return result
    with step.apart():
        prober = _Prober(again=True)
        with Places(step.model, prober):
            loss, output = step.forward()
        del output
        gradient = _Gradient(loss, step.parameters, prober)
        exact = gradient.of(())
        scale = product(exact, exact) or 1.0
        probes: defaultdict[str, list[_Probe]] = defaultdict(list)
        for probe in prober.living():
            probes[probe.place.rpartition("-")[0]].append(probe)  # of its operands, and of its output
        wrong = partial(_wrong_of_attentions, gradient, exact, probes)
        for equal in alike([name for name in kinds if name in probes], kinds.__getitem__):
            for name, (noise, bias) in errors_of_each(equal, wrong, scale):
                own = probes[name]
                result[name] = total([probe.errors(noise / len(own), bias / len(own)) for probe in own])
        del loss, gradient, wrong
    gc.collect()
    return finite(result)


def _wrong_of_attentions(
    gradient: "_Gradient", exact: Sequence[Tensor], probes: Mapping[str, Sequence["_Probe"]], names: Sequence[str]
) -> list[Tensor]:
    """Return the error of the gradient with the attentions of these names computed again from rounded tensors."""
    return gradient.wrong(exact, [probe for name in names for probe in probes[name]])


@dataclass
class _Gradient:
    """The gradient of a loss, as often as it is asked for."""

    loss: Tensor
    parameters: list[nn.Parameter]
    prober: "_Prober"

    def of(self, rounded: Collection["_Probe"], half: int | None = None, *, turned: bool = False) -> list[Tensor]:
        """Return the gradient with these tensors rounded; with one half of each, and its outliers exact, if given; or
        with their groups turned."""
        self.prober.rounded, self.prober.half, self.prober.turned = {id(probe) for probe in rounded}, half, turned
        found = torch.autograd.grad(self.loss, self.parameters, retain_graph=True, allow_unused=True)
        self.prober.rounded = set()
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]

    def wrong(self, exact: Sequence[Tensor], rounded: Collection["_Probe"]) -> list[Tensor]:
        """Return the error of the gradient with these tensors rounded."""
        return difference(self.of(rounded), exact)

    def errors_of_halves(self, rounded: Collection["_Probe"], exact: Sequence[Tensor]) -> tuple[float, float]:
        """Return the same for tensors that are rounded to the nearest level, with outliers."""
        share = 1 / (product(exact, exact) or 1.0) / len(rounded)
        noise, bias = noise_and_bias_of(*(difference(self.of(rounded, half), exact) for half in range(2)))
        return noise * share, bias * share


class _Probe:
    """A saved tensor that comes back exactly or rounded. No dataclass, which layers would take apart."""

    nbytes = 0

    def __init__(self, place: str, function: str, x: Tensor, quantizer: PerGroup, prober: "_Prober") -> None:
        self.place, self.function, self.x = place, function, x
        self.quantizer, self.prober = quantizer, prober
        self.users = [place.rpartition(":")[0]]

    def decompress(self) -> Tensor:
        """Return the tensor."""
        if id(self) not in self.prober.rounded:
            return self.x
        if self.prober.turned:
            return Rotated(PROBE).compress(self.x).decompress()
        if self.prober.half is None:
            return self.quantizer.compress(self.x).decompress()
        # One half alone, along the first dimension above 1.
        rounded = outliers_of(PROBE).compress(self.x).decompress()
        dim = next((d for d in range(self.x.dim()) if self.x.shape[d] > 1), 0)
        middle = self.x.shape[dim] // 2
        parts = [(rounded, self.x), (self.x, rounded)][self.prober.half]
        return torch.cat([part.tensor_split([middle], dim)[i] for i, part in enumerate(parts)], dim)

    def errors_turned(self, noise: float) -> Errors:
        """Return the same for `ROTATED_BITS`, with groups that are turned, which have no bias."""
        rows = _sample(self.x)
        bits = (*ROTATED_BITS, PROBE)
        return _scaled(noise, 0.0, {b: sum_of_squares(Rotated(b).compress(rows).decompress() - rows) for b in bits})

    def errors(self, noise: float, bias: float) -> Errors:
        """Return the errors for all numbers of bits of those at `PROBE` bits."""
        return _scaled(noise, bias, quantization_variances(self.x, self.quantizer))


def _scaled(noise: float, bias: float, variances: Mapping[int, float]) -> Errors:
    """Return the errors for all numbers of bits of those at `PROBE` bits, which are as the variances."""
    share = {bits: v / variances[PROBE] if variances[PROBE] else 0.0 for bits, v in variances.items()}
    return Errors({bits: noise * s for bits, s in share.items()}, {bits: bias * s for bits, s in share.items()})


# ---- outliers --------------------------------------------------------------------------------------------------------


@cache
def outliers_of(bits: int) -> Outlier:
    """Return the quantizer that saves the largest numbers exactly, and the others in so many bits."""
    return Outlier(bits=bits, ratio=0.02)


@cache
def outliers_bytes(elements: int, dtype: torch.dtype, bits: int) -> int:
    """Return the bytes that it saves of a tensor."""
    return outliers_of(bits).compress(torch.empty(elements, dtype=dtype, device="meta")).nbytes


def outliers_variances(x: Tensor) -> dict[int, float]:
    """Return the sum of squared errors of `x`, or of its first elements, with outliers and each number of bits."""
    rows = _sample(x)
    return {bits: sum_of_squares(outliers_of(bits).compress(rows).decompress() - rows) for bits in BITS}


def _serves(probe: _Probe) -> bool:
    """Return whether outliers err less than half as much as groups that take more bytes, at `PROBE` bits.

    Half, for rounding to the nearest level errs less than at random, and has a bias.
    """
    own = outliers_bytes(probe.x.numel(), probe.x.dtype, PROBE)
    groups = quantization_variances(probe.x, probe.quantizer)
    more = min((b for b in BITS if probe.x.numel() * (b + 0.125) / 8 >= own), default=max(BITS))
    return outliers_variances(probe.x)[PROBE] < groups[more] / 2


def _sample(x: Tensor) -> Tensor:
    return x if x.numel() <= SAMPLE else x[: max(1, SAMPLE * len(x) // x.numel())]


def quantization_variances(x: Tensor, quantizer: PerGroup) -> dict[int, float]:
    """Return the sum of squared errors of `x`, or of its first elements, quantized with each number of bits."""
    rows, size = _sample(x), quantizer.group_size
    return {bits: sum_of_squares(PerGroup(bits, size).compress(rows).decompress() - rows) for bits in BITS}


@dataclass(frozen=True)
class _Probing:
    """The quantizer of one tensor that is to be measured."""

    prober: "_Prober"
    place: str
    function: str
    quantizer: PerGroup

    def within(self, features: int) -> "_Probing":
        return _Probing(self.prober, self.place, self.function, self.quantizer.within(features))

    def compress(self, x: Tensor) -> Compressed:
        probe = _Probe(self.place, self.function, x.detach(), self.quantizer, self.prober)
        self.prober.probes.append(weakref.ref(probe))
        return probe


@dataclass(frozen=True)
class _ProbingRows(Saver):
    """The saver of an attention's operands that are to be measured."""

    probing: _Probing

    def compress(self, x: Tensor) -> Compressed:
        return self.probing.within(x.shape[-1]).compress(last_innermost(x))

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None: ...


class _Prober(Policy):
    """The policy that saves all tensors exactly, until a backward pass asks for some of them rounded.

    Args:
        again: whether attention is computed again, from query, key and value that may be rounded.
    """

    def __init__(self, again: bool = False) -> None:
        self.again = again
        self.probes: list[weakref.ref[_Probe]] = []
        self.rounded: set[int] = set()
        self.half: int | None = None
        self.turned = False

    def living(self) -> list[_Probe]:
        """Return the tensors that the graph still needs, in the order of saving."""
        return [probe for probe in (reference() for reference in self.probes) if probe is not None]

    def choose(self, place: str, x: Tensor, function: str) -> Any:
        return _Probing(self, place, function, PerGroup(PROBE))

    def share(self, compressed: Any, module: str) -> None:
        if isinstance(compressed, _Probe) and module not in compressed.users:
            compressed.users.append(module)

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        return _ProbingRows(_Probing(self, f"{attention}-", "", PerGroup(PROBE))) if self.again else None
