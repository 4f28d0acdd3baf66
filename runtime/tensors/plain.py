"""What a tensor is: one with memory of its own in this process, whose address a kernel may take, or without values.

Tensors without values, on the meta device or fake, count memory without computing. Where a kernel works in registers,
the reference in plain torch makes temporary tensors. Tensors made within `scratch()` do not count towards a memory peak
(memory/peak.py) unless they are alive at its end, so that a method counts on abstract tensors what its kernels would
take.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dtypes import DTYPES


def has_kernels(x: Tensor) -> bool:
    """Return whether the CPU kernels support `x`: a plain tensor in the memory of this process."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False  # before all else: Dynamo traces this function
    return x.device.type == "cpu" and not is_functorch_wrapped_tensor(x)


def is_plain(x: Tensor) -> bool:
    """Return whether `x` is a plain tensor of the CPU or a GPU, whose operations only autograd needs to see.

    Its dispatch keys exclude fake, batched, sparse, quantized and negated tensors.
    """
    return (
        not torch.compiler.is_compiling()
        and (type(x) is Tensor or type(x) is torch.nn.Parameter)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._dispatch_keys(x).raw_repr() == _plain_keys(x.is_cuda)
    )


@cache
def _plain_keys(on_gpu: bool) -> int:
    with torch.inference_mode(False):  # where tensors have fewer
        return torch._C._dispatch_keys(torch.empty(0, device="cuda" if on_gpu else "cpu")).raw_repr()


def is_dense(x: Tensor) -> bool:
    """Return whether `x` is one strided tensor: neither sparse nor nested, nor one that wraps others (DTensor)."""
    wraps = type(x) not in (Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(x)
    return x.layout is torch.strided and not x.is_nested and not wraps


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation that it writes into, by its schema."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(given, Tensor):
                yield given


def is_batch(x: Tensor) -> bool:
    """Return whether `x` is a batch without memory of its own, as gradients are under ``is_grads_batched``."""
    return is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)


def is_quantizable(x: Tensor) -> bool:
    """Return whether `x` is memory that a quantizer accepts."""
    known = type(x) in (Tensor, torch.nn.Parameter) or is_abstract(x)
    return known and is_dense(x) and x.dtype in DTYPES and x.numel() > 0 and not is_functorch_wrapped_tensor(x)


# ---- without values -------------------------------------------------------------------------------------------------


class _Depth(threading.local):
    depth = 0


_scratch = _Depth()


def is_abstract(x: Tensor) -> bool:
    """Return whether `x` has a shape, dtype and device, but no values."""
    return x.is_meta or isinstance(x, FakeTensor)


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of `x`; the meta device has none."""
    device = x.device.type
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of `x`; the meta device has none."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if _has_autocast(device) else nullcontext()


def _has_autocast(device: str) -> bool:
    if torch.compiler.is_compiling():  # Dynamo of torch 2.9 does not trace `is_autocast_available`
        return device != "meta"
    return torch.amp.is_autocast_available(device)


@contextmanager
def scratch() -> Iterator[None]:
    """Count the operations of this block as one kernel, whose temporary tensors take no memory."""
    _scratch.depth += 1
    try:
        yield
    finally:
        _scratch.depth -= 1


def in_scratch() -> bool:
    """Return whether a block of `scratch` is running in this thread."""
    return _scratch.depth > 0


_CONTAINERS = (tuple, list, dict)


def tensors_among(*values: object) -> list[Tensor]:
    """Return the tensors among values, and in nested tuples, lists and dicts, as operations of torch take and return.

    `tree_leaves` of torch knows other containers, too, and took a sixth of a trace of Llama-3-8B to ask for them.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _CONTAINERS) and value:
            found += tensors_among(*(value.values() if isinstance(value, dict) else value))
    return found
