"""Compares a training step of a model, unchanged and by a method of `fewbit.convert`: saved storages and the peak.

compare(model, x)                                     activations of 3 bits
compare(model, x, level="L2", glu="parts")            any options of `fewbit.convert`
compare(model, x, saved=PerGroup(bits=4))             within `fewbit.compress_saved_tensors`
compare(model, input_ids=tokens, labels=tokens)       keywords of the model's forward
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...tables import FewbitError
from ...tables.names import nearest_hint
from ...tables.table import check_bits
from ..activations.arguments import DEFAULT_BITS
from ..activations.catch import few_bit
from ..convert.actnn import ActNN, check_average_bits, check_level
from ..convert.api import convert, revert
from ..convert.method import Activations
from ..convert.options import configs_of
from ..convert.report import Report
from ..convert.vquant import VQuant
from ..memory.listing import Field, Sort, listing, share, size_text
from ..memory.peak import Peak, Timeline, peak_of_step, timeline_of_step
from ..memory.record import Profile, profile
from ..quantizers import PerGroup, Quantizer
from ..saved.hooks import compress_saved_tensors
from ..tensors.traits import is_abstract

# The options of `convert`; its `inputs` are those of the comparison.
OPTIONS = tuple(name for name in inspect.signature(convert).parameters if name not in ("model", "inputs"))
_OWN = ("functions", "saved", "peak", "timeline", "model_kwargs")
_AS_GIVEN = ("include", "exclude", "tables")  # of the options, those that do not belong to the name of a method


@dataclass(frozen=True)
class Comparison:
    """The memory of one training step with the model unchanged (`before`) and by a method (`after`).

    `str(comparison)` is a table of saved bytes by module, and lines that sum up these and the peaks.

    Attributes:
        bits: as given to `convert`; None if the method has its own default.
        method: the method in a few words, such as "3 bits" or "level L2, glu parts".
        before, after: the storages that the forward pass saves for the backward pass.
        report: the replaced modules, and the ones left, with reasons.
        peak_before, peak_after: peak memory of forward and backward pass; None if not measured.
        timeline_before, timeline_after: memory at each moment of them; None if not asked for.
        notes: on estimated numbers.
    """

    bits: float | None
    before: Profile
    after: Profile
    report: Report
    method: str = ""
    peak_before: Peak | None = None
    peak_after: Peak | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    timeline_before: Timeline | None = field(default=None, compare=False)
    timeline_after: Timeline | None = field(default=None, compare=False)

    @property
    def key(self) -> int | str:
        """The number of bits if the method is few-bit activations only; else the name of the method."""
        return int(self.bits) if self.bits is not None and self.method == _bits_text(self.bits) else self.method

    @property
    def saved(self) -> int:
        """Bytes by which the method reduces the saved storages; negative if it adds memory.

        Few-bit activations can add memory: if another op saves the output of an activation anyway, as a convolution
        saves its input, torch's ReLU costs nothing, and the code of a few-bit one is extra.
        """
        return self.before.total - self.after.total

    @property
    def peak_saved(self) -> int | None:
        """Bytes by which the method reduces the peak; None without peaks."""
        if self.peak_before is None or self.peak_after is None:
            return None
        return self.peak_before.bytes - self.peak_after.bytes

    @property
    def nonlinear(self) -> int:
        """Bytes that the replaced modules themselves save while they are exact."""
        return sum(s.bytes for s in self.before.saved if s.module in {r.name for r in self.report.replaced})

    def by(self, *fields: Field) -> dict[tuple[str, ...], tuple[int, int]]:
        """Return the bytes before and after for each combination of `fields`, in the order of saving."""
        before, after = self.before.by(*fields), self.after.by(*fields)
        return {key: (before.get(key, 0), after.get(key, 0)) for key in {**before, **after}}

    def table(self, *fields: Field, sort: Sort = "order", limit: int | None = None) -> str:
        """Return rows of `fields` with their bytes before and after, totals below, and a summary.

        Args:
            fields: the columns, "module" if none is named; storages that agree in all of them make one row.
            sort: "order" of saving, "bytes" (by those before, largest first) or "name".
            limit: most rows to show; the rest is summed up in one row.
        """
        fields = fields or ("module",)
        heads = ("exact", self.method, "saved")
        rows = listing(self.by(*fields), fields, heads, lambda row, _: share(row[0] - row[1], row[0]), sort, limit)
        return "\n".join([rows, "", self.summary(), *self.notes])

    def summary(self) -> str:
        """Return a line of the saved bytes before and after, and their difference; below it a line of the peaks."""
        few = f"{self.bits:g}-bit ones" if isinstance(self.key, int) else self.method
        lines = [_summed_up("kept for backward: ", self.before.total, self.after.total, few)]
        if self.peak_before is not None and self.peak_after is not None:
            peaks = self.peak_before.bytes, self.peak_after.bytes
            lines.append(_summed_up("peak of a step:    ", *peaks, few))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def compare(
    model: nn.Module,
    *inputs: object,
    functions: bool = False,
    saved: Quantizer | None = None,
    peak: bool = True,
    timeline: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Comparison:
    """Run a training step of `model` unchanged, and again by a method; return the saved storages and peaks of both.

    The model does not change: copies of its modules are measured, on the same parameters and copies of its buffers; the
    random state is preserved. The meta device and fake tensors work as for `profile`; `peak_of_step` defines the peak.

    Args:
        model: any module that `fewbit.convert` accepts; if it was converted before, `before` is that of the original.
        inputs: of the model.
        functions: also catch activations that are called as functions, as `fewbit.few_bit` does.
        saved: a quantizer, as PerGroup(bits=4): the converted model runs within `compress_saved_tensors(saved)`.
            Without options of `convert` the model is then not converted.
        peak: whether to measure the peaks, which runs a backward pass.
        timeline: whether to record the memory at each moment too, if `peak`.
        model_kwargs: keywords of the model's forward that are not its named parameters or have the name of an option.
        **keywords: the options of `fewbit.convert` (bits, level, glu, include, …), which are never passed to the model;
            and named parameters of the model's forward. Without options and `saved`: few-bit activations of 3 bits.

    Raises:
        FewbitError: a keyword is neither an option nor a parameter of the model's forward, an option is wrong, or the
            model cannot be copied or converted.

    Example:
        print(fewbit.memory.compare(model, x, level="L2"))
    """
    options, call = _sorted_out(model, inputs, model_kwargs, keywords)
    return next(_compared(model, call, [(options, saved)], functions, peak, timeline))


def compare_each(
    model: nn.Module,
    *inputs: object,
    bits: Iterable[int],
    functions: bool = False,
    peak: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> list[Comparison]:
    """Return the result of `compare` for each number of `bits`; the unchanged model runs only once.

    Example:
        one, two = fewbit.memory.compare_each(model, x, bits=[1, 2])
    """
    numbers = [check_bits(b) for b in bits]
    options, call = _sorted_out(model, inputs, model_kwargs, keywords)
    methods = [({**options, "bits": b}, None) for b in numbers]
    return list(_compared(model, call, methods, functions, peak))


def compare_methods(
    model: nn.Module,
    *inputs: object,
    methods: Iterable[tuple[Mapping[str, Any], Quantizer | None]],
    functions: bool = False,
    peak: bool = True,
    timeline: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Comparison]:
    """Yield the result of `compare` for each method: options of `convert`, and `saved`. The unchanged model runs once.

    Example:
        l2, hooks = compare_methods(model, x, methods=[({"level": "L2"}, None), ({}, PerGroup(bits=4))])
    """
    _, call = _sorted_out(model, inputs, model_kwargs, {})
    yield from _compared(model, call, list(methods), functions, peak, timeline)


def method_text(options: Mapping[str, Any], saved: Quantizer | None = None) -> str:
    """Return a method in a few words: "3 bits", "level L3, 1.5 bits", "glu parts, level L2, hooks 4 bits".

    Args:
        options: of `convert`, as given.
        saved: quantizer of the saved tensors.

    Example:
        fewbit.memory.method_text({"level": "L3", "bits": 1.5}) == "level L3, 1.5 bits"
    """
    given = {name: value for name, value in options.items() if value is not None and name not in _AS_GIVEN}
    bits = given.pop("bits", None)
    words = []
    for name, value in given.items():
        if value is not False and name != "methods":
            is_map = isinstance(value, Mapping)
            of_value = " ".join(f"{key}={part}" for key, part in value.items()) if is_map else value
            words.append(name.replace("_", " ") + ("" if value is True else f" {of_value}"))
    words += [repr(config) for config in given.get("methods", ())]
    if bits is None and saved is None and not given:
        bits = DEFAULT_BITS
    if bits is not None:
        words.append(_bits_text(bits))
    if saved is not None:
        words.append(f"hooks {saved.bits} bits" if isinstance(saved, PerGroup) else f"hooks {saved!r}")
    return ", ".join(words)


# ---- options and inputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The arguments of a call of a model."""

    inputs: tuple[object, ...]
    keywords: Mapping[str, Any]

    def is_abstract(self, model: nn.Module) -> bool:
        """Return whether a tensor of the call, or of `model`, has no values."""
        leaves = [*model.parameters(), *model.buffers(), *tree_leaves((self.inputs, self.keywords))]
        return any(isinstance(leaf, torch.Tensor) and is_abstract(leaf) for leaf in leaves)


def _sorted_out(
    model: nn.Module, inputs: tuple[object, ...], explicit: Mapping[str, Any] | None, keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], _Call]:
    """Return the options of `convert` among `keywords`, and the call with the remaining ones."""
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    others = {name: value for name, value in keywords.items() if name not in OPTIONS}
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind in by_name]
    for name in others:
        if name not in parameters:
            hint = nearest_hint(name, (*OPTIONS, *_OWN, *parameters))
            raise FewbitError(
                f"{name!r} is neither an option of convert ({', '.join(OPTIONS)}) nor a named parameter of the "
                f"forward of {type(model).__name__}{hint}. What it takes beyond those goes into model_kwargs={{…}}"
            )
    if explicit is not None and not isinstance(explicit, Mapping):
        raise FewbitError(f"model_kwargs is a mapping of keywords of the model, not of type {type(explicit).__name__}")
    return options, _Call(inputs, {**others, **(explicit or {})})


# ---- running both ----------------------------------------------------------------------------------------------------


def _compared(
    model: nn.Module,
    call: _Call,
    methods: Sequence[tuple[Mapping[str, Any], Quantizer | None]],
    functions: bool,
    peak: bool,
    timeline: bool = False,
) -> Iterator[Comparison]:
    """Measure the model unchanged, then yield its comparison with each method: options of `convert`, and hooks."""
    # Configs and hooks are made, and so checked, before anything runs.
    keywords = ("bits", "level", "outliers", "fuse_preact", "glu", "rounding", "attention")
    configs = [configs_of(options.get("methods") or (), *map(options.get, keywords)) for options, _ in methods]
    hooks = [[] if saved is None else [partial(compress_saved_tensors, saved)] for _, saved in methods]
    for make in chain(*hooks):
        make()
    twin = revert(twin_of(model))
    before, peak_before, timeline_before = _measured(twin, call, peak, timeline, [])
    for (options, saved), config, outer in zip(methods, configs, hooks, strict=True):
        is_given = any(value is not None for value in options.values())
        report = Report(twin, (), ()) if saved is not None and not is_given else _convert(twin, options)
        twin = report.model  # another one, where the model itself is an activation
        around = [*outer, *([partial(few_bit, _activation_bits(config))] if functions else [])]
        after, peak_after, timeline_after = _measured(twin, call, peak, timeline, around)
        notes = _notes(config, saved, call.is_abstract(twin))
        bits = options.get("bits")
        if bits is None and saved is None and not is_given:
            bits = DEFAULT_BITS
        twin = revert(twin)
        peaks, timelines = (peak_before, peak_after), (timeline_before, timeline_after)
        yield Comparison(bits, before, after, report, method_text(options, saved), *peaks, notes, *timelines)


def _measured(
    model: nn.Module,
    call: _Call,
    peak: bool,
    timeline: bool,
    around: Sequence[Callable[[], AbstractContextManager[Any]]],
) -> tuple[Profile, Peak | None, Timeline | None]:
    """Return the profile, and of both passes the peak and the timeline, within contexts made by `around`."""

    def run(what: Callable[..., Any]) -> Any:
        with ExitStack() as stack:
            if not call.is_abstract(model):  # which draws no numbers
                stack.enter_context(torch.random.fork_rng(devices=[]))
            for make in around:
                stack.enter_context(make())
            return what(model, *call.inputs, **call.keywords)

    found = run(profile)
    if peak and timeline:
        step = run(timeline_of_step)
        return found, step.peak, step
    return found, run(peak_of_step) if peak else None, None


def _convert(model: nn.Module, options: Mapping[str, Any]) -> Report:
    """Convert `model` without side effects: L5 becomes L4, which differs only in the setting of CUDA's allocator."""
    rest = {name: value for name, value in options.items() if name != "methods"}
    if rest.get("level") == "L5":
        rest["level"] = "L4"
    methods = [
        replace(config, level="L4") if isinstance(config, ActNN) and config.level == "L5" else config
        for config in options.get("methods") or ()
    ]
    return convert(model, *methods, **rest)


def _level(configs: Sequence[Any]) -> ActNN | None:
    return next((config for config in configs if isinstance(config, ActNN)), None)


def _activation_bits(configs: Sequence[Any]) -> int:
    """Return the bits of activations that are called as functions."""
    given = next((c.bits for c in reversed(configs) if isinstance(c, Activations | VQuant)), None)
    if (actnn := _level(configs)) is not None and given is None:
        given = check_average_bits(check_level(actnn.level), actnn.bits)
    return math.ceil(given or DEFAULT_BITS)


def _notes(configs: Sequence[Any], saved: object, abstract: bool) -> tuple[str, ...]:
    """Return notes on the numbers that are estimated because tensors have no values, and on swapping."""
    notes = []
    actnn = _level(configs)
    level = None if actnn is None else check_level(actnn.level)
    if abstract and level is not None and level.mixed:
        notes.append("estimated: every sample and layer has the average of bits, for their shares depend on values")
    values = any(isinstance(config, VQuant) for config in configs) or getattr(saved, "ratio", None) is not None
    if abstract and values:
        notes.append("estimated: as many large values as the ratio says, for which they are depends on values")
    if actnn is not None and level is not None and level.swaps:
        notes.append(f"{actnn.level}: what waits in host memory is counted as kept too")
    return tuple(notes)


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of the modules of `model`, on the same memory of parameters and on copies of its buffers."""
    memo: dict[int, Any] = {}
    try:
        for parameter in model.parameters():
            twin: Any = nn.Parameter(parameter.detach(), parameter.requires_grad)
            vars(twin).update(vars(parameter))
            memo[id(parameter)] = twin
        memo |= {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise FewbitError(f"the model cannot be copied, so convert it and profile it yourself: {error}") from error


# ---- words -----------------------------------------------------------------------------------------------------------


def _summed_up(what: str, before: int, after: int, few: str) -> str:
    exact = "with exact activations" if few.endswith("-bit ones") else "exact"
    word = "saved" if after <= before else "more"
    return (
        f"{what}{size_text(before)} {exact}, {size_text(after)} with {few}: "
        f"{size_text(abs(before - after))} ({share(abs(before - after), before)}) {word}"
    )


def _bits_text(bits: float) -> str:
    return f"{bits:g} bit{'' if bits == 1 else 's'}"
