"""Which tensors have memory of their own in this process, so that a kernel may be given its address."""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor


def has_kernels(x: Tensor) -> bool:
    """Tell whether the CPU kernels serve `x`: memory of this process, and no stand-in for it."""
    return x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def is_batch(x: Tensor) -> bool:
    """Tell whether `x` stands for many tensors, as gradients do under ``is_grads_batched``: no memory of its own."""
    return is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)
