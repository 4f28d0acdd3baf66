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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    noise_and_bias_of,
    product,
    together,
    total,
)
from .places import ByCall, Places, Policy, without_numbers
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
        gradient = _Gradient(step)
        modules, names = dict(step.model.named_modules()), {id(p): name for name, p in step.model.named_parameters()}
        owners = [names[id(p)].rpartition(".")[0] for p in step.parameters]
        scale = sum(sum_of_squares(g) for g in gradient.exact) or 1.0
        if not isfinite(scale):
            raise FewbitError("the gradient of this step is not finite, so what rounding does to it cannot be measured")
        probes = gradient.prober.living()
        result, rotated, outliers = dict[str, Errors](), dict[str, Errors](), dict[str, Errors]()
        # What serves the gradients of the weights of linear layers alone errs in these alone.
        of_linear = [probe for probe in probes if probe.function in LINEAR]
        local = [p for p in of_linear if all(isinstance(modules.get(user), _LINEAR) for user in p.users)]
        for found, turned in ((result, False), (rotated, True)) if local else ():
            first = gradient.of(local, turned=turned)
            of_module: defaultdict[str, float] = defaultdict(float)
            for owner, g, h in zip(owners, gradient.exact, first, strict=True):
                of_module[owner] += sum_of_squares(h - g) / scale
            for probe in local:
                noise = sum(of_module[user] for user in probe.users)
                turns = _variances(probe.x, Rotated, (*ROTATED_BITS, PROBE)) if turned else None  # without bias
                found[probe.place] = probe.errors(noise, 0.0, turns)
        rest = [p for p in probes if p.place not in result]
        for equal in alike(rest, lambda probe: kinds.get(probe.place, probe.place)):
            for probe, (noise, bias) in errors_of_each(equal, gradient.wrong, scale):
                result[probe.place] = probe.errors(noise, bias)
        served = [probe for probe in probes if _serves(probe)]
        for segment in together(served, lambda probe: kinds.get(probe.place, probe.place)):
            # Rounded to the nearest level, one half of each tensor at a time.
            share = 1 / (product(gradient.exact, gradient.exact) or 1.0) / len(segment)
            noise, bias = noise_and_bias_of(*(gradient.wrong(segment, half) for half in range(2)))
            for probe in segment:
                outliers[probe.place] = probe.errors(noise * share, bias * share, _variances(probe.x, outliers_of))
        del gradient, served
    gc.collect()
    return result, outliers, rotated


def measure_attentions(step: Step, attentions: Iterable[Attention]) -> dict[str, Errors]:
    """Return the errors of computing each attention again from codes, with its output in codes, by name.

    Args:
        step: on real tensors.
        attentions: of the step; those of equal operands are measured together, in `SEGMENTS`.
    """
    kinds = {a.name: f"{without_numbers(a.name)} {a.operands}" for a in attentions}  # equal of equal layers
    result: dict[str, Errors] = {}
    if not kinds:
        return result
    with step.apart():
        gradient = _Gradient(step, again=True)
        probes: defaultdict[str, list[_Probe]] = defaultdict(list)
        for probe in gradient.prober.living():
            probes[probe.place.rpartition("-")[0]].append(probe)  # of its operands, and of its output

        def wrong(names: Sequence[str], gradient: _Gradient = gradient) -> list[Tensor]:
            return gradient.wrong([probe for name in names for probe in probes[name]])

        for equal in alike([name for name in kinds if name in probes], kinds.__getitem__):
            for name, (noise, bias) in errors_of_each(equal, wrong, product(gradient.exact, gradient.exact) or 1.0):
                own = probes[name]
                result[name] = total([probe.errors(noise / len(own), bias / len(own)) for probe in own])
        del gradient, wrong
    gc.collect()
    return result


class _Gradient:
    """The gradient of a step that has run once, exactly, as often as it is asked for.

    Args:
        step: runs its forward pass.
        again: whether attention is computed again, from query, key and value that may be rounded.
    """

    def __init__(self, step: Step, again: bool = False) -> None:
        self.parameters, self.prober = step.parameters, _Prober(again)
        with Places(step.model, self.prober):
            self.loss, output = step.forward()
        del output
        self.exact = self.of(())

    def of(self, rounded: Collection["_Probe"], half: int | None = None, *, turned: bool = False) -> list[Tensor]:
        """Return the gradient with these tensors rounded; with one half of each, and its outliers exact, if given; or
        with their groups turned."""
        self.prober.rounded, self.prober.half, self.prober.turned = {id(probe) for probe in rounded}, half, turned
        found = torch.autograd.grad(self.loss, self.parameters, retain_graph=True, allow_unused=True)
        self.prober.rounded = set()
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]

    def wrong(self, rounded: Collection["_Probe"], half: int | None = None) -> list[Tensor]:
        """Return the error of the gradient with these tensors rounded."""
        return difference(self.of(rounded, half), self.exact)


class _Probe:
    """A saved tensor that comes back exactly or rounded. No dataclass, which layers would take apart."""

    nbytes = 0

    def __init__(self, place: str, function: str, prober: "_Prober", x: Tensor, quantizer: PerGroup) -> None:
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

    def in_groups(self, bits: Iterable[int] = BITS) -> dict[int, float]:
        """Return the squared errors in groups, by bits."""
        return _variances(self.x, partial(PerGroup, group_size=self.quantizer.group_size), bits)

    def errors(self, noise: float, bias: float, variances: Mapping[int, float] | None = None) -> Errors:
        """Return the errors for all numbers of bits of those at `PROBE` bits, which are as the variances: by default
        those in groups."""
        variances = self.in_groups() if variances is None else variances
        share = {bits: v / variances[PROBE] if variances[PROBE] else 0.0 for bits, v in variances.items()}
        return Errors(share, share).times(noise, bias)


def _variances(x: Tensor, quantizer: Callable[[int], Any], bits: Iterable[int] = BITS) -> dict[int, float]:
    """Return the sum of squared errors of `x`, or of its first elements, quantized with each number of bits."""
    rows = x if x.numel() <= SAMPLE else x[: max(1, SAMPLE * len(x) // x.numel())]
    return {b: sum_of_squares(quantizer(b).compress(rows).decompress() - rows) for b in bits}


# ---- outliers --------------------------------------------------------------------------------------------------------


@cache
def outliers_of(bits: int) -> Outlier:
    """Return the quantizer that saves the largest numbers exactly, and the others in so many bits."""
    return Outlier(bits=bits, ratio=0.02)


@cache
def outliers_bytes(elements: int, dtype: torch.dtype, bits: int) -> int:
    """Return the bytes that it saves of a tensor."""
    return outliers_of(bits).compress(torch.empty(elements, dtype=dtype, device="meta")).nbytes


def _serves(probe: _Probe) -> bool:
    """Return whether outliers err less than half as much as groups that take more bytes, at `PROBE` bits.

    Half, for rounding to the nearest level errs less than at random, and has a bias.
    """
    own = outliers_bytes(probe.x.numel(), probe.x.dtype, PROBE)
    more = min((b for b in BITS if probe.x.numel() * (b + 0.125) / 8 >= own), default=max(BITS))
    return _variances(probe.x, outliers_of, [PROBE])[PROBE] < probe.in_groups([more])[more] / 2


@dataclass(frozen=True)
class _ProbingRows(Saver):
    """The saver of an attention's operands that are to be measured."""

    probing: ByCall

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

    def choose(self, place: str, x: Tensor, function: str) -> ByCall:
        return ByCall(partial(self.probe, place, function), PerGroup(PROBE))

    def probe(self, place: str, function: str, x: Tensor, quantizer: PerGroup) -> Compressed:
        """Return a tensor that is to be measured."""
        probe = _Probe(place, function, self, x.detach(), quantizer)
        self.probes.append(weakref.ref(probe))
        return probe

    def share(self, compressed: Any, module: str) -> None:
        if isinstance(compressed, _Probe) and module not in compressed.users:
            compressed.users.append(module)

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        return _ProbingRows(self.choose(f"{attention}-", query, "")) if self.again else None
