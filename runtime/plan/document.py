"""A plan: what is done with each saved tensor, activation and block, and what that is predicted to cost.

plan = fewbit.plan(model, batch, memory="16GiB")
print(plan)                                     choices by groups of equal layers, memory, error, time
plan.to_json("plan.json")                       a file to read and to edit; Plan.from_json reads it
fewbit.fit(model, plan=plan)                    trains by it
"""

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from textwrap import wrap
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.columns import WIDTH, columns, wrapped_sizes
from ...tables.errors import check_integer, shown
from ...tables.files import atomic_write
from ...tables.json_format import dumps, read_json
from ..memory.listing import share, size_text
from .places import without_numbers
from .problem import (
    ALL_GRAPHS,
    ATTENTION,
    CHAIN,
    CHUNKED,
    EXACT,
    FLOAT8,
    GATED,
    GROUPS,
    HOST,
    METHODS,
    OF_STEPS,
    OF_TENSORS,
    OUTLIERS,
    OUTPUT,
    RECOMPUTE,
    ROTATED,
    STOCHASTIC,
    TABLE,
    TILED,
)
from .static import is_sharded_by_fsdp
from .untrusted import read

FORMAT = "fewbit plan 1"
_WITH_BITS = (GROUPS, HOST, OUTLIERS, ROTATED, TABLE, STOCHASTIC, ATTENTION, GATED)
_WITHOUT_BITS = (EXACT, OUTPUT, FLOAT8, *OF_STEPS)
# Methods for one kind of target: a tensor, a module, an attention.
_IN_BLOCKS = (TABLE, STOCHASTIC, RECOMPUTE, GATED, OUTPUT, CHAIN)
OF_MODULES = (*_IN_BLOCKS, *OF_STEPS)
_ALIKE = (OF_TENSORS, _IN_BLOCKS, (ATTENTION,), *((method,) for method in OF_STEPS))
EDITED = "edited since: memory, error and time are those of the plan before"


@dataclass(frozen=True)
class Choice:
    """What is done with a saved tensor, an activation or a block.

    Attributes:
        target: place of a tensor, ``layers.0.mlp:1``; or the name of a module; or of an attention,
            ``layers.0.self_attn:attention0``; or ``all compiled graphs``, whatever they save.
        method: of a tensor, ``exact``, ``groups`` (codes of `PerGroup`), ``host`` (such codes in host memory),
            ``outliers`` (`Outlier`: the largest numbers exactly, codes of the rest), ``rotated`` (`Rotated`: codes of
            groups turned at random) or ``float8`` (the operand that torchao's float8 layers make of it, exactly); of an
            activation, ``table`` (codes of its derivative's table) or ``stochastic`` (such codes, rounded at random);
            of a block or a part of one, ``recompute`` (from its input, exactly or in codes); ``attention`` (computed
            again from query, key and value in codes); of a gated MLP, ``gated`` (parts of its product, from which its
            inputs and itself are computed); of a normalization or GELU, ``output`` (from which its input follows, and
            which the layer behind it saves exactly); of a convolution, ``chain`` (one layer with the batch
            normalization and ReLU before it, which saves one tensor: codes in fixed point, or its exact input); of the
            head of a language model, ``chunked`` (logits and loss over chunks of tokens, exactly); of an MLP or an
            adapted projection, ``tiled`` (over tiles of tokens, exactly).
        bits: of the codes, 1 to 8; None where there are none, as of ``recompute`` and ``chain`` from an exact input.
        exact_bytes: bytes that are saved exactly.
        nbytes: bytes that are saved by this plan, on the device.
        noise: squared error of the gradient, relative to its squared norm, that averages out over steps.
        bias: squared error that does not.
        seconds: that it adds to a step.

    Raises:
        FewbitError: the method is none of these, or the bits do not suit it.
    """

    target: str
    method: str
    bits: int | None
    exact_bytes: int
    nbytes: int
    noise: float
    bias: float
    seconds: float

    def __post_init__(self) -> None:
        if min(self.exact_bytes, self.nbytes) < 0 or min(self.noise, self.bias) < 0:
            raise FewbitError(f"bytes and errors of {shown(self.target)} are not below 0")
        if self.method not in METHODS:
            raise FewbitError(f"the method of {self.target} is one of {', '.join(METHODS)}, not {shown(self.method)}")
        if self.method in _WITH_BITS:
            check_integer(f"bits of {self.target}", self.bits, 1, 8)
        elif self.bits is not None and self.method in _WITHOUT_BITS:
            raise FewbitError(f"{self.target} is {self.method}, which has no bits, but {shown(self.bits)} are given")
        elif self.bits is not None:
            check_integer(f"bits of {self.target}", self.bits, 1, 8)

    @property
    def text(self) -> str:
        """The choice in a few words."""
        words = {
            EXACT: "exact",
            FLOAT8: "exact, as its float8 operand",
            GROUPS: f"{self.bits} bits",
            OUTLIERS: f"{self.bits} bits, outliers exact",
            ROTATED: f"{self.bits} bits, rotated",
            TABLE: f"table, {self.bits} bits",
            STOCHASTIC: f"table at random, {self.bits} bits",
            ATTENTION: f"computed again, {self.bits} bits",
            GATED: f"parts, {self.bits} bits",
            OUTPUT: "by its output",
            RECOMPUTE: "recompute" if self.bits is None else f"recompute from {self.bits} bits",
            HOST: f"{self.bits} bits, host memory",
            CHAIN: "one layer" + (", from its input" if self.bits is None else f", {self.bits} bits"),
            CHUNKED: "loss in chunks",
            TILED: "in tiles of tokens",
        }
        return words[self.method]


@dataclass(frozen=True)
class PeakMemory:
    """What is in memory at the peak of a step, in bytes.

    Attributes:
        parameters: with buffers.
        gradients: of the parameters, as far as they exist by then.
        optimizer: its state.
        saved: by the plan's choices.
        workspace: all else: results in use, temporary ones, gradients of activations.
        moment: where in the step the peak lies.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    workspace: int
    moment: str

    @property
    def total(self) -> int:
        """The peak."""
        return self.parameters + self.gradients + self.optimizer + self.saved + self.workspace


@dataclass(frozen=True)
class Timeline:
    """Bytes at moments of a step, in order: the most of what lies between two moments that are kept.

    Attributes:
        exact: of what a step that saves all exactly saves.
        saved: of what the plan saves.
        gradients: of the parameters' gradients.
        workspace: of all else that changes.
        backward: number of the moment at which the backward pass begins.
    """

    exact: tuple[int, ...]
    saved: tuple[int, ...]
    gradients: tuple[int, ...]
    workspace: tuple[int, ...]
    backward: int


@dataclass(frozen=True)
class Point:
    """What a plan, or another way to train, takes.

    Attributes:
        name: "plan", "exact", "checkpointing" (all blocks), "4 bits" (all tensors), "torch.compile", or
            "torch's budget 0.5" (its `activation_memory_budget`).
        memory: peak in bytes.
        error: relative error of the gradient.
        time: of a step, relative to the exact one.
    """

    name: str
    memory: int
    error: float
    time: float


@dataclass(frozen=True)
class Plan:
    """A plan for the training of one model. `str(plan)` is a table.

    Attributes:
        model: what identifies the model: a digest of its modules and parameters.
        choices: in the order of the forward pass.
        peak: predicted.
        exact_peak: of a step that saves all exactly.
        error: predicted relative error of the gradient.
        bias: the part of it that does not average out.
        seconds: of an exact step.
        gap: how much better a plan could be at most, relative, by the solver's bound.
        limits: what the plan was made for: memory, error, time.
        batch: samples in a batch.
        compiled: whether it is for `torch.compile` with the backend fewbit.
        notes: what was estimated and not measured, and what would be gained by more memory.
        timeline: memory through the step.
        frontier: plans for other memories, and other ways to train, as far as `plan` was asked for them.
        recompute: of a compiled step, torch's `activation_memory_budget`: below 1 some is computed again.
        recompute_seconds: that it takes longer than its choices say, as it was measured; most of it for that, or for
            copies to host memory.
        host_memory: of a compiled step, most bytes of a graph's codes that wait in host memory.

    Example:
        plan = fewbit.plan(model, x, loss=lambda y: y.sum(), error=0.1)
        plan.to_json("plan.json")
        fewbit.fit(model, plan=fewbit.Plan.from_json("plan.json"))
    """

    model: str
    choices: tuple[Choice, ...]
    peak: PeakMemory
    exact_peak: int
    error: float
    bias: float
    seconds: float
    gap: float
    limits: dict[str, float | None]
    batch: int
    compiled: bool
    timeline: Timeline
    notes: tuple[str, ...] = field(default=())
    frontier: tuple[Point, ...] = field(default=())
    recompute: float = 1.0
    recompute_seconds: float = 0.0
    host_memory: int | None = None

    @property
    def time(self) -> float:
        """Time of a step relative to the exact one: predicted, of a compiled step measured."""
        added = self.recompute_seconds + sum(choice.seconds for choice in self.choices)
        return 1 + added / max(self.seconds, 1e-9)

    @property
    def compile_options(self) -> dict[str, Any]:
        """The options of the backend fewbit for a compiled step: the bits of each place, and what is computed again or
        waits in host memory."""
        bits = {choice.target: choice.bits for choice in self.choices if choice.method not in OF_STEPS}
        options: dict[str, Any] = {"bits": bits.get(ALL_GRAPHS, bits)}
        if self.recompute != 1:
            options["recompute"] = self.recompute
        if self.host_memory is not None:
            options["host_memory"] = self.host_memory
        return options

    @property
    def saved(self) -> int:
        """Bytes saved for the backward pass, of what is planned."""
        return sum(choice.nbytes for choice in self.choices)

    @property
    def exact_saved(self) -> int:
        """Bytes that would be saved exactly."""
        return sum(choice.exact_bytes for choice in self.choices)

    def with_choice(self, target: str, method: str, bits: int | None = None) -> "Plan":
        """Return the plan with another choice for `target`; its predictions are then those of the plan before.

        Args:
            target: of a choice.
            method: ``exact``, or one for the same kind of target: a tensor, a module, an attention.
            bits: of the codes.

        Raises:
            FewbitError: the plan has no such target, or the choice is wrong.
        """
        before = next((choice for choice in self.choices if choice.target == target), None)
        if before is None:
            raise FewbitError(f"the plan has no {shown(target)}")
        alike = next(methods for methods in _ALIKE if before.method in methods)
        if self.compiled:
            alike = (EXACT, GROUPS)
        if method in METHODS and method not in (EXACT, *alike):
            raise FewbitError(f"{target} is {before.method}, and may be exact or {', '.join(alike)}, not {method}")
        changed = [replace(c, method=method, bits=bits) if c is before else c for c in self.choices]
        notes = (*self.notes, EDITED) if EDITED not in self.notes else self.notes
        return replace(self, choices=tuple(changed), notes=notes)

    def check_model(self, model: nn.Module) -> None:
        """Raise FewbitError unless the plan was made for this model, or one of the same modules and parameters."""
        if signature(model) != self.model:
            raise FewbitError(f"this plan was made for another model than this {type(model).__name__}")
        names = {name for name, _ in model.named_modules()}
        for choice in self.choices if not self.compiled else ():
            of_module = choice.method in OF_MODULES
            if choice.target.partition(":")[0] not in names or (of_module and choice.target not in names - {""}):
                raise FewbitError(f"the plan names {shown(choice.target)}, which this {type(model).__name__} has not")

    def checkpoint_contexts(self, model: nn.Module, *inputs: Any) -> dict[str, Callable[[], Any]]:
        """Return, for each block that the plan does not save exactly, a `context_fn` for torch's checkpoint.

        Torch then saves what the plan saves exactly, by a policy of its selective checkpointing, and computes the rest
        of the block again, also what the plan saves in codes. The model's forward pass runs once.

        Args:
            model: that the plan was made for.
            *inputs: a batch, as for `fewbit.plan`.

        Raises:
            FewbitError: the plan is for another model, or for a compiled step, whose compiler chooses itself.

        Example:
            plan = fewbit.plan(model, x, loss=lambda y: y.sum(), error=0.1)
            for name, context_fn in plan.checkpoint_contexts(model, x).items():
                print(name, context_fn)  # of torch.utils.checkpoint.checkpoint(…, use_reentrant=False)
        """
        from .selective import contexts_of

        self._check_eager(model)
        return contexts_of(model, inputs, {c.target: c.method for c in self.choices}, EXACT)

    def budgets(self, model: nn.Module) -> dict[str, float]:
        """Return the share of its exact bytes that each block saves by the plan, for torch's compiler by regions.

        Raises:
            FewbitError: as for `checkpoint_contexts`.

        Example:
            plan = fewbit.plan(model, x, loss=lambda y: y.sum(), error=0.1)
            for name, budget in plan.budgets(model).items():
                model.get_submodule(name).compile(backend="fewbit", options={"bits": None, "recompute": budget})
        """
        from .selective import budgets_of

        self._check_eager(model)
        return budgets_of(model, ((c.target, c.exact_bytes, c.nbytes) for c in self.choices))

    def _check_eager(self, model: nn.Module) -> None:
        if self.compiled:
            raise FewbitError("a compiled plan has one budget of torch's compiler, plan.recompute, and names no ops")
        self.check_model(model)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file."""
        with atomic_write(path) as stream:
            stream.write(self.to_text().encode())

    def to_text(self) -> str:
        """Return the plan as the text of its file."""
        return dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> "Plan":
        """Return the plan of a file.

        Raises:
            FewbitError: the file cannot be read or holds no plan.
        """
        return _plan_of(read_json(path), os.fspath(path))

    @staticmethod
    def from_text(text: str) -> "Plan":
        """Return the plan that `to_text` wrote.

        Raises:
            FewbitError: the text is no plan.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FewbitError(f"not a plan: {error}") from None
        return _plan_of(data, "text")

    def __str__(self) -> str:
        rows = [("saved by", "choice", "tensors", "exact", "now", "of the error", "time")]
        total = sum(c.noise + c.bias for c in self.choices)
        equal: defaultdict[tuple[str, str], list[Choice]] = defaultdict(list)  # of equal layers, which differ in number
        for choice in self.choices:
            name = without_numbers(choice.target)
            # Values of a compiled graph are numbered through: mul_7 of the second layer is what mul is of the first.
            equal[re.sub(r"_\d+$", "", name) if self.compiled else name, choice.text].append(choice)
        for (name, text), group in equal.items():
            error = sum(c.noise + c.bias for c in group)
            exact, now = sum(c.exact_bytes for c in group), sum(c.nbytes for c in group)
            seconds = sum(c.seconds for c in group)
            of_error = share(error, total) or "0.0%"
            time = f"{seconds / max(self.seconds, 1e-9):+.1%}"
            rows.append((name, text, str(len(group)), size_text(exact), size_text(now), of_error, time))
        peak = self.peak
        parts = ("parameters", "gradients", "optimizer", "saved", "workspace")
        made_of = ", ".join(f"{name} {size_text(getattr(peak, name))}" for name in parts)
        lines = [
            *columns(rows, 2, WIDTH),
            "",
            f"saved: {size_text(self.exact_saved)} exactly, {size_text(self.saved)} by this plan",
            f"peak: {size_text(peak.total)} ({peak.total:,} bytes), {size_text(self.exact_peak)} exactly",
            f"  {peak.moment}",
            *wrapped_sizes(made_of),
            f"error of the gradient: {self.error:.3g}, of which {self.bias:.3g} does not average out",
            f"time of a step: {self.time:.3f} of the exact one, batch of {self.batch}",
            f"a plan could be better by {self.gap:.2%} at most",
            *([] if self.recompute == 1 else [f"computed again as by torch's memory budget of {self.recompute:g}"]),
            *(
                []
                if self.host_memory is None
                else [f"codes wait in host memory, {size_text(self.host_memory)} at most"]
            ),
            *(line for note in self.notes for line in wrap(note, WIDTH, subsequent_indent="  ")),
        ]
        return "\n".join(lines)


def _plan_of(data: Any, source: str) -> Plan:
    """Return the plan that the data of a file hold; raise FewbitError if they hold none."""
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise FewbitError(f"{source}: not a plan")
    try:
        found = read(Plan, data)
        twice = Counter(choice.target for choice in found.choices).most_common(1)
        if twice and twice[0][1] > 1:
            raise FewbitError(f"a plan has one choice for {shown(twice[0][0])}, not {twice[0][1]}")
        if not 0 <= found.recompute <= 1:
            raise FewbitError(f"recompute is a number from 0 to 1, not {shown(found.recompute)}")
        if found.host_memory is not None and (found.host_memory < 1 or not found.compiled):
            raise FewbitError(f"host_memory is a number of bytes for a compiled step, not {shown(found.host_memory)}")
        return found
    except (FewbitError, RecursionError) as error:
        raise FewbitError(f"{source}: not a plan: {error}") from None


def signature(model: nn.Module) -> str:
    """Return a digest of a model: names and classes of modules, and shape, dtype and training of each parameter."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        kind = type(module)
        if is_sharded_by_fsdp(module):
            kind = kind.__bases__[-1]  # that it had before torch's `fully_shard` made a subclass of it
        digest.update(f"{name}:{kind.__name__};".encode())
    for name, parameter in model.named_parameters():
        form = f"{tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        digest.update(f"{name}:{form};".encode())
    return digest.hexdigest()
