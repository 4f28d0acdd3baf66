"""A callback for transformers' `Trainer`, and the trainers of TRL: fewer bytes between the passes of each step.

    from fewbit.integrations.transformers import FewbitCallback

    Trainer(model, args, train_dataset=data, callbacks=[FewbitCallback(memory="16GiB")]).train()
    SFTTrainer(model, args, …, callbacks=[FewbitCallback(method={"level": "L2", "glu": "parts"})]).train()

    AutoModelForCausalLM.from_pretrained(name, attn_implementation="fewbit")      attention in 6 bits (attention.py)

The method is applied when the trainer is made, before it wraps the model and after TRL has put adapters into it; what
needs a batch is done when the training begins.
"""

import base64
import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..tables import FewbitError
from .attention import register_attention
from .kept import Kept
from .preparation import Preparation

__all__ = ["FewbitCallback", "register_attention"]

register_attention()
FILE = "fewbit.pt"  # in a checkpoint's folder
_IN_STATE = "fewbit"  # among the states of callbacks in trainer_state.json
SAMPLES = 1024  # of which the longest make the batch that is planned for


class FewbitCallback(TrainerCallback):
    """Makes a model keep less while a `Trainer` trains it.

    Each line of the trainer's log then has `fewbit_saved_bytes`, what a step holds between its passes, and
    `fewbit_peak_bytes`, the most at once with parameters, gradients and optimizer, as `memory` counts it; both of the
    longest batch. Checkpoints have the plan and what the method has learned, in `fewbit.pt` and in the trainer's state;
    a training that is resumed from any folder continues with these. After `train()` no hook is left in the model.

    Args:
        memory, error, time: limits for `fewbit.plan`, which then chooses among all methods, and takes the place of
            the trainer's gradient checkpointing; memory is that of one GPU with parameters, gradients and optimizer.
        method: options of `fewbit.convert`, such as {"level": "L2", "glu": "parts"}; also saved=PerGroup(4), for hooks
            around the forward pass, and checkpoint=8, for `fewbit.checkpoint` with so many bits.
        batch: keywords of the model, to plan for; by default the longest of the first 1,024 samples of the data set.
        refresh: plan again after so many steps.
        measure: whether to measure what a step keeps, and its gradient's error and time beside the exact step's on a
            quarter of the batch, for the line that is printed; it takes about four more steps at the beginning.

    Raises:
        FewbitError: there is neither a limit nor a method, or both, or an option is wrong.

    Attributes:
        preparation: what was done to the model: `report` of a method, `fitted` with the plan.
        kept: bytes of a step, after the training began.

    Example:
        Trainer(model, args, train_dataset=data, callbacks=[FewbitCallback(memory="16GiB")])
    """

    preparation: Preparation
    batch: Mapping[str, Any] | None
    measure: bool

    def __init__(
        self,
        memory: str | int | None = None,
        *,
        method: Mapping[str, Any] | None = None,
        error: float | None = None,
        time: float | None = None,
        batch: Mapping[str, Any] | None = None,
        refresh: int | None = None,
        measure: bool = True,
    ) -> None:
        self.preparation = Preparation(method, {"memory": memory, "error": error, "time": time}, refresh)
        self.batch, self.measure = batch, measure
        self.kept: Kept | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert the model."""
        self.preparation.convert(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Plan for the model, or continue with what a checkpoint has."""
        model: nn.Module = kwargs["model"]
        saved = self._saved(args, state)
        batch = self._batch(args, model, kwargs.get("train_dataloader"))
        optimizer = getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))  # accelerate wraps it
        was_training = model.training
        model.train()
        try:
            self.kept = self.preparation.start(
                model, batch, saved, optimizer=optimizer or "adamw", measure=self.measure
            )
        finally:
            model.train(was_training)
        if state.is_world_process_zero:
            print(self.preparation.announced(self.kept))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the bytes to the log."""
        if self.kept is None:
            return
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self.kept.peak
        numbers = {"fewbit_saved_bytes": self.kept.saved, "fewbit_peak_bytes": peak}
        kwargs.get("logs", {}).update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put what was learned into the state that a checkpoint has, which tells no callback where it lies."""
        if control.should_save:
            buffer = io.BytesIO()
            torch.save(self.preparation.state(kwargs["model"]), buffer)
            _states(state)[_IN_STATE] = {"state": base64.b64encode(buffer.getvalue()).decode()}

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do the same where checkpoints are written at the end of an epoch."""
        self.on_step_end(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what was learned into the checkpoint."""
        folder = _folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self.preparation.state(kwargs["model"]), folder / FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave no hook in the model."""
        self.preparation.finish(kwargs["model"])

    def _saved(self, args: TrainingArguments, state: TrainerState) -> Mapping[str, Any]:
        """Return what the checkpoint has from which the training continues; nothing for one that begins."""
        if not state.global_step:
            return {}
        path = _folder(args, state) / FILE
        if path.exists():
            return torch.load(path, weights_only=True)
        in_state = _states(state).get(_IN_STATE)
        if in_state is not None:
            return torch.load(io.BytesIO(base64.b64decode(in_state["state"])), weights_only=True)
        raise FewbitError(
            f"{path} is missing, as is its copy in the state: to continue a training without it, begin "
            "one with the checkpoint's weights"
        )

    def _batch(self, args: TrainingArguments, model: nn.Module, loader: Any) -> Mapping[str, Any] | None:
        """Return the batch to plan for, on the model's device; None if the data set cannot be indexed."""
        if self.batch is not None:
            found: Any = self.batch
        else:
            data, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
            if data is None or collate is None or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
                return None
            samples = [data[i] for i in range(min(SAMPLES, len(data)))]
            samples.sort(key=_length, reverse=True)
            found = collate(list(itertools.islice(samples, args.per_device_train_batch_size)))
        if not isinstance(found, Mapping):
            return None
        device = next(model.parameters()).device
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, dict(found))


def _length(sample: Any) -> int:
    """Return the number of tokens, or of elements, of a sample."""
    values = sample.values() if isinstance(sample, Mapping) else [sample]
    return max((x.numel() if isinstance(x, Tensor) else len(x) for x in values if hasattr(x, "__len__")), default=0)


def _states(state: TrainerState) -> dict[str, Any]:
    """Return the states of callbacks, by name, which `trainer_state.json` has."""
    states: Any = state.stateful_callbacks
    return states


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
