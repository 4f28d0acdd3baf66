"""Makes a model keep less in a training that a tool runs, and carries what it learns through the tool's checkpoints.

preparation = Preparation(method={"level": "L2", "glu": "parts"})     or Preparation(memory="16GiB")
preparation.convert(model)             before the tool wraps the model
preparation.start(model, batch, saved)  before its first step: plans, checkpoints, measures
preparation.state(), load(state)       in a checkpoint
preparation.finish(model)              after its last step: no hook is left
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..runtime.activations.following import adaptation_of, adaptation_state, load_adaptation_state
from ..runtime.allocation.mixed_precision import MixedPrecision
from ..runtime.allocation.savers import SampleSaver
from ..runtime.convert.api import convert
from ..runtime.convert.find import FITTED
from ..runtime.convert.report import Report
from ..runtime.layers.base import CompressedLayer
from ..runtime.memory.listing import size_text
from ..runtime.plan.comparison import OPTIONS, method_text
from ..runtime.plan.document import Plan
from ..runtime.plan.fitted import Fitted
from ..runtime.plan.planner import fit
from ..runtime.quantizers import Quantizer
from ..runtime.saved.checkpoint import checkpoint, compute_once, undo_checkpoint
from ..runtime.saved.hooks import compress_saved_tensors
from ..tables import FewbitError
from ..tables.errors import shown
from ..tables.names import nearest_hint
from ..tables.waits import phases_of, ticking
from .kept import Beside, Kept, beside_exact, exact_twin, kept

_OWN = ("saved", "checkpoint")
EVERY = 10.0  # seconds between two lines: a plan of a small model on one thread was made in 27


@dataclass
class Preparation:
    """How a model is made to keep less.

    Attributes:
        method: options of `fewbit.convert`, and saved=PerGroup(4), for hooks around the forward pass, and
            checkpoint=8, for `fewbit.checkpoint` with so many bits; {} leaves the model exact.
        limits: memory, error, time, as for `fewbit.plan`, if the model is to be planned for.
        refresh: steps after which a plan is made again; None keeps the first.
        report, fitted: what was done.
        unmeasured: why nothing was measured though it was asked for; empty if it was measured.

    Raises:
        FewbitError: there is neither a method nor a limit, or both, or an option is not known.
    """

    method: Mapping[str, Any] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    refresh: int | None = None
    report: Report | None = None
    fitted: Fitted | None = None
    unmeasured: str = ""

    def __post_init__(self) -> None:
        self.limits = {name: value for name, value in self.limits.items() if value is not None}
        if (self.method is None) == (not self.limits):
            raise FewbitError("give memory= (or error= or time=), or method=, such as {'level': 'L2', 'glu': 'parts'}")
        if self.method is not None and not isinstance(self.method, Mapping):
            raise FewbitError(f"method is a mapping of options, not {shown(self.method)}")
        for name in self.method or ():
            if name not in (*OPTIONS, *_OWN):
                accepted = (*OPTIONS, *_OWN)
                hint = nearest_hint(str(name), accepted)
                raise FewbitError(f"method has no option {shown(name)}: {', '.join(accepted)}{hint}")
        if self.refresh is not None and self.method is not None:
            raise FewbitError("refresh= is for plans: give memory=")

    @property
    def text(self) -> str:
        """The method in a few words."""
        if self.method is None:
            return "plan for " + ", ".join(f"{name} {value}" for name, value in self.limits.items())
        words = method_text(self._options, self.method.get("saved")) if self._options or "saved" in self.method else ""
        bits = self.method.get("checkpoint")
        return ", ".join(part for part in (words, bits and f"checkpoints {bits} bits") if part) or "exact"

    @property
    def _options(self) -> dict[str, Any]:
        return {name: value for name, value in (self.method or {}).items() if name not in _OWN}

    def convert(self, model: nn.Module) -> None:
        """Convert a model by the method, before it is wrapped; adapters, of peft, are to be there already."""
        if self._options:
            options = self._options
            configs = options.pop("methods", ())
            self.report = convert(model, *configs, **options)

    def begin(
        self,
        model: nn.Module,
        batch: Mapping[str, Any] | tuple[Any, ...] | None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        optimizer: Any = "adamw",
        plan: Plan | None = None,
    ) -> None:
        """Do what needs a batch, or has to come after the tool has enabled its own checkpointing.

        Args:
            model: not wrapped, or the model inside its wrapper.
            batch: arguments, or keywords, of the model.
            loss: of the model's output, as for `fewbit.plan`.
            optimizer: that trains it, or its name.
            plan: of an earlier part of this training.

        Raises:
            FewbitError: a plan is to be made and there is no batch, or as for `fewbit.plan`.
        """
        method = self.method or {}
        if method.get("checkpoint") is not None:
            checkpoint(model, bits=method["checkpoint"])
        if method.get("saved") is not None:
            _save_through(model, method["saved"])
        if self.method is not None or (self.fitted is not None and vars(model).get(FITTED) is self.fitted):
            return
        if plan is None and self.fitted is not None:  # of a training that has ended
            plan = self.fitted.plan
        compute_once(model)  # the plan chooses the blocks to compute again
        if plan is not None:
            self.fitted = fit(model, plan=plan, loss=loss, optimizer=optimizer)
        elif batch is None:
            raise FewbitError("a plan takes a batch: give batch=, for this data set has none that can be taken")
        else:
            inputs = (batch,) if isinstance(batch, Mapping) else batch
            self.fitted = fit(model, *inputs, loss=loss, optimizer=optimizer, **self.limits)
        if self.refresh is not None:
            self.fitted.refresh(self.refresh)

    def start(
        self,
        model: nn.Module,
        batch: Mapping[str, Any] | tuple[Any, ...] | None,
        saved: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor] | None = None,
        optimizer: Any = "adamw",
        measure: bool = True,
        tells: bool = False,
    ) -> Kept | None:
        """Begin, or continue from the state `saved` if it has anything; return what a step on the batch keeps.

        Args:
            model, batch, loss, optimizer: as for `begin`.
            saved: what `state` returned; empty for a training that begins.
            measure: whether to measure; None is returned otherwise, and where there is no batch.
            tells: whether to print that a plan is made, and every `EVERY` seconds what is done for it.
        """
        plan = Plan.from_text(saved["plan"]) if "plan" in saved else None
        measured = batch if measure else None
        exact = exact_twin(model) if measured is not None and self.method else None  # before what `begin` puts around
        is_planned = self.method is None and plan is None and self.fitted is None
        with self._telling() if tells and is_planned else nullcontext():
            self.begin(model, batch, loss, optimizer, plan)
        learned = saved or self.state(model)
        found = None
        try:
            found = None if measured is None else kept(model, measured, loss, optimizer)
        except Exception as error:  # the batch may be none that the model takes; only a line of the log depends on it
            if self.method is None:
                raise
            is_ours = isinstance(error, FewbitError)
            why = "the model returns no loss: give loss=" if is_ours else f"the model does not take the batch: {error}"
            self.unmeasured = textwrap.shorten(f"not measured, for {why}", 80, placeholder=" …")
        if found is not None and self.fitted is not None:
            now = self.fitted.plan
            exactly = found.saved + now.exact_saved - now.saved
            found = replace(found, beside=Beside(exactly, now.error, now.time, "predicted", now.exact_peak))
        elif found is not None and measured is not None and exact is not None:
            found = replace(found, beside=beside_exact(model, exact, measured, loss, found.saved))
        self.load(model, learned)  # measuring has taught it something
        return found

    @contextmanager
    def _telling(self) -> Iterator[None]:
        print(f"fewbit: measuring steps, to {self.text}", flush=True)
        with (
            phases_of("fewbit.plan", "planning") as phase,
            ticking(lambda seconds: print(f"fewbit: {phase()}, {seconds:.0f} s", flush=True), EVERY, EVERY),
        ):
            yield

    def finish(self, model: nn.Module) -> None:
        """Leave no hook in a model whose training has ended; converted layers stay, and the plan for another one."""
        if self.fitted is not None:
            self.fitted.undo()
        undo_checkpoint(model)
        forward: Any = vars(model).get("forward")
        if getattr(forward, _MARK, False):
            vars(model)["forward"] = forward.__wrapped__
            if getattr(forward.__wrapped__, "__func__", None) is type(model).forward:
                del vars(model)["forward"]

    def announced(self, found: Kept | None) -> str:
        """Return a line on what was done, and what it keeps; of a plan another, on the peak that memory= limits."""
        outcome = self.unmeasured if found is None else str(found)
        text = f"fewbit: {self.text}" + (outcome and f": {outcome}")
        if found is None or found.beside is None or found.beside.peak is None:
            return text
        now, exact = size_text(found.peak), size_text(found.beside.peak)
        return f"{text}\nfewbit: peak {now} (exact {exact}), with parameters, gradients and the optimizer's state"

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state(self, model: nn.Module) -> dict[str, Any]:
        """Return what the model has learned of its saved tensors, and the plan in force."""
        found: dict[str, Any] = {"precisions": [p.state_dict() for p in _precisions(model)]}
        if adaptation_of(model) is not None:
            found["adaptation"] = adaptation_state(model)
        if self.fitted is not None:
            found["plan"] = self.fitted.plan.to_text()
        return found

    def load(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, with a model that was converted likewise."""
        for precision, saved in zip(_precisions(model), state.get("precisions", ()), strict=True):
            precision.load_state_dict(saved)
        if "adaptation" in state:
            load_adaptation_state(model, state["adaptation"])


def _precisions(model: nn.Module) -> list[MixedPrecision]:
    """Return the allocations of bits in a model."""
    savers = [m.saver for m in model.modules() if isinstance(m, CompressedLayer)]
    found = {id(s.precision): s.precision for s in savers if isinstance(s, SampleSaver)}
    return list(found.values())


_MARK = "_fewbit_saved"


def _save_through(model: nn.Module, quantizer: Quantizer) -> None:
    """Let the model's forward passes run within `compress_saved_tensors`."""
    forward = model.forward
    if getattr(forward, _MARK, False):
        return
    compress_saved_tensors(quantizer)  # checked before anything runs

    @wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        with compress_saved_tensors(quantizer):
            return forward(*args, **kwargs)

    setattr(within, _MARK, True)
    vars(model)["forward"] = within
