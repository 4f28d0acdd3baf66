"""Inductor with torch's own `activation_memory_budget`: what compiled plans and benches are compared with.

torch.compile(model, backend=with_budget(0.5))
"""

from collections.abc import Callable
from typing import Any


def with_budget(budget: float) -> Callable[..., Any]:
    """Return Inductor as a backend that compiles with an `activation_memory_budget`.

    Args:
        budget: from 0, which computes again all that can be, to 1, which is Inductor's own choice.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return backend
