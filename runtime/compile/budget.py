"""Inductor with torch's own `activation_memory_budget`: what compiled plans and benches are compared with.

torch.compile(model, backend=with_budget(0.5))
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def with_budget(budget: float) -> Callable[..., Any]:
    """Return Inductor as a backend that compiles with an `activation_memory_budget`.

    Args:
        budget: from 0, which computes again all that can be, to 1, which is Inductor's own choice.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with torch_budget(budget):
            return compile_fx(graph, inputs)

    return backend


def torch_budget(budget: float) -> AbstractContextManager[None]:
    """Return a context in which graphs are divided by a budget, or by the lower one of torch's configuration."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=min(budget, config.activation_memory_budget))
