"""Attention with dropout: a compiler cannot draw a mask twice.

attention(q, k, v, mask, p, is_causal, scale, enable_gqa) -> y, state    by torch's generator
attention_backward(grad, q, k, v, mask, state, wanted, p, …) -> gradients of q, k and v, by the same mask
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.reference import attention as reference
from .declare import ON_HOST, ONCE, Call, declare

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask"
_OPTIONS = "float p, bool is_causal, float? scale, bool enable_gqa"


@declare(f"attention({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", tags=(*ON_HOST, ONCE))
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Call:
    """Return the output and the generator's state before it, uint8 on the CPU."""

    def fake() -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return y.contiguous(), torch.empty(reference.size_of_state(q.device), dtype=torch.uint8, device="cpu")

    def run(_: None) -> tuple[Tensor, Tensor]:
        y, state = reference.forward(q, k, v, mask, p, is_causal, scale, enable_gqa)
        return y.contiguous(), state  # what torch returns without values has other strides

    return Call(fake=fake, run=run)


@declare(
    f"attention_backward(Tensor grad, {_INPUTS}, Tensor state, bool[] wanted, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=ON_HOST,
)
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor,
    wanted: Sequence[bool],
    *options: Any,
) -> Call:
    """Return the gradients of q, k and v; what is not wanted has no elements."""

    def run(_: None) -> tuple[Tensor, ...]:
        with _autograd():
            found = iter(reference.gradient(grad, q, k, v, mask, state, wanted, *options))
        return tuple(next(found).contiguous() if w else grad.new_empty(0) for w in wanted)

    return Call(
        fake=lambda: tuple(grad.new_empty(x.shape if w else 0) for x, w in zip((q, k, v), wanted, strict=True)),
        run=run,
    )


def _autograd() -> Any:
    """Return a context in which autograd works, though an op runs below it."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(include, exclude)
