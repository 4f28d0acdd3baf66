"""What compiling a model would save, without the time that Inductor takes for kernels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ...tables import FewbitError
from .backend import compile_graph, inductor_options
from .options import CompileOptions
from .report import CompileReport, report_by


def preview(
    model: nn.Module, *inputs: object, model_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> CompileReport:
    """Return what `model`, compiled with `options`, would save for the backward pass of a call.

    Inductor divides its graphs as when it compiles them; then they run op by op, once.

    Args:
        model: stays as it is, but for buffers that a call changes. Not on the meta device, where torch's partitioner
            takes all sizes for 0.
        inputs: of the call.
        model_kwargs: keyword arguments of the call.
        options: fields of `CompileOptions`.

    Raises:
        FewbitError: an option is wrong, all is to be saved exactly, or nothing requires a gradient.
    """
    chosen = CompileOptions.of(options)
    patches = inductor_options(**options)
    if not patches:
        raise FewbitError("bits is None: all is saved exactly")

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._functorch import config

        with config.patch(enable_autograd_cache=False):  # a graph that is found there is not divided
            return compile_graph(graph, inputs, chosen, patches, inner_compile=_op_by_op)

    with torch.enable_grad():
        torch.compile(model, backend=backend)(*inputs, **(model_kwargs or {}))
    report = report_by(patches["custom_partitioner_fn"])
    if not report.graphs:
        raise FewbitError("nothing of the call requires a gradient: nothing is saved")
    return report


def _op_by_op(graph: fx.GraphModule, _: Sequence[Any], **__: Any) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()  # as compiled graphs do, which own their arguments
        return graph(*values)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run
