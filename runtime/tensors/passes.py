"""Where autograd stands."""

import sys

import torch

# Modules that call a function twice: torch's checkpoint and ours. They save its inputs, to compute it again from.
CHECKPOINTS = ("torch.utils.checkpoint", f"{__name__.rsplit('.', 2)[0]}.saved.recompute")


def in_backward() -> bool:
    """Return whether a backward pass is running: a forward pass in it is a checkpoint's, which has to save the same."""
    return torch._C._current_graph_task_id() != -1  # the test of torch's own checkpoint


def in_checkpoint() -> bool:
    """Return whether the caller runs within a checkpoint, torch's or ours, the first time or again.

    It counts what is saved, both times. (Its hooks tell of it too, which torch 2.6 and 2.7 do not show.)
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in CHECKPOINTS:
            return True
        frame = frame.f_back
    return False
