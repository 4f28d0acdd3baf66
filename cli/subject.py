"""The model that a command measures: a built-in one, or what a function of the user's returns."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..tables import FewbitError
from .target import FORMS, load_target


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        make: takes a batch size, or None for the default one; returns the model and its inputs.
        grows: whether `make` uses the batch size.
        on_meta: whether the model is on the meta device.
        source: the user's function, or None.
    """

    make: Callable[[int | None], Any]
    grows: bool
    on_meta: bool
    source: Callable[..., Any] | None = None


def built_in(name: str, size: int | None, dtype: str, attention: str) -> Subject:
    """Return a model that `fewbit memory models` lists, on the meta device."""
    import torch

    from ..runtime.plan import zoo

    if zoo.find(name) is None and name.endswith(".py"):
        raise FewbitError(f"{name!r} names no function; a TARGET is {FORMS}, or a model of `fewbit memory models`")
    model = zoo.build(name, size, attention=attention, dtype=getattr(torch, dtype))
    return Subject(lambda batch: (model, zoo.inputs(name, batch or 1, size, getattr(torch, dtype))), True, True)


def of_user(target: str, size: int | None, meta: bool) -> Subject:
    """Return the model that a function of the user's makes, which may return a loss, too.

    Args:
        target: names the function.
        size: of a sequence or an image.
        meta: whether to call it under the meta device.
    """
    import torch
    from torch import nn

    function = load_target(target)
    takes = inspect.signature(function).parameters

    def make(batch: int | None) -> Any:
        given = {"batch": batch, "sequence": size, "size": size}
        with torch.device("meta") if meta else nullcontext():
            made = function(**{name: value for name, value in given.items() if name in takes and value is not None})
        if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
            many = isinstance(made, tuple) and len(made) != 2
            what = f"{len(made)} things" if many else f"a {type(made).__name__}"
            raise FewbitError(f"{target} must return (model, inputs) or (model, inputs, loss), and returns {what}")
        return made

    return Subject(make, "batch" in takes, meta, function)


def to_train(target: str, size: int | None, dtype: str, meta: bool) -> Subject:
    """Return the model that a target names, whose `make` returns it in training mode, its inputs, and a loss or None.

    Args:
        target: a model of `fewbit memory models`, or a function of the user's.
        size: of a sequence or an image.
        dtype: of a model of `fewbit memory models`.
        meta: whether to call the function under the meta device.
    """
    is_user = ":" in target
    subject = of_user(target, size, meta) if is_user else built_in(target, size, dtype, "sdpa")

    def make(batch: int | None) -> Any:
        model, inputs, *loss = subject.make(batch)
        return model.train(), inputs, loss[0] if loss else None if is_user else _cross_entropy

    return replace(subject, make=make)


def sample_count(batch: str | None, accepted: str = "a number of samples") -> int | None:
    """Return the samples in a batch that the option asks for; None: the default."""
    if batch is None:
        return None
    if not batch.isdecimal() or int(batch) < 1:
        raise FewbitError(f"--batch is {accepted}, not {batch!r}")
    return int(batch)


def _cross_entropy(output: Any) -> Any:
    """Return a loss of a built-in model's output: the cross-entropy of its logits, as a model that is trained has."""
    from torch.nn import functional as F

    logits = output.logits if hasattr(output, "logits") else output[0]
    rows = logits.flatten(0, -2).float()
    return F.cross_entropy(rows, rows.new_zeros(len(rows), dtype=int))
