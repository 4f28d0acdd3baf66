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
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
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
            Where TRL has put a head of its own into the model, the batch is handed to that head.
        loss: of the model's output and the batch, the number that training minimizes, where the model returns none; it
            is handed no labels then, as by a `Trainer` with `compute_loss_func`.
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
    loss: Callable[[Any, Any], Tensor] | None
    measure: bool

    def __init__(
        self,
        memory: str | int | None = None,
        *,
        method: Mapping[str, Any] | None = None,
        error: float | None = None,
        time: float | None = None,
        batch: Mapping[str, Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        refresh: int | None = None,
        measure: bool = True,
    ) -> None:
        self.preparation = Preparation(method, {"memory": memory, "error": error, "time": time}, refresh)
        self.batch, self.loss, self.measure = batch, loss, measure
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
        loss = None
        if batch is not None and self.loss is not None:
            loss = partial(_loss_of, self.loss, batch)
            batch = {name: value for name, value in batch.items() if name != "labels"}
        optimizer = getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))  # accelerate wraps it
        was_training = model.training
        model.train()
        try:
            self.kept = self.preparation.start(
                model,
                batch,
                saved,
                loss,
                optimizer=optimizer or "adamw",
                measure=self.measure,
                tells=state.is_world_process_zero,
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
        on_device = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, dict(found))
        return on_device if self.loss is not None else _for_head_of_trl(model, on_device)


def _length(sample: Any) -> int:
    """Return the number of tokens, or of elements, of a sample."""
    values = sample.values() if isinstance(sample, Mapping) else [sample]
    return max((x.numel() if isinstance(x, Tensor) else len(x) for x in values if hasattr(x, "__len__")), default=0)


def _loss_of(loss: Callable[[Any, Any], Tensor], batch: Any, output: Any) -> Tensor:
    return loss(output, batch)


def _for_head_of_trl(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as TRL's trainers hand it to the head that they put into a model; any other batch as it is.

    Without its keyword the head is the model's own forward pass, which makes logits and saves other tensors than the
    training does; and that is a closure, which in a copy of the model computes by the original's weights. Of DPO, whose
    batch has a mask of completions instead of labels, this is the likelihood of the completions, which saves the same.
    """
    forwards = [vars(module).get("forward") for module in model.modules()]
    if not any("fused_lm_head" in signature(f, follow_wrapped=False).parameters for f in forwards if callable(f)):
        return batch
    completed = batch.get("completion_mask")
    if "labels" not in batch and isinstance(completed, Tensor):
        batch = {name: x for name, x in batch.items() if name != "completion_mask" and not name.startswith("ref_")}
        batch["labels"] = batch["input_ids"].masked_fill(completed == 0, -100)
    return {**batch, "fused_lm_head": True} if "labels" in batch else batch


def _states(state: TrainerState) -> dict[str, Any]:
    """Return the states of callbacks, by name, which `trainer_state.json` has."""
    states: Any = state.stateful_callbacks
    return states


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
