"""Lets the code that Inductor writes call the CPU's kernels themselves, not ops by way of torch's dispatcher.

Between large operations nothing of the way to a kernel is in the processor's caches: a call of an op with two tensors
takes 450 µs where a call of the kernel takes 230 (65,536 elements each; 190 and 110 when called in a loop). So the
line

    buf = torch.ops.fewbit.per_group_quantize_buffers.default([x, y], …)

becomes one with the backend's own function, which allocates as the code around it does. Its arguments need no check:
the partitioner wrote them. Older versions of torch have no place to say so, and call the op.
"""

from collections.abc import Callable
from typing import Any

from .. import ops
from ..backends.cpu import per_group, rotated

_FUNCTIONS = {
    ops.per_group_quantize_buffers: (per_group, "quantize_buffers"),
    ops.per_group_dequantize_buffers: (per_group, "dequantize_buffers"),
    ops.rotated_quantize_buffers: (rotated, "quantize_buffers"),
    ops.rotated_dequantize_buffers: (rotated, "dequantize_buffers"),
}


def install() -> None:
    """Tell Inductor how to write calls of these ops, if it can be told."""
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    except ImportError:
        return
    for op, (module, function) in _FUNCTIONS.items():
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op}"] = CustomCodegen(python=_writer(module.__name__, function))


def _writer(module: str, function: str) -> Callable[[Any, Callable[[str], None]], None]:
    def write(node: Any, write_line: Callable[[str], None]) -> None:
        from torch._inductor.virtualized import V

        name, arguments = node.python_kernel_name, [*node.codegen_args(), *node.codegen_kwargs()]
        if node.get_device().type == "cpu":
            name = f"fewbit_{module.rpartition('.')[2]}_{function}"
            V.graph.wrapper_code.add_import_once(f"from {module} import {function} as {name}")
            arguments.append("empty=empty_strided_cpu")
        write_line(f"{node.get_name()} = {name}({', '.join(arguments)})")

    return write
