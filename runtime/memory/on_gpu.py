"""Dropout and attention that save what they save on a GPU, for models measured without a GPU.

On the CPU and on the meta device dropout is a product with a mask of the input's dtype, and attention may be decomposed
into its steps. On CUDA dropout saves one byte an element, and `scaled_dot_product_attention` its inputs, its output and
one float32 for each row of scores.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

# Whether `backward` takes where a tensor comes from in place of it, as the oldest release tried with it does.
_TAKES_EDGES = TorchVersion(torch.__version__) >= "2.9"


class as_on_gpu(TorchFunctionMode):
    """Within this block dropout and attention save for backward what their CUDA kernels save.

    For measuring on the meta device and on fake tensors: the output values are meaningless.

    Example:
        with fewbit.memory.as_on_gpu():
            print(fewbit.memory.profile(model, x))
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or its replacement with the saved tensors of a GPU."""
        if func is Tensor.backward and _TAKES_EDGES and not any((kwargs or {}).values()):
            # A mode is off within its own calls, and in this one torch's checkpoints compute attention again. The
            # function does not ask for modes where it is given no tensor, but where one comes from.
            with self:
                return torch.autograd.backward(get_gradient_edge(args[0]), torch.ones_like(args[0]))
        return _ON_GPU.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # This fused kernel runs on every device and saves what those for CUDA save. Neither it nor they make a dropout
    # mask, and they accept fewer heads of keys than of queries, so `enable_gqa` changes nothing.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


_ON_GPU: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
