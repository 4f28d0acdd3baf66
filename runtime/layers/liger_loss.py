"""The loss of a frozen head by Liger-Kernel, where that is installed, on NVIDIA GPUs.

Its kernel reads a logit twice and writes its gradient once, in 10 bytes of 16-bit numbers where plain torch moves about
50 (chunked_loss.py), by count and not measured here. A head that is trained stays with plain torch: Liger's chunks are
as small as make the logits as large as the hidden states, 128 of 4,096 tokens for the 128,256 words of Llama 3, and the
head's gradient would be added 32 times. Liger scales gradients where they lie, so that a loss that is gone through
twice (`retain_graph=True`) with another gradient than 1 has wrong ones the second time, as all of Liger's losses.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

_DTYPES = (torch.bfloat16, torch.float32)  # of float16 the gradient of a token among thousands would be 0


def loss_by_liger(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> Tensor | None:
    """Return the loss of a head's logits, or None where plain torch computes it; arguments as for
    `chunked_cross_entropy`. Liger caps logits too, which its interpreted kernel could not show."""
    tensors = [t for t in (hidden, weight, bias) if t is not None]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype == hidden.dtype for t in tensors)
    frozen = hidden.requires_grad and not any(t.requires_grad for t in tensors[1:])
    if not (plain and frozen and hidden.dtype in _DTYPES and _serves(hidden)):
        return None
    function: Any = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    with saved_tensors_hooks(lambda x: x, lambda x: x):  # what it saves are gradients, no activations to round
        found = function.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            labels.reshape(-1),
            bias,
            None,
            ignore_index,
            z_loss,
            label_smoothing,
            reduction,
        )
    loss = found[0] if isinstance(found, tuple) else found
    if reduction == "sum":
        return loss
    count = (labels != ignore_index).sum()
    return loss * (count / count)  # of no token torch's mean is NaN, and Liger's 0


def _serves(hidden: Tensor) -> bool:
    """Return whether Liger's kernel can run: it waits for the device, which a CUDA graph cannot."""
    if not hidden.is_cuda or torch.version.hip is not None or is_compiling() or not torch.is_grad_enabled():
        return False
    return find_spec("liger_kernel") is not None and not torch.cuda.is_current_stream_capturing()
