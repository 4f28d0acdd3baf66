"""Trains by a plan: converted modules and recomputed blocks as the ways of ways/ carry them out, all else by hooks.

fitted = fewbit.fit(model, plan=plan)
fitted.refresh(every=500)       measures again while training
fitted.undo()
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...tables import FewbitError
from ...tables.errors import check_integer
from ..convert.find import FITTED
from ..convert.preact_chains import owners_of_chains
from ..layers.offload import Swapper
from ..layers.saver import QuantizerSaver, Saver
from ..quantizers import PerGroup, Quantizer
from ..saved.checkpoint import blocks_of, outermost_blocks
from ..saved.forms import Exactly
from .document import Choice, Plan
from .places import OF_OUTPUT, Places, Policy, within
from .problem import GATED, OF_STEPS, OUTPUT, RECOMPUTE, Limits
from .step import shapes_of, stretched, without_cache
from .structure import Change, Structure, undo_changes
from .ways import WAYS_TO_SAVE
from .ways.steps import carry_out
from .ways.tensors import operands_of, quantizer_of

Again = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Plan], Plan]
OUTSIDE = ""  # stands for what is saved outside of all layers


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of the trained layers of a model, in order: its blocks, and what has parameters besides."""
    blocks = outermost_blocks(model)
    found = []
    for name, module in model.named_modules():
        inside = any(within(name, block) for block in blocks)
        own = module.parameters() if name in blocks else () if inside else module.parameters(recurse=False)
        if any(p.requires_grad for p in own):
            found.append(name)
    return found


@dataclass(frozen=True)
class ExactLayers:
    """Layers that are exact.

    Attributes:
        names: of layers, or `OUTSIDE`.
        layers: all that there are.
    """

    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    def __contains__(self, target: str) -> bool:
        """Return whether a place, an attention or a module is in one of them."""
        module = target.partition(":")[0]
        around = [layer for layer in self.layers if within(module, layer)]
        return any(layer in self.names for layer in around) or (OUTSIDE in self.names and not around)


class Fitted:
    """A model that trains by a plan. Made by `fewbit.fit`.

    Attributes:
        model: the model, which has hooks now.
        plan: the plan that is carried out.
        limits: what a plan that is made again keeps to.
        guard: as `fewbit.fit` was asked for one, a `Guard`, or None.
        exact: the layers that are exact whatever the plan says.
    """

    model: nn.Module
    plan: Plan
    limits: Limits
    guard: Any
    exact: ExactLayers

    def __init__(self, model: nn.Module, plan: Plan, again: Again) -> None:
        plan.check_model(model)
        if (earlier := vars(model).get(FITTED)) is not None:
            earlier.undo()
        self.model, self.plan = model, plan
        # Plans that are made again keep the limits of this one, or the memory that it takes.
        self.limits = Limits(**plan.limits)  # pyright: ignore[reportArgumentType]
        if self.limits.memory is None:
            self.limits = Limits(memory=plan.peak.total)
        self.guard, self.exact = None, ExactLayers()
        self._again = again
        self._changes: list[Change] = []
        self._refreshing: Any = None
        self._policy = _Planned()
        self._places: Places | None = None
        self.use(plan)
        self._places = None if plan.compiled else Places(model, self._policy, without_cache(model))
        vars(model)[FITTED] = self

    def use(self, plan: Plan) -> None:
        """Train by another plan for the same model from the next step on.

        Raises:
            FewbitError: the plan names what the model has not, or cannot be carried out; the model is then without one.
        """
        with self._without_hooks():
            self._put_back()
            before = Structure.of(self.model)
            try:
                self._use(plan)
            except BaseException:
                undo_changes(before.changes())
                raise
            self.plan, self._changes = plan, before.changes()
        if plan.compiled and self._refreshing is not None:
            self._refreshing.surround(self.model)
        if plan.compiled and self.guard is not None:
            self.guard.surround()

    def save_exactly(self, layers: Sequence[str]) -> None:
        """Round nothing in these layers and carry out the plan in all others: blocks among them are computed again."""
        self.exact = ExactLayers(tuple(layers), tuple(layers_of(self.model)))
        self.use(self.plan)

    def _use(self, plan: Plan) -> None:
        # Ways to compute a step round nothing, and stay in layers that are exact.
        carry_out(self.model, plan.choices)
        if plan.compiled:
            options, bits = plan.compile_options, plan.compile_options["bits"]
            if self.exact.names:
                if isinstance(bits, dict):
                    bits = {place: each for place, each in bits.items() if place not in self.exact}
                bits = None if OUTSIDE in self.exact.names else bits
                options = {**options, "bits": bits, "keep": self.exact.names}
            self.model.compile(backend="fewbit", options=options)
            return
        choices = [c for c in plan.choices if c.method in OF_STEPS or c.target not in self.exact]
        # Computed again, an exact block takes less than it would in codes.
        blocks = {*blocks_of(self.model)} - {choice.target for choice in choices if choice.method in OF_STEPS}
        exact = [name for name in self.exact.names if name in blocks]
        choices += [Choice(name, RECOMPUTE, None, 0, 0, 0.0, 0.0, 0.0) for name in exact]
        for way in WAYS_TO_SAVE:
            way.carry_out(self.model, [choice for choice in choices if choice.method in way.methods])
        self._policy.use(choices, self.exact, operands_of(self.model, choices))
        self._policy.owners = frozenset(owners_of_chains(self.model))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Places that saved a tensor and that the plan does not know; they save it exactly."""
        return tuple(sorted(self._policy.unknown))

    def refresh(self, every: int, recompilations: int = 3) -> "Fitted":
        """Plan again every so many training steps, on the step's own batch, for the same memory.

        The errors that rounding brings change while a model trains; bits move to where they help most now, within the
        memory that the first plan was asked to fit. A step that plans takes as long as `fewbit.plan`, some tens of
        backward passes, and leaves gradients, buffers and the random state as they are.

        The bits of a compiled step are constants of its graph. Each plan for it is compiled, as is the step that was
        compiled before, so that it is planned again `recompilations` times at most.

        Args:
            every: steps, at least 2.
            recompilations: most times that a compiled step is planned again.

        Returns:
            This object, whose `plan` is the plan in force.

        Raises:
            FewbitError: an argument is no such number.
        """
        check_integer("every", every, 2)
        check_integer("recompilations", recompilations, 1)
        if self._refreshing is not None:
            self._refreshing.remove()
        kind = _RefreshingCompiled if self.plan.compiled else _Refreshing
        self._refreshing = kind(self, every, recompilations)
        self._refreshing.surround(self.model)
        return self

    def plan_again(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Plan for another batch of the same model, and train by that plan; by the same if there is none."""
        with self.paused():
            try:
                self._next = self._again(self.model, inputs, keywords, replace(self.plan, limits=asdict(self.limits)))
            except FewbitError as error:  # such as a batch that is larger: no reason to end a training
                warnings.warn(f"fewbit: the plan stays as it was: {error}", stacklevel=2)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the model as it was before `fit` within this block, and train by the plan again at its end."""
        self._next = self.plan
        with self._without_hooks():
            self._put_back()
            try:
                yield
            finally:
                self.use(self._next)

    def undo(self) -> nn.Module:
        """Return the model as it was before `fit`; as it is, if it trains by a later plan, or has been put back.

        Raises:
            FewbitError: a converted layer has been parametrized or sharded since; the model is then unchanged.
        """
        if vars(self.model).get(FITTED) is not self:
            return self.model
        for each in (self.guard, self._refreshing):
            if each is not None:
                each.remove()
        if self._places is not None:
            self._places.remove()
        self._put_back()
        vars(self.model).pop(FITTED, None)
        return self.model

    def _without_hooks(self) -> AbstractContextManager[None]:
        return nullcontext() if self._places is None else self._places.lifted()

    def _put_back(self) -> None:
        """Undo all but the hooks."""
        for each in (self.guard, self._refreshing):
            if each is not None and self.plan.compiled:
                each.remove()
        undo_changes(self._changes)
        self._changes = []

    def __str__(self) -> str:
        return str(self.plan)


class _Refreshing:
    """Counts training steps and plans again, by a hook of the model.

    Args:
        fitted: whose plan is made again.
        every: steps.
        most: times; of a compiled step alone.
    """

    def __init__(self, fitted: Fitted, every: int, most: int) -> None:
        self.fitted, self.every, self.left = fitted, every, most
        self.steps, self.planning = 0, False
        self.largest: list[torch.Size] = []  # shapes of the largest batch so far
        self._hook: Any = None

    def surround(self, model: nn.Module) -> None:
        """Count the calls of a model from now on."""
        self._hook = model.register_forward_pre_hook(self.called, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        """Count no longer."""
        self._hook.remove()

    def called(self, _: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Count a call, and plan again if it is time."""
        if self.planning or not torch.is_grad_enabled():
            return
        self.steps += 1
        of_batches = self.largest, shapes_of((inputs, keywords))
        self.largest = max(of_batches, key=lambda shapes: sum(shape.numel() for shape in shapes))
        if self.steps % self.every:
            return
        self.planning, self.left = True, self.left - 1
        try:  # the last batch of an epoch may be small, and the next one large again
            self.fitted.plan_again(*stretched((inputs, keywords), self.largest))
        finally:
            self.planning = False


class _RefreshingCompiled(_Refreshing):
    """The same around the compiled call of a model, whose graph a hook would become a part of."""

    _compiled: Any = None

    def surround(self, model: nn.Module) -> None:
        self._compiled = model._compiled_call_impl
        model._compiled_call_impl = self._call  # pyright: ignore[reportAttributeAccessIssue]

    def remove(self) -> None:
        if self._compiled is not None:  # once: what lies there later is another plan's, or none
            self.fitted.model._compiled_call_impl = self._compiled  # pyright: ignore[reportAttributeAccessIssue]
            self._compiled = None

    def _call(self, *inputs: Any, **keywords: Any) -> Any:
        if self.left:
            self.called(self.fitted.model, inputs, keywords)
        return self._compiled(*inputs, **keywords)


@contextmanager
def unfitted(model: nn.Module) -> Iterator[None]:
    """Leave a model as it was before `fit`, if it is fitted, within this block."""
    fitted = vars(model).get(FITTED)
    with nullcontext() if fitted is None else fitted.paused():
        yield


class _Planned(Policy):
    """The policy that carries out a plan.

    Attributes:
        choices: by target.
        owners: modules that run chains as one layer, which may save its input.
        unknown: places that are in no plan.
    """

    def __init__(self) -> None:
        self.choices: dict[str, Choice] = {}
        self.owners: frozenset[str] = frozenset()
        self.unknown: set[str] = set()
        self.exact = ExactLayers()
        # What gated MLPs save besides their parts, in order: such an MLP counts only these tensors.
        self._besides: dict[str, list[str]] = {}
        self._operands: Mapping[str, Quantizer] = {}  # in float8, by place
        self._swapper = Swapper()

    def choose(self, place: str, x: Tensor, function: str) -> Quantizer:
        module, _, number = place.rpartition(":")
        besides = self._besides.get(module, ())
        if number.isdigit() and int(number) < len(besides):
            place = besides[int(number)]
        choice = self.choices.get(place) or self.choices.get(place.rpartition(OF_OUTPUT)[0])
        if self.saves_output(module) or place in self.exact:
            return Exactly()
        if choice is not None:
            return self._operands.get(choice.target) or quantizer_of(choice, self._swapper) or Exactly()
        if x.requires_grad and module not in self.owners:
            if not self.unknown:
                warnings.warn(
                    f"fewbit: the plan does not know {place}, which is saved exactly, so a step may take more memory "
                    "than it says: plan for the model as it trains",
                    stacklevel=2,
                )
            self.unknown.add(place)
        return Exactly()

    def use(self, choices: Sequence[Choice], exact: ExactLayers, operands: Mapping[str, Quantizer]) -> None:
        """Carry out these choices from now on; save all in the layers `exact` exactly, and `operands` in float8."""
        self.exact, self._operands = exact, operands
        self.choices = {choice.target: choice for choice in choices}
        self._besides = {}
        for module in (choice.target for choice in choices if choice.method == GATED):
            of_module = (target.partition(":") for target in self.choices if target.startswith(f"{module}:"))
            numbers = sorted(int(number) for _, _, number in of_module if number.isdigit())
            self._besides[module] = [f"{module}:{number}" for number in numbers]

    def saves_output(self, module: str) -> bool:
        choice = self.choices.get(module)
        return choice is not None and choice.method == OUTPUT

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        choice = self.choices.get(attention)
        return None if choice is None else QuantizerSaver(PerGroup(choice.bits or 0))
