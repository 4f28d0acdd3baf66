"""Attention for models of transformers that saves query, key and value in few bits, and nothing else.

    import fewbit.integrations.transformers
    AutoModelForCausalLM.from_pretrained(name, attn_implementation="fewbit")       6 bits
    register_attention(bits=4)                                                      other bits, for all such models

Keys and values are saved as they are, not repeated for the queries that share them. Attention is computed once more in
the backward pass (runtime/layers/attention.py). Masks are those of transformers' sdpa: none where attention is causal,
else one that has padding and sliding windows.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..runtime.layers.attention import scaled_dot_product_attention
from ..runtime.layers.saver import QuantizerSaver
from ..runtime.quantizers import PerGroup
from ..tables import FewbitError
from ..tables.errors import check_integer

NAME = "fewbit"
BITS = 6
# Arguments of other attentions that change what is computed.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")


def register_attention(bits: int = BITS, name: str = NAME) -> None:
    """Register attention with transformers.

    Args:
        bits: 1 to 8, of query, key and value.
        name: for `attn_implementation=`.

    Raises:
        FewbitError: bits are out of range, or this release of transformers has no such registry.

    Example:
        register_attention(bits=4, name="fewbit-4")
    """
    check_integer("bits", bits, 1, 8)
    try:
        from transformers.modeling_utils import AttentionInterface
    except ImportError:
        raise FewbitError("attn_implementation='fewbit' takes transformers 4.48 or later") from None
    AttentionInterface.register(name, partial(_attend, QuantizerSaver(PerGroup(bits))))
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:  # before 4.53 models made masks themselves
        return
    AttentionMaskInterface.register(name, sdpa_mask)


def _attend(
    saver: QuantizerSaver,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output of an attention, (batch, length, heads, features), and no weights.

    Args:
        saver: of query, key and value, which are (batch, heads, length, features); of the latter two, heads may be
            fewer.
        module, query, key, value, attention_mask, dropout, scaling, is_causal: as transformers' sdpa is given them.
        **others: arguments of other attentions, of which some would change the result: then FewbitError is raised.
    """
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise FewbitError(f"attn_implementation='{NAME}' does not support {name} of {type(module).__name__}")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    repeats = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, saver, attention_mask, dropout, is_causal, scaling, repeats
    )
    return output.transpose(1, 2).contiguous(), None
