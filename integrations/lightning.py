"""A callback for Lightning: fewer bytes between the passes of each step.

    from fewbit.integrations.lightning import FewbitCallback

    Trainer(callbacks=[FewbitCallback(method={"level": "L2"})]).fit(module, data)

The module is converted before a strategy wraps it; plans are made for the first batch.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ..tables import FewbitError
from .kept import Kept
from .preparation import Preparation


class FewbitCallback(Callback):
    """Makes a module keep less while Lightning trains it.

    Checkpoints have the plan and what the method has learned; a resumed training continues with these. The bytes that a
    step holds between its passes are logged once, as `fewbit_saved_bytes`, and its peak with parameters, gradients and
    optimizer, as `memory` counts it, as `fewbit_peak_bytes`. After the training no hook is left in the module.

    A plan is for the module's `forward`, so `training_step` has to call `self(x)`, not a part such as `self.net(x)`: if
    it does not, a warning follows the first step.

    Args:
        memory, error, time: limits for `fewbit.plan`; they take `inputs` and `loss`.
        method: options of `fewbit.convert`, with saved= and checkpoint=, as for the callback of transformers.
        inputs: of a batch, the arguments or keywords of the module's `forward`.
        loss: of the output of `forward` and the batch, the number that training minimizes.
        refresh: plan again after so many steps.

    Raises:
        FewbitError: there is neither a limit nor a method, or both, an option is wrong, or a plan lacks `loss`.

    Attributes:
        preparation: what was done to the module: `report` of a method, `fitted` with the plan.
        kept: bytes of a step, after the training began, if `inputs` and `loss` are given.

    Example:
        FewbitCallback(memory="16GiB", inputs=lambda b: b[:1], loss=lambda y, b: F.cross_entropy(y, b[1]))
    """

    preparation: Preparation
    inputs: Callable[[Any], tuple[Any, ...] | Mapping[str, Any]] | None
    loss: Callable[[Any, Any], Tensor] | None

    def __init__(
        self,
        memory: str | int | None = None,
        *,
        method: Mapping[str, Any] | None = None,
        error: float | None = None,
        time: float | None = None,
        inputs: Callable[[Any], tuple[Any, ...] | Mapping[str, Any]] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        refresh: int | None = None,
    ) -> None:
        super().__init__()
        self.preparation = Preparation(method, {"memory": memory, "error": error, "time": time}, refresh)
        if self.preparation.method is None and (inputs is None or loss is None):
            raise FewbitError(
                "a plan of a Lightning module takes inputs= and loss=, of its forward, such as "
                "inputs=lambda batch: batch[:1], loss=lambda y, batch: F.cross_entropy(y, batch[1])"
            )
        self.inputs, self.loss = inputs, loss
        self.kept: Kept | None = None
        self._saved: Mapping[str, Any] = {}
        self._has_begun = False
        self._watch: tuple[Any, list[bool]] | None = None  # a hook, and whether forward was called

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert the module."""
        if stage == "fit":
            self.preparation.convert(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan for the first batch, or continue with what a checkpoint has."""
        if self._has_begun:
            return
        self._has_begun = True
        inputs = None if self.inputs is None else self.inputs(batch)
        of_both = self.loss
        loss = None if of_both is None else lambda output: of_both(output, batch)
        optimizer = trainer.optimizers[0] if trainer.optimizers else "adamw"
        measure = inputs is not None and loss is not None
        self.kept = self.preparation.start(
            pl_module, inputs, self._saved, loss, optimizer, measure=measure, tells=trainer.is_global_zero
        )
        if self.kept is not None:
            found = {"fewbit_saved_bytes": float(self.kept.saved), "fewbit_peak_bytes": float(self.kept.peak)}
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)
        if trainer.is_global_zero:
            unmeasured = "" if measure else "; with inputs= and loss= this line has bytes, error and time"
            print(self.preparation.announced(self.kept) + unmeasured)
        if self.preparation.fitted is not None:
            called: list[bool] = []
            self._watch = pl_module.register_forward_pre_hook(lambda *_: called.append(True)), called

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Warn after the first step if it did not call what the plan is for."""
        if self._watch is None:
            return
        (hook, called), self._watch = self._watch, None
        hook.remove()
        if not called:
            warnings.warn(
                "fewbit: the plan is not used, for training_step does not call self(…): it calls a part of the module, "
                "such as self.net(x); let forward do that, and call self(x)",
                stacklevel=2,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave no hook in the module."""
        if self._watch is not None:
            self._watch[0].remove()
        self._has_begun, self._watch = False, None
        self.preparation.finish(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no hook in the module."""
        self.on_train_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what was learned to the checkpoint."""
        checkpoint["fewbit"] = self.preparation.state(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read what a checkpoint has."""
        self._saved = checkpoint.get("fewbit", {})
