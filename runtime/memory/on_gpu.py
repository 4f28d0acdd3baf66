"""What a GPU would keep, where other devices keep something else; for models measured without a GPU.

On the CPU and on the meta device dropout is a product with a mask of the input's dtype, and attention may come apart
into its pieces. On CUDA dropout keeps one byte an element, and `scaled_dot_product_attention` its inputs, its output
and one float32 for each row of scores.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class as_on_gpu(TorchFunctionMode):
    """Within this block dropout and attention keep for backward what their CUDA kernels keep.

    For counting on the meta device and on fake tensors: the values that come out have no meaning.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what stands for it on a GPU."""
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
    # The one fused kernel that counts on every device keeps what those for CUDA keep. It makes no dropout mask, nor do
    # they; and they take fewer heads of keys than of queries as they are, so `enable_gqa` changes nothing.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


_ON_GPU: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
