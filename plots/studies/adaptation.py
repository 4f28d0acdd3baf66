"""Errors of tables through a training: of the default, of tables calibrated once, and of tables that follow it.

A model trains in few bits with `convert(adapt=…)`. Every so many steps the inputs of its activations are measured on a
batch that it does not train on, weighted by squared gradients; under each measurement the error ∫ (f' − q)² w is taken
of the default table, of the table for the measurement before the first step, and of the table in use.

Two more trainings from the same weights on the same batches, exactly and with default tables, end in losses to compare.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...fewbit_gen import parse_activation
from ...fewbit_gen.calibration import Measured
from ...fewbit_gen.certify import table_error
from ...runtime.activations.modules import FewBitActivation
from ...runtime.calibrate import calibrate
from ...runtime.convert.api import convert
from ...tables import Table
from ...tables.shipped import load_table
from ..demo import trainer
from ..demo.data import Corpus, endless_windows, spread_windows
from ..demo.settings import SETTINGS, Settings
from ..demo.trainer import Curve, held_out_loss
from ..demo.training import MODELS, adamw
from ..figures.adaptation import Errors, Followed

VARIANTS = ("exact", "default", "following")


def follow(
    name: str,
    bits: int,
    corpus: Corpus,
    adapt: int = 200,
    seed: int = 0,
    steps: int | None = None,
    every: int = 100,
    after_step: Callable[[], object] = lambda: None,
) -> Followed:
    """Train the model `name` exactly, with default tables, and with tables that follow; return errors and losses."""
    settings = replace(SETTINGS[name], seed=seed, **({} if steps is None else {"steps": steps}))
    models = {variant: _model(name, settings, bits, adapt, variant) for variant in VARIANTS}
    probe = next(endless_windows(corpus.training, settings.batch, settings.size.context, seed=12345))
    watch = _Watch(models["following"], bits, probe, every)
    trainees = [adamw(model, settings, curve=Curve()) for model in models.values()]
    trainees[-1] = replace(trainees[-1], before_step=watch)
    batches = endless_windows(corpus.training, settings.batch, settings.size.context, settings.seed)
    trainer.train(trainees, islice(batches, settings.steps), after_step)
    watch.measure(settings.steps)
    held_out = spread_windows(corpus.validation, settings.validation_windows, settings.size.context)
    losses = {variant: held_out_loss(model, held_out.split(settings.batch)) for variant, model in models.items()}
    return Followed(name, bits, adapt, seed, settings.steps, losses, tuple(watch.found))


def _model(name: str, settings: Settings, bits: int, adapt: int, variant: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = MODELS[name](settings.size)
    if variant != "exact":
        convert(model, bits, adapt=adapt if variant == "following" else None)
    return model


@dataclass
class _Watch:
    """Takes the errors of a model's tables, every so many steps: called with each step's number before it."""

    model: nn.Module
    bits: int
    probe: Tensor
    every: int
    found: list[Errors] = field(default_factory=list)
    _once: dict[str, Table] = field(default_factory=dict)

    def __call__(self, step: int) -> None:
        if step % self.every == 0:
            self.measure(step)

    def measure(self, step: int) -> None:
        """Take the errors of all activations' tables."""
        calibration = calibrate(self.model, [self.probe], _loss, inputs=lambda windows: windows[:, :-1])
        for module in calibration:
            current = self.model.get_submodule(module.name)
            assert isinstance(current, FewBitActivation)
            best = calibration.table(module.name, self.bits)
            once = self._once.setdefault(module.name, best)
            tables = load_table(module.activation, self.bits), once, current.table, best
            self.found.append(Errors(step, module.name, *(_error(table, module) for table in tables)))


def _loss(output: Tensor, windows: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), windows[:, 1:].flatten())


def _error(table: Table, module: Measured) -> float:
    return float(f"{table_error(table, parse_activation(module.activation), module.weight):.6g}")
