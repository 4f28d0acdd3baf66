"""Torch's own `activation_memory_budget`, by which graphs are divided that save all exactly."""

from contextlib import AbstractContextManager


def torch_budget(budget: float) -> AbstractContextManager[None]:
    """Return a context in which graphs are divided by a budget, or by the lower one of torch's configuration."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=min(budget, config.activation_memory_budget))
