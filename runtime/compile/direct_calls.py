"""Lets the code that Inductor writes call kernels themselves, not ops by way of torch's dispatcher.

Between large operations nothing of the way to a kernel is in the processor's caches: a call of an op with two tensors
takes 450 µs where a call of the kernel takes 230 (65,536 elements each; 190 and 110 when called in a loop). So the
line

    buf = torch.ops.fewbit.per_group_quantize_buffers.default([x, y], …)

becomes one with the backend's own function, which on a CPU allocates as the code around it does. Its arguments need no
check: the partitioner wrote them. Older versions of torch have no place to say so, and call the op. On a GPU only
rotated codes are made by calls at all: groups are Inductor's own code there.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .. import ops
from ..backends.cpu import per_group, rotated
from ..backends.cuda import rotated as rotated_on_cuda

# By the device's type, the module of an op's function.
_FUNCTIONS: Mapping[Any, tuple[str, Mapping[str, ModuleType]]] = {
    ops.per_group_quantize_buffers: ("quantize_buffers", {"cpu": per_group}),
    ops.per_group_dequantize_buffers: ("dequantize_buffers", {"cpu": per_group}),
    ops.rotated_quantize_buffers: ("quantize_buffers", {"cpu": rotated, "cuda": rotated_on_cuda}),
    ops.rotated_dequantize_buffers: ("dequantize_buffers", {"cpu": rotated, "cuda": rotated_on_cuda}),
}


def install() -> None:
    """Tell Inductor how to write calls of these ops, if it can be told."""
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    except ImportError:
        return
    for op, (function, modules) in _FUNCTIONS.items():
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op}"] = CustomCodegen(python=_writer(function, modules))


def _writer(function: str, modules: Mapping[str, ModuleType]) -> Callable[[Any, Callable[[str], None]], None]:
    def write(node: Any, write_line: Callable[[str], None]) -> None:
        from torch._inductor.virtualized import V

        name, arguments = node.python_kernel_name, [*node.codegen_args(), *node.codegen_kwargs()]
        device = node.get_device().type
        if device in modules:
            module = modules[device].__name__
            name = f"fewbit_{module.rpartition('.')[2]}_{function}_{device}"
            V.graph.wrapper_code.add_import_once(f"from {module} import {function} as {name}")
            arguments += ["empty=empty_strided_cpu"] if device == "cpu" else []
        write_line(f"{node.get_name()} = {name}({', '.join(arguments)})")

    return write
