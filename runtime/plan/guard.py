"""A guard: while a model trains with few bits, some steps are measured exactly, and layers that few bits hurt get more.

    fitted = fewbit.fit(model, batch, memory="16GiB", guard=True)       fitted.guard
    guard = fewbit.guard(model, options={"bits": 2})                    compiles the model, and guards it

Before a step that is measured, its batch runs twice more from the same random state: exactly, and as the model trains.
The gradients of a few layers tell the relative error of each. Where it is too large, all layers are measured; the last
of the forward pass that err too much are where errors arise, for the backward pass brings them to all before.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from ..compile.options import CompileOptions
from ..tensors.traits import sum_of_squares
from .document import Plan
from .fitted import OUTSIDE, Fitted, layers_of
from .step import Loss, Step

_log = logging.getLogger("fewbit.guard")
# A step along a gradient with an independent relative error e lowers a quadratic loss as long as the rate is below
# 1 / (1 + e²) of the largest that serves exactly. At e √3 = 1 that is three quarters, and a rate that was chosen
# exactly may be too large beyond.
MOST = 1 / math.sqrt(3)
# An error that grows is let be below this one, which costs .001 of the loss (problem.py, `Price`).
NEGLIGIBLE = 0.1
# Two runs in 100 steps are 2 % of the time.
EVERY, SAMPLE, GROWTH = 100, 4, 4.0


class _Guarded(ABC):
    """A model that trains with few bits, by a plan or by the options of the backend, and what can be done for it."""

    model: nn.Module
    fitted: Fitted | None = None

    @abstractmethod
    def exactly(self) -> AbstractContextManager[None]:
        """Train exactly within this block."""

    def as_it_trains(self) -> AbstractContextManager[None]:
        """Train as the model does, without being counted, within this block."""
        return nullcontext()

    @abstractmethod
    def surround(self, guard: "Guard") -> None:
        """Let the guard see each call of the model."""

    @abstractmethod
    def remove(self) -> None:
        """Let it see none."""

    def move_bits(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Let bits move to where they help now, within the memory; return whether anything changed."""
        if self.fitted is None:
            return False  # its bits are those of the options
        before = self.fitted.plan.choices
        self.fitted.plan_again(inputs, keywords)
        one, other = ({c.target: (c.method, c.bits) for c in each} for each in (before, self.fitted.plan.choices))
        return one != other

    def save_exactly(self, layers: Sequence[str]) -> None:
        """Round nothing in these layers, and in no others."""
        assert self.fitted is not None
        self.fitted.save_exactly(layers)

    def use(self, plan: Plan) -> None:
        """Train by another plan."""
        if self.fitted is None:
            raise FewbitError("the state is that of a plan, and this model is compiled without one")
        self.fitted.use(plan)


class Guard:
    """Measures one step in `every`, and gives layers that few bits hurt more. Made by `fewbit.fit` and `fewbit.guard`.

    Attributes:
        every: steps, calls of the model that record gradients.
        sample: layers that each measured step looks at, in turn.
        growth: an error that has grown by this factor since the plan, and is above 0.1, is too large.
        exact: names of the layers that are exact from now on.
        errors: the last relative error of each layer's gradient.
        events: what was done, a line each, as it was logged.
    """

    every: int
    sample: int
    growth: float

    def __init__(self, guarded: _Guarded, loss: Loss | None, every: int, sample: int, growth: float) -> None:
        check_integer("every", every, 1)
        check_integer("sample", sample, 1)
        if isinstance(growth, bool) or not isinstance(growth, int | float) or not growth > 1:
            raise FewbitError(f"growth is a number above 1, not {shown(growth)}")
        self.every, self.sample, self.growth = every, sample, float(growth)
        self.exact: list[str] = []
        self.errors: dict[str, float] = {}
        self.events: list[str] = []
        self._guarded, self._loss = guarded, loss
        self._steps, self._next, self._busy = 0, 0, False
        self._first: dict[str, float] = {}  # the first error of each layer since the plan
        guarded.surround(self)

    def called(self, _: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Count a call of the model, and measure if it is time."""
        if self._busy or not torch.is_grad_enabled():
            return
        self._steps += 1
        if self._steps % self.every:
            return
        self._busy = True
        try:
            self.check(inputs, keywords)
        finally:
            self._busy = False

    def check(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Measure some layers with a batch; where one errs too much, measure all, and give the worst more bits."""
        step = Step(self._guarded.model, inputs, keywords, self._loss)
        layers = layers_of(step.model)
        if not layers:
            return
        some = [layers[(self._next + i) % len(layers)] for i in range(min(self.sample, len(layers)))]
        self._next = (self._next + len(some)) % len(layers)
        self._note(self._measured(step, some))
        if not self._too_large(some):
            return
        self._note(self._measured(step, layers))
        given = 1  # layers that become exact at once: twice as many where that was too few
        moved = False
        while wrong := self._too_large(layers):
            if not moved:
                moved = True
                if self._guarded.move_bits(inputs, keywords):
                    self._tell(wrong[-1], "bits moved within the memory")
                    self._note(self._measured(step, layers))
                    continue
            # What the layers that err save may be exact by now, and the error be that of functions between layers.
            left = [name for name in wrong if name not in self.exact][-given:] or [OUTSIDE]
            if left[0] in self.exact:
                break
            self.exact += left
            self._guarded.save_exactly(self.exact)
            for name in left:
                self._tell(name, "the layer is exact from now on")
            given *= 2
            self._note(self._measured(step, layers))
        self._first = dict(self.errors)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: steps, exact layers, errors, and the plan in force as the text of a file."""
        fitted = self._guarded.fitted
        return {
            "steps": self._steps,
            "next": self._next,
            "exact": list(self.exact),
            "errors": dict(self.errors),
            "first": dict(self._first),
            "events": list(self.events),
            "plan": None if fitted is None else fitted.plan.to_text(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: with the same exact layers, and by the same plan.

        Raises:
            FewbitError: the state is none of a guard of this model.
        """
        names = {"steps", "next", "exact", "errors", "first", "events", "plan"}
        known = {*layers_of(self._guarded.model), OUTSIDE}
        if missing := names - {*(state if isinstance(state, Mapping) else ())}:
            raise FewbitError(f"not the state of this guard: {min(missing)}")
        counts, exact = (state["steps"], state["next"]), state["exact"]
        if not isinstance(exact, list) or any(type(count) is not int for count in counts):
            raise FewbitError(f"not the state of this guard: {shown((*counts, exact))}")
        if (wrong := next((name for name in exact if name not in known), None)) is not None:
            raise FewbitError(f"not the state of this guard: no layer {shown(wrong)}")
        if state["plan"] is not None:  # before all else: one that is refused leaves this guard as it was
            self._guarded.use(Plan.from_text(state["plan"]))
        (self._steps, self._next), self.exact = counts, [*exact]
        self.errors, self._first, self.events = dict(state["errors"]), dict(state["first"]), list(state["events"])
        self._guarded.save_exactly(self.exact)

    def surround(self) -> None:
        """See the calls of a model that was compiled anew."""
        self._guarded.surround(self)

    def remove(self) -> None:
        """Guard no longer; layers stay as they are."""
        self._guarded.remove()

    def _note(self, errors: Mapping[str, float]) -> None:
        self.errors |= errors
        for name, error in errors.items():
            self._first.setdefault(name, error)

    def _too_large(self, layers: Iterable[str]) -> list[str]:
        """Return the layers, in order, whose last error is too large."""
        return [
            name
            for name in layers
            if (e := self.errors[name]) > MOST or e > max(NEGLIGIBLE, self.growth * self._first[name])
        ]

    def _tell(self, layer: str, what: str) -> None:
        error = self.errors.get(layer, max(self.errors.values()))
        line = f"step {self._steps}: the gradient of {layer or 'what is between layers'} errs by {error:.3g}: {what}"
        self.events.append(line)
        _log.warning("fewbit: %s", line)

    def _measured(self, step: Step, layers: Sequence[str]) -> dict[str, float]:
        """Return the relative error of the gradient of each layer, the largest of all ranks."""
        modules = map(step.model.get_submodule, layers)
        owned = [[p for p in module.parameters() if p.requires_grad] for module in modules]
        parameters = [p for own in owned for p in own]
        # What an exact step saves waits in host memory, beside a plan that fills the device.
        aside = nullcontext() if step.device.type == "cpu" else torch.autograd.graph.save_on_cpu()
        with self._guarded.exactly(), aside:
            exact = _gradients(step, parameters)
        with self._guarded.as_it_trains():
            few = _gradients(step, parameters)
        errors, at = [], 0
        for own in owned:
            errors.append(_error(exact[at : at + len(own)], few[at : at + len(own)]))
            at += len(own)
        if dist.is_available() and dist.is_initialized():
            of_ranks = torch.tensor(errors, dtype=torch.float32, device=step.device)
            dist.all_reduce(of_ranks, dist.ReduceOp.MAX)
            errors = of_ranks.tolist()
        return dict(zip(layers, errors, strict=True))


def _gradients(step: Step, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    with step.apart():
        loss, output = step.forward()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        del loss, output
    return list(found)


def _error(exact: Sequence[Tensor | None], few: Sequence[Tensor | None]) -> float:
    """Return the relative error of a gradient; infinity where it alone is not finite, 0 where the exact one is not."""
    pairs = [(a, b) for a, b in zip(exact, few, strict=True) if a is not None and b is not None]
    size = sum(sum_of_squares(a) for a, _ in pairs)
    if not size or not math.isfinite(size):
        return 0.0  # nothing to compare with, or a step that a GradScaler leaves out
    wrong = sum(sum_of_squares(b - a) for a, b in pairs)
    return math.sqrt(wrong / size) if math.isfinite(wrong) else math.inf


# ---- what is guarded -------------------------------------------------------------------------------------------------


class _Fit(_Guarded):
    """A model that trains by a plan, and is not compiled."""

    def __init__(self, fitted: Fitted) -> None:
        self.fitted, self.model = fitted, fitted.model
        self._hook: Any = None

    def exactly(self) -> AbstractContextManager[None]:
        assert self.fitted is not None
        return self.fitted.paused()

    def surround(self, guard: Guard) -> None:
        self._hook = self.model.register_forward_pre_hook(guard.called, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        self._hook.remove()


class _Compiled(_Guarded):
    """A model that is compiled with the backend fewbit: by a plan, or by options, and layers can be left out of it."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any], fitted: Fitted | None = None) -> None:
        self.model, self.options, self.fitted = model, dict(options), fitted
        self._compiled: Any = model._compiled_call_impl
        self._twin: Any = None
        self._guard: Guard | None = None
        if fitted is None:
            self.save_exactly(())

    def exactly(self) -> AbstractContextManager[None]:
        # By the same compiler, whose random numbers are not those of eager torch.
        if self._twin is None:
            exact: dict[str, Any] = {"bits": None}
            self._twin = torch.compile(self.model._call_impl, backend="fewbit", options=exact)
        return self._calling(self._twin)

    def as_it_trains(self) -> AbstractContextManager[None]:
        return self._calling(self._compiled)

    def surround(self, guard: Guard) -> None:
        if self.fitted is not None:  # which compiles the model anew by each plan
            self._compiled = self.model._compiled_call_impl
        self._guard = guard
        self._put(self._call)

    def remove(self) -> None:
        if self._guard is not None:  # once: what lies there later is another plan's, or none
            self._guard = None
            self._put(self._compiled)

    def save_exactly(self, layers: Sequence[str]) -> None:
        if self.fitted is not None:
            super().save_exactly(layers)
            return
        keep = (*self.options.get("keep", ()), *(name for name in layers if name != OUTSIDE))
        options = {**self.options, "keep": keep, **({"bits": None} if OUTSIDE in layers else {})}
        self._compiled = torch.compile(self.model._call_impl, backend="fewbit", options=options)
        self._put(self._compiled if self._guard is None else self._call)

    def _put(self, call: Any) -> None:
        self.model._compiled_call_impl = call

    def _call(self, *inputs: Any, **keywords: Any) -> Any:
        if self._guard is not None:
            self._guard.called(self.model, inputs, keywords)
        return self._compiled(*inputs, **keywords)

    @contextmanager
    def _calling(self, call: Any) -> Iterator[None]:
        before = self.model._compiled_call_impl
        self._put(call)
        try:
            yield
        finally:
            self._put(before)


def guard_fit(fitted: Fitted, loss: Loss | None, every: int) -> Guard:
    """Return the guard of a model that trains by a plan."""
    guarded = _Compiled(fitted.model, {}, fitted) if fitted.plan.compiled else _Fit(fitted)
    return Guard(guarded, loss, every, SAMPLE, GROWTH)


def guard(
    model: nn.Module,
    *,
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    every: int = EVERY,
    sample: int = SAMPLE,
    growth: float = GROWTH,
) -> Guard:
    """Compile a model with the backend fewbit, in place, and save layers exactly whose gradients few bits spoil.

    One call in `every` that records gradients is measured: its batch runs twice more, exactly and as the model trains,
    from the same random state, and leaves gradients, buffers and that state as they are. A layer is exact from then on
    where the relative error of its gradient times √3 exceeds 1, is not finite, or has grown by the factor `growth`. The
    graph is compiled anew then. Of several processes all take the largest error of any. For a plan, give `guard=True`
    to `fewbit.fit`.

    Args:
        model: that is not compiled; its calls are from now on.
        options: of the backend, as ``{"bits": 2}``.
        loss: function of the model's output that returns one number; by default the output named `loss`, or the output
            itself.
        every: steps, at least 1.
        sample: layers that a measured step looks at, in turn: blocks, and layers outside of blocks.
        growth: above 1.

    Returns:
        The guard, with `state_dict` and `load_state_dict` for checkpoints, and `events`, which are logged too, by the
        logger ``fewbit.guard``.

    Raises:
        FewbitError: an argument is wrong, or (in the first step that is measured) the output is no loss.

    Example:
        guard = fewbit.guard(model, options={"bits": 2}, every=200)
    """
    if not isinstance(model, nn.Module) or hasattr(model, "_orig_mod"):
        raise FewbitError(f"the model must be a torch.nn.Module that is not compiled, not {type(model).__name__}")
    _ = CompileOptions.of(options)  # which checks them
    return Guard(_Compiled(model, options or {}), loss, every, sample, growth)
