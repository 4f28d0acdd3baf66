"""Measures what converting modules does to the gradient, each time by a forward and a backward pass of the step.

    tables       codes of its derivative's table in place of what an activation saves
    gated MLPs   parts of the product in place of its inputs and itself
    outputs      the output of a normalization or GELU in place of its input
    blocks       inputs in codes, from which blocks are computed again
    chains       batch normalization, ReLU and convolution as one layer, which saves codes in fixed point

Modules of the first layers, and those of the last, are converted together; for outputs, all of a class.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...tables import FewbitError
from ..activations.table_lookup import Rounding
from ..convert.api import convert_beside
from ..convert.blpa import BLPA
from ..convert.find import Form, form_of
from ..convert.gated_mlps import GatedMLPs, candidates
from ..convert.method import Activations
from ..convert.normalizations import Normalizations
from ..layers import KeepOutput
from ..tensors.philox import draw_seed
from .gradient_error import (
    BITS,
    PROBE,
    TABLE_BITS,
    TABLE_PROBE,
    Errors,
    alike,
    difference,
    errors_of_each,
    finite,
    product,
    relative_variance,
    segments,
    together,
)
from .places import without_numbers
from .recomputing import computed_again
from .step import Step
from .structure import is_converted, structure_aside

MOST = max(BITS)
# What saves its output in place of its input.
BY_OUTPUT = (Normalizations(), Activations(keep="output"))


@dataclass(frozen=True)
class ConversionErrors:
    """What conversions do to the gradient, by name of the module.

    Attributes:
        tables: with codes of a table, by bits.
        stochastic: the same, if they are rounded at random.
        gated: of saving the parts of a gated MLP, by bits of the copies.
        outputs: squared relative error with the output in place of the input.
        blocks: of computing blocks again, by bits of their inputs.
        chains: of chains as one layer, by bits.
    """

    tables: Mapping[str, Errors]
    stochastic: Mapping[str, Errors]
    gated: Mapping[str, Errors]
    outputs: Mapping[str, float]
    blocks: Mapping[str, Errors]
    chains: Mapping[str, Errors]

    def times(self, noise: float, bias: float) -> "ConversionErrors":
        """Return them with both parts multiplied; of outputs the one, for their rounding differs among samples."""
        tables, stochastic, gated, blocks, chains = (
            {name: errors.times(noise, bias) for name, errors in kind.items()}
            for kind in (self.tables, self.stochastic, self.gated, self.blocks, self.chains)
        )
        outputs = {name: noise * error for name, error in self.outputs.items()}
        return ConversionErrors(tables, stochastic, gated, outputs, blocks, chains)


def measure_conversions(
    step: Step,
    tables: Mapping[str, nn.Module],
    gated: Sequence[str],
    outputs: Sequence[str],
    blocks: Sequence[str],
    chains: Sequence[str],
) -> ConversionErrors:
    """Return the errors of conversions.

    Args:
        step: on real tensors.
        tables: activations that have tables, by name.
        gated: names of gated MLPs, as `gated_mlps_of` returns them.
        outputs: names of what can save its output, as `outputs_of` returns them.
        blocks: names of blocks.
        chains: names of the linear parts of chains.
    """
    with step.apart():
        trial = _Trial(step)
        deterministic, stochastic = (
            _of_tables(trial, tables, rounding) for rounding in ("deterministic", "stochastic")
        )
        gates, kept, again = _of_gated_mlps(trial, gated), _of_outputs(trial, outputs), _of_blocks(trial, blocks)
        fused = _of_chains(trial, chains)
    kept = {name: error for name, error in kept.items() if isfinite(error)}
    return ConversionErrors(
        finite(deterministic), finite(stochastic), finite(gates), kept, finite(again), finite(fused)
    )


class _Trial:
    """A step that runs with some of its modules converted, always with the same dropout.

    What a table does to the gradient is the same each time, yet it averages out over steps as far as other batches err
    otherwise. Two halves of one batch tell: with e₁ the error if the modules are converted for the first half alone,
    and e₂ for the second, the error is e₁ + e₂, and 4⟨e₁, e₂⟩ the square of what all batches have in common.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._state = torch.random.get_rng_state()

    @cached_property
    def exact(self) -> list[Tensor]:
        """The gradient without conversions."""
        return self.gradient(0)

    @cached_property
    def scale(self) -> float:
        """The squared norm of the gradient."""
        return product(self.exact, self.exact) or 1.0

    def converted(self, *methods: Any, include: Sequence[str]) -> "_Converted":
        """Return what the conversion of some modules does to the gradient.

        Args:
            *methods: of `convert`.
            include: names of the modules.
        """
        model = self.step.model
        before = {name: _with_shared_parameters(model.get_submodule(name)) for name in include}
        exact = self.exact
        wholes, halves = [], []
        with structure_aside(model):
            report = convert_beside(model, *methods, include=include)
            names = [name for name in dict.fromkeys(row.name for row in report.replaced) if name in before]
            for draw in range(2):
                with _only_half(model, {name: before[name] for name in names}, draw):
                    halves.append(difference(self.gradient(draw), exact))
            if any(isinstance(method, GatedMLPs) for method in methods):
                wholes.append(difference(self.gradient(len(halves)), exact))
        return _Converted(names, self.scale, halves[0], halves[1], wholes[0] if wholes else None)

    def gradient(self, draw: int) -> list[Tensor]:
        """Return the gradient; what is rounded at random is so otherwise in each draw."""
        torch.random.set_rng_state(self._state)
        for _ in range(draw):  # copies are rounded by a stream of their own, which begins anew with torch's
            draw_seed()
        loss, _ = self.step.forward()
        parameters = self.step.parameters
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@dataclass(frozen=True)
class _Converted:
    """Errors of the gradient with some modules converted.

    Attributes:
        names: of the modules.
        scale: the squared norm of the exact gradient.
        one, two: with the modules converted for the first and the second half of the batch, rounded in two draws.
        whole: for all of the batch, in a third draw.
    """

    names: list[str]
    scale: float
    one: list[Tensor]
    two: list[Tensor]
    whole: list[Tensor] | None

    @property
    def both(self) -> list[Tensor]:
        """The error of the whole batch."""
        return [x + y for x, y in zip(self.one, self.two, strict=True)]

    @property
    def noise_and_bias(self) -> tuple[float, float]:
        """The squared relative error of each module that averages out over steps, and the rest."""
        square = product(self.both, self.both)
        bias = min(max(0.0, 4 * product(self.one, self.two)), square)
        return self._share(square - bias), self._share(bias)

    @property
    def rounding(self) -> float:
        """The part of it that is another one in each draw."""
        assert self.whole is not None
        square = (product(self.both, self.both) + product(self.whole, self.whole)) / 2
        return self._share(max(0.0, square - product(self.both, self.whole)))

    def _share(self, square: float) -> float:
        return square / self.scale / max(1, len(self.names))


def _with_shared_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has its parameters and buffers in common with it."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(t): t for t in tensors})


@contextmanager
def _only_half(model: nn.Module, exact: Mapping[str, nn.Module], half: int) -> Iterator[None]:
    """Let modules compute one half of a batch by themselves, the other half by exact copies, until the end of this."""
    modules = {name: model.get_submodule(name) for name in exact}
    for name, module in modules.items():
        vars(module)["forward"] = partial(_halves, half, partial(type(module).forward, module), exact[name])
    try:
        yield
    finally:
        for module in modules.values():
            vars(module).pop("forward", None)


def _halves(half: int, converted: Any, exact: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the output of `converted` for one half of the arguments' first dimension above 1, of `exact` otherwise."""
    x = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
    dim = next((d for d in range(x.dim()) if x.shape[d] > 1), None)
    if dim is None:
        return converted(*args, **kwargs)
    size, middle = x.shape[dim], x.shape[dim] // 2
    in_place = False

    def part(start: int, end: int) -> Any:
        def copied(leaf: Any) -> Any:
            belongs = isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size
            # In views of one tensor, what the second half does in place would change what the first has saved.
            return leaf.narrow(dim, start, end - start).clone() if belongs else leaf

        return tree_map(copied, (args, kwargs))

    outputs = []
    for i, (given, named) in enumerate((part(0, middle), part(middle, size))):
        outputs.append((converted if i == half else exact)(*given, **named))
        in_place = in_place or any(leaf is outputs[-1] for leaf in tree_leaves((given, named)))
    return x.copy_(torch.cat(outputs, dim)) if in_place else torch.cat(outputs, dim)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _of_tables(trial: _Trial, activations: Mapping[str, nn.Module], rounding: Rounding) -> dict[str, Errors]:
    """Return the errors with codes of tables of `TABLE_PROBE` bits; other tables err as their own errors say."""
    result: dict[str, Errors] = {}
    for segment in together(activations, lambda name: type(activations[name]).__name__):
        if not _errors_of_tables(activations[segment[0]], rounding):
            continue
        found = trial.converted(Activations(TABLE_PROBE, rounding), include=segment)
        noise, bias = found.noise_and_bias
        if rounding == "stochastic":  # f' on average, whatever two halves of one batch say
            noise, bias = noise + bias, 0.0
        for name in found.names:
            own = _errors_of_tables(activations[name], rounding)
            probe = own.get(TABLE_PROBE)
            share = {bits: error / probe if probe else 0.0 for bits, error in own.items()}
            result[name] = Errors(share, share).times(noise, bias)
    return result


def _errors_of_tables(activation: nn.Module, rounding: Rounding) -> dict[int, float]:
    """Return the tables' own errors by bits; of stochastic ones none, if deterministic ones err less than rounding."""
    form = form_of(activation)
    assert isinstance(form, Form)
    try:
        tables = {bits: form.make(bits=bits, rounding=rounding).table for bits in TABLE_BITS}
    except FewbitError:  # a derivative without bounds, such as that of squared ReLU, has no table for random rounding
        return {}
    if rounding == "stochastic" and any(table.kind != "stochastic" for table in tables.values()):
        return {}
    return {table.bits: table.error for bits, table in tables.items() if table.bits == bits}


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


def gated_mlps_of(model: nn.Module) -> list[str]:
    """Return the names of the gated MLPs whose parts can be saved."""
    found = {each.name: each.current for each in candidates(model)}
    names = [
        name for name, module in found.items() if name and not (isinstance(module, nn.Module) and is_converted(module))
    ]
    with structure_aside(model):
        report = convert_beside(model, GatedMLPs(), include=names) if names else None
    return [row.name for row in report.replaced if row.name in found] if report else []


def _of_gated_mlps(trial: _Trial, names: Sequence[str]) -> dict[str, Errors]:
    """Return the errors of saving parts: of the copies, by their bits, and of the table, which they do not change."""
    result: dict[str, Errors] = {}
    for segment in together(names, lambda _: ""):
        found = trial.converted(GatedMLPs(copy_bits=PROBE), include=segment)
        noise, bias = found.noise_and_bias
        of_copies = min(found.rounding, noise)
        probe = relative_variance(PROBE)
        noises = {b: noise - of_copies + of_copies * relative_variance(b) / probe for b in BITS}
        result.update(dict.fromkeys(segment, Errors(noises, dict.fromkeys(BITS, bias))))
    return result


# ---- outputs ---------------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module) -> list[str]:
    """Return the names of the normalizations and GELUs that can save their output in place of their input."""
    plain = {name for name, module in model.named_modules() if name and not is_converted(module)}
    with structure_aside(model):
        report = convert_beside(model, *BY_OUTPUT)
        names = [row.name for row in report.replaced if row.name in plain]
        return [name for name in names if _keeps_output(model.get_submodule(name))]


def _keeps_output(module: nn.Module) -> bool:
    saver = getattr(module, "saver", None)
    return isinstance(saver, KeepOutput) or getattr(module, "keep", None) == "output"


def _of_outputs(trial: _Trial, names: Sequence[str]) -> dict[str, float]:
    """Return the errors of a dtype's rounding, and of GELU's interpolation, which differ by class."""
    result: dict[str, float] = {}
    model = trial.step.model
    for segment in together(names, lambda name: type(model.get_submodule(name)).__qualname__):
        found = trial.converted(*BY_OUTPUT, include=segment)
        result.update(dict.fromkeys(segment, sum(found.noise_and_bias)))
    return result


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _of_blocks(trial: _Trial, names: Sequence[str]) -> dict[str, Errors]:
    """Return the errors of computing blocks again from inputs in codes."""
    result: dict[str, Errors] = {}
    draws = count()
    share = {bits: relative_variance(bits) / relative_variance(PROBE) for bits in BITS}

    def wrong(blocks: Sequence[str]) -> list[Tensor]:
        with computed_again(trial.step.model, blocks, PROBE):
            return difference(trial.gradient(next(draws)), trial.exact)

    for equal in alike(names, without_numbers):
        for name, (noise, bias) in errors_of_each(equal, wrong, trial.scale):
            result[name] = Errors(share, share).times(noise, bias)
    return result


# ---- chains ----------------------------------------------------------------------------------------------------------


def _of_chains(trial: _Trial, names: Sequence[str]) -> dict[str, Errors]:
    """Return the errors of chains as one layer, which rounds to the nearest level and limits what is far from the mean.

    More bits make steps smaller, and limit as much: two numbers of bits tell the two apart. Two chains of the same
    weights' shapes are measured together; of more, the first and the last.
    """
    result: dict[str, Errors] = {}
    trials = [trial, *(_Trial(half) for half in trial.step.halves())] if names else []

    def kind(name: str) -> str:
        return f"{without_numbers(name)} {[p.shape for p in trial.step.model.get_submodule(name).parameters()]}"

    for equal in alike(names, kind):
        for segment in [equal] if len(equal) == 2 else segments(equal):
            few, many = (_of_chains_at(bits, trials, segment) for bits in (PROBE, MOST))
            result.update(dict.fromkeys(segment, Errors(*map(_at_all_bits, few, many))))
    return result


def _of_chains_at(bits: int, trials: Sequence[_Trial], names: Sequence[str]) -> tuple[float, float]:
    """Return the noise and the bias of one of equal chains at a number of bits.

    Batch normalization takes the statistics of a whole batch, so that halves are batches of their own here: the share
    of bias is that of what their errors have in common; all, where there are no halves.
    """
    model, exact = trials[0].step.model, [t.exact for t in trials]
    with structure_aside(model):
        convert_beside(model, BLPA(bits), include=[*names])
        whole, *halves = (difference(t.gradient(0), g) for t, g in zip(trials, exact, strict=True))
    square, of_bias = product(whole, whole) / trials[0].scale / len(names), 1.0
    if halves:
        both = [x + y for x, y in zip(*halves, strict=True)]
        of_bias = min(max(0.0, 4 * product(*halves) / (product(both, both) or 1.0)), 1.0)
    return (1 - of_bias) * square, of_bias * square


def _at_all_bits(few: float, many: float) -> dict[int, float]:
    """Return squared errors by number of bits, of steps and of limits, from those at `PROBE` and at `MOST` bits."""
    share = 4.0 ** (PROBE - MOST)
    of_limits = max(0.0, (many - share * few) / (1 - share))
    of_steps = max(0.0, few - of_limits)
    return {bits: of_steps * 4.0 ** (PROBE - bits) + of_limits for bits in BITS}
