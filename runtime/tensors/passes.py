"""Where autograd stands."""

import torch


def in_backward() -> bool:
    """Return whether a backward pass is running: a forward pass in it is a checkpoint's, which has to save the same."""
    return torch._C._current_graph_task_id() != -1  # the test of torch's own checkpoint
