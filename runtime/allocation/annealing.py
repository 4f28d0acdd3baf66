"""Activation annealing: many large values early in training, fewer later (V-Quant, Section 4.6 and Table 5).

    convert(model, outliers=0.02, bits=3)
    annealing = ActivationAnnealing(model, [(0, 3, 0.02), (30, 3, 0.01), (60, 2, 0.0)])
    for epoch in range(90):
        train(model)
        annealing.step()               as a scheduler of torch.optim: once, after each epoch

The opposite direction loses accuracy (the paper: 75.45 % down, 50.36 % up); schedules are not checked for direction.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from ..layers.base import CompressedLayer
from ..layers.outlier_saver import OutlierSaver
from ..layers.saver import ExactSaver
from ..layers.value_aware_relu import DEFAULT, ValueAwareReLU
from ..quantizers import Outlier

Phase = tuple[int, int | None, float]


class ActivationAnnealing:
    """Sets bits and ratio of a converted model's saved activations by the epoch.

    The first phase is set at construction. The modules replaced by `fewbit.convert(model, outliers=…)` are scheduled;
    other few-bit activations and layers are not changed.

    Args:
        model: converted.
        schedule: (epoch, bits, ratio), by increasing epoch, the first at 0; bits None saves activations as they are
            from then on, the paper's (F).

    Attributes:
        schedule: as given.
        last_epoch: as counted by torch's schedulers, 0 before the first `step`.

    Raises:
        FewbitError: the schedule is not of that form, it has 1 bit for a ReLU, which needs 2, or the model saves
            nothing by V-Quant.

    Example:
        fewbit.convert(model, outliers=0.02, bits=3, include="*")
        annealing = fewbit.vquant.ActivationAnnealing(model, [(0, 3, 0.02), (30, 2, 0.0)])
        annealing.step()  # after each epoch
    """

    schedule: tuple[Phase, ...]
    last_epoch: int

    def __init__(self, model: nn.Module, schedule: Iterable[Sequence[Any]]) -> None:
        self.last_epoch = 0
        relus = [m for m in model.modules() if isinstance(m, ValueAwareReLU)]
        layers = [m for m in model.modules() if isinstance(m, CompressedLayer)]
        kinds = (OutlierSaver, ScheduledExact)
        self._modules = [*relus, *(layer for layer in layers if isinstance(layer.saver, kinds))]
        if not self._modules:
            raise FewbitError("the model saves nothing by V-Quant: call fewbit.convert(model, outliers=0.02) first")
        self.schedule = self._checked(schedule)
        self._set()

    @property
    def phase(self) -> tuple[int | None, float]:
        """Bits (None: activations are saved as they are) and ratio at the present epoch."""
        return next((bits, ratio) for epoch, bits, ratio in reversed(self.schedule) if epoch <= self.last_epoch)

    def step(self) -> None:
        """Advance to the next epoch."""
        self.last_epoch += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the epoch, for a checkpoint."""
        return {"schedule": [list(phase) for phase in self.schedule], "last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load schedule and epoch from a checkpoint, and set the model accordingly.

        Raises:
            FewbitError: the state is not one of an `ActivationAnnealing` for this model.
        """
        try:
            schedule, epoch = state["schedule"], int(state["last_epoch"])
        except (KeyError, TypeError, ValueError) as error:
            raise FewbitError(f"not the state of an ActivationAnnealing: {shown(state)}") from error
        self.schedule, self.last_epoch = self._checked(schedule), epoch
        self._set()

    def _checked(self, schedule: Any) -> tuple[Phase, ...]:
        """Return the phases; raise `FewbitError` if they are malformed or do not fit this model."""
        accepted = "a schedule is [(epoch, bits, ratio), ...] by increasing epoch, the first at 0"
        try:
            phases = tuple(
                (int(epoch), bits if bits is None else int(bits), float(ratio)) for epoch, bits, ratio in schedule
            )
        except (TypeError, ValueError) as error:
            raise FewbitError(f"{accepted}, not {shown(schedule)}") from error
        epochs = [epoch for epoch, _, _ in phases]
        if not epochs or epochs[0] != 0 or any(a >= b for a, b in itertools.pairwise(epochs)):
            raise FewbitError(f"{accepted}; these epochs are {epochs}")
        for _, bits, ratio in phases:
            if bits == 1 and any(isinstance(module, ValueAwareReLU) for module in self._modules):
                raise FewbitError("a ReLU's codes take 2 bits or more: schedule 2 bits, or convert with bits=1")
            if bits is not None:
                Outlier(bits, ratio)
        return phases

    def _set(self) -> None:
        bits, ratio = self.phase
        for module in self._modules:
            if isinstance(module, ValueAwareReLU):
                old = module.quantizer or DEFAULT
                module.quantizer = None if bits is None else replace(old, bits=bits, ratio=ratio)
            elif isinstance(module, CompressedLayer):
                old = module.saver.quantizer if isinstance(module.saver, OutlierSaver) else replace(DEFAULT, relu=False)
                new = ScheduledExact() if bits is None else OutlierSaver(replace(old, bits=bits, ratio=ratio))
                module.saver = new


class ScheduledExact(ExactSaver):
    """Saves tensors as they are until the schedule sets bits."""
