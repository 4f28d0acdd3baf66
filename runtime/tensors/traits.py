"""What a tensor is: its dtype, plain memory whose address a kernel may take, or without values.

Tensors without values, on the meta device or fake, count memory without computing. Where a kernel works in registers,
the reference in plain torch makes temporary tensors. Tensors made within `scratch()` do not count towards a memory peak
(memory/peak.py) unless they are alive at its end, so that a method counts on abstract tensors what its kernels would
take.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# ---- dtypes ----------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The formats that the CPU kernels read and write; float64 is converted to float32 first.
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def name_of(dtype: torch.dtype | torch.layout) -> str:
    """Return the name of a dtype, or of a layout, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def as_kind(x: Tensor, *, keep_positive: bool) -> Tensor:
    """Return `x` in a format that kernels read: float64 rounded to float32, if `keep_positive` not to 0 from above."""
    if x.dtype in KINDS:
        return x
    single = x.float()
    return torch.where((x > 0) & (single == 0), smallest(torch.float32), single) if keep_positive else single


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite number of `dtype`, or of float32 if that is smaller."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def smallest(dtype: torch.dtype) -> float:
    """Return a number just above 0 that `dtype` represents and that survives flushing of subnormal float32 numbers."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-126


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: Apple's (MPS) do not, nor do some of Intel's (XPU)."""
    if device.type in ("cpu", "cuda", "meta", "mps"):
        return device.type != "mps"
    with unset_fake_temporarily():
        try:
            torch.ones((), dtype=torch.float64, device=device).add_(1)
        except (TypeError, RuntimeError):
            return False
    return True


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has no float64."""
    return torch.float64 if has_float64(device) else torch.float32


def sum_of_squares(x: Tensor) -> float:
    """Return the sum of the squares, in float64 where the device has it."""
    return float(x.to(widest_dtype(x.device)).square().sum())


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are multiplied."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# ---- plain memory ----------------------------------------------------------------------------------------------------


def has_kernels(x: Tensor) -> bool:
    """Return whether the CPU kernels support `x`: a plain tensor in the memory of this process, not lazily negated."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False  # before all else: Dynamo traces this function
    return x.device.type == "cpu" and not is_functorch_wrapped_tensor(x) and not x.is_neg()


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
            yield from (x for x in (given if isinstance(given, list | tuple) else (given,)) if isinstance(x, Tensor))


def is_batch(x: Tensor) -> bool:
    """Return whether `x` is a batch without memory of its own, as gradients are under ``is_grads_batched``."""
    return is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)


def is_quantizable(x: Tensor) -> bool:
    """Return whether `x` is memory that a quantizer accepts.

    A lazily negated view, as `z.conj().imag` is, is not: others find the same memory's numbers with the other sign.
    """
    known = type(x) in (Tensor, torch.nn.Parameter) or is_abstract(x)
    is_memory = known and is_dense(x) and not is_functorch_wrapped_tensor(x) and not x.is_neg()
    return is_memory and x.dtype in DTYPES and x.numel() > 0


def current_stream(x: Tensor) -> int:
    """Return torch's current stream on the device of `x`, 0 where a device has none.

    Memory that is freed is used again by later work of the stream it was allocated on, whatever others still read it.
    So codes of one stream serve none on another: who reads a tensor there tells torch so (`x.record_stream`), but
    cannot say it of codes.
    """
    if x.is_cpu or is_abstract(x):
        return 0
    current = getattr(getattr(torch, x.device.type, None), "current_stream", None)  # MPS has none
    return 0 if current is None else current(x.device).stream_id


# ---- without values -------------------------------------------------------------------------------------------------


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


_scratch = threading.local()


@contextmanager
def scratch() -> Iterator[None]:
    """Count the operations of this block as one kernel, whose temporary tensors take no memory."""
    _scratch.depth = getattr(_scratch, "depth", 0) + 1
    try:
        yield
    finally:
        _scratch.depth -= 1


def in_scratch() -> bool:
    """Return whether a block of `scratch` is running in this thread."""
    return getattr(_scratch, "depth", 0) > 0


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
