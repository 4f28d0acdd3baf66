"""Attention: queries, keys and values are saved in few bits; the attention weights are not saved.

The backward pass recomputes attention from the decompressed q̂, k̂, v̂ (torch's fused kernels recompute its weights too)
and takes torch's gradient of that. It is not linear in q̂ and k̂, so it is unbiased only to first order in their errors.
Measured (`plots/studies/bias.py`; 4 heads of 32, 64 tokens of normal numbers) its bias is 0.7 % of the gradient's norm
at 4 bits and 19 % at 2; use 4 bits or more. Dropout draws the same mask again.

With `need_weights=True` softmax(q kᵀ) is computed step by step, as in torch: every step saves its own inputs in few
bits, and all gradients but that of the softmax, from one copy, are unbiased.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from .. import ops
from ..backends.reference import attention as reference
from ..tensors.traits import is_autocast
from .base import CompressedFunction, CompressedLayer, apply, check_first_derivative, compresses, keep, kept, observed
from .dropout import dropout
from .linear import linear
from .saver import Saver, as_saver
from .softmax import softmax

__all__ = ["MultiheadAttention", "scaled_dot_product_attention"]

Options = tuple[float, bool, float | None, bool]  # the probability of dropout, is_causal, scale, enable_gqa


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    saver: Saver,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, which saves query, key and value through `saver`.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: torch's own; with a mask that requires a
            gradient, torch's function runs unchanged.
        saver: compresses query, key and value.

    Example:
        saver = fewbit.layers.QuantizerSaver(fewbit.quantizers.PerGroup(bits=4))
        q = k = v = torch.randn(2, 4, 64, 16, requires_grad=True)
        y = fewbit.layers.scaled_dot_product_attention(q, k, v, saver=saver)
    """
    masked = attn_mask is not None and attn_mask.requires_grad
    if masked or not compresses(query, key, value) or query.dim() < 3:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    options = (dropout_p, is_causal, scale, enable_gqa)
    return apply(CompressedAttention, query, key, value, attn_mask, options, saver)


class CompressedAttention(CompressedFunction):
    """q, k, v -> softmax(q kᵀ) v."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options, saver: Saver
    ) -> Tensor:
        """Return torch's output; save q, k and v compressed."""
        ctx.saver, ctx.options, ctx.dtypes = saver, options, [x.dtype for x in (q, k, v)]
        p, is_causal, scale, gqa = options
        state = None  # the random state before dropout
        if not p:
            y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal, scale=scale, enable_gqa=gqa)
        elif not is_compiling():
            y, state = reference.forward(q, k, v, mask, *options)
        else:
            dtypes = [torch.get_autocast_dtype(q.device.type) if is_autocast(q) else x.dtype for x in (q, k, v)]
            y, state = ops.attention(q.to(dtypes[0]), k.to(dtypes[1]), v.to(dtypes[2]), mask, *options)
        keep(ctx, tuple([as_saver(saver).compress_rows(x) for x in (q, k, v)]), mask, state)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        check_first_derivative()
        grad = grads[0]
        compressed, mask, state = kept(ctx)
        compressed = observed(ctx.saver, compressed, grad)
        q, k, v = [c.decompress() for c in compressed]
        wanted = list(ctx.needs_input_grad[:3])
        if state is not None and is_compiling():
            found = ops.attention_backward(grad, q, k, v, mask, state, wanted, *ctx.options)
            found = [g for g, w in zip(found, wanted, strict=True) if w]
        else:
            found = _gradient(grad, q, k, v, mask, state, wanted, *ctx.options)
        gradients = [found[sum(wanted[:i])].to(ctx.dtypes[i]) if wanted[i] else None for i in range(3)]
        return (*gradients, None, None, None)


# The compiler traces the steps of this gradient, but not how torch differentiates them.
_gradient: Any = torch.compiler.allow_in_graph(reference.gradient)


# ---- the module ------------------------------------------------------------------------------------------------------


class MultiheadAttention(CompressedLayer, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, whose projections and attention save their inputs in few bits.

    query (L, N, E), key and value (S, N, …) to (L, N, E) and the weights, or None; with `batch_first` N comes first;
    float16, bfloat16, float32 or float64; the outputs are torch's, bit for bit. Unbatched or nested inputs,
    `add_bias_kv` and `add_zero_attn` run torch's layer unchanged. Use 4 bits or more: attention is not linear in its
    inputs.

    Args:
        args, kwargs: those of `torch.nn.MultiheadAttention`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.

    Raises:
        FewbitError: `bits` is not an integer from 1 to 8, or `saver` lacks `compress` or `observe`.

    Example:
        layer = fewbit.layers.MultiheadAttention(64, 4, batch_first=True, bits=4)
        tokens = torch.randn(2, 16, 64)
        y, _ = layer(tokens, tokens, tokens, need_weights=False)
        y.sum().backward()
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return torch's outputs."""
        nested = any(x.is_nested for x in (query, key, value))
        plain = query.dim() == 3 and not nested and self.bias_k is None and not self.add_zero_attn
        saves = plain and compresses(query, key, value, *self.parameters()) and key.numel() > 0
        if not saves or (is_causal and attn_mask is None):
            return super().forward(
                *(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            )
        kind = query.dtype
        padding = F._canonical_mask(  # pyright: ignore[reportAttributeAccessIssue]
            key_padding_mask,
            "key_padding_mask",
            F._none_or_dtype(attn_mask),
            "attn_mask",
            kind,  # pyright: ignore[reportAttributeAccessIssue]
        )
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", kind, False)  # pyright: ignore[reportAttributeAccessIssue]
        if is_causal and padding is None and not need_weights:
            mask = None  # is_causal alone describes it
        else:
            is_causal = False
        q, k, v = self._projected(query, key, value)
        mask = self._merged(mask, padding, q.shape, k.shape[2])
        if need_weights:
            found, weights = self._step_by_step(q, k, v, mask)
        else:
            p = self.dropout if self.training else 0.0
            found, weights = scaled_dot_product_attention(q, k, v, self.saver, mask, p, is_causal), None
        # (N, heads, L, features) -> (L, N, E)
        found = found.permute(2, 0, 1, 3).reshape(q.shape[2], q.shape[0], self.embed_dim)
        out = linear(found, self.out_proj.weight, self.out_proj.bias, self.saver, sample_dim=1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return out.transpose(1, 0) if self.batch_first else out, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (N, heads, length, features) each."""
        E, biases = self.embed_dim, (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        together = self._qkv_same_embed_dim and query is key and key is value
        # In (L, N, E), as torch does: the rounding of a product can depend on the row.
        inputs = [x.transpose(1, 0) if self.batch_first else x for x in (query, key, value)]
        if together:
            projected = linear(inputs[0], self.in_proj_weight, self.in_proj_bias, self.saver, sample_dim=1)
            all_three = projected.unflatten(-1, (3, E)).movedim(-2, 0).contiguous().unbind()
        elif self._qkv_same_embed_dim and key is value:
            weights = self.in_proj_weight.split([E, 2 * E])
            parts = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split([E, 2 * E])
            q = linear(inputs[0], weights[0], parts[0], self.saver, sample_dim=1)
            k_and_v = linear(inputs[1], weights[1], parts[1], self.saver, sample_dim=1)
            all_three = (q, *k_and_v.unflatten(-1, (2, E)).movedim(-2, 0).contiguous().unbind())
        else:
            weights = (
                self.in_proj_weight.chunk(3)
                if self._qkv_same_embed_dim
                else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            )
            all_three = [
                linear(x, weight, bias, self.saver, sample_dim=1)
                for x, weight, bias in zip(inputs, weights, biases, strict=True)
            ]
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3) for x in all_three)
        return q, k, v

    def _merged(self, mask: Tensor | None, padding: Tensor | None, shape: torch.Size, sources: int) -> Tensor | None:
        """Return one additive mask for (N, heads, L, S)."""
        n, heads, length, _ = shape
        if mask is not None:
            each = mask.shape if mask.dim() == 3 else (1, *mask.shape)
            if tuple(each) not in ((1, length, sources), (n * heads, length, sources)):
                raise RuntimeError(
                    f"attn_mask has the shape {tuple(mask.shape)}; accepted are {(length, sources)} "
                    f"and {(n * heads, length, sources)}"
                )
            mask = mask.view(-1, heads if each[0] == n * heads and each[0] > 1 else 1, length, sources)
        if padding is None:
            return mask
        padding = padding.view(n, 1, 1, sources)
        return padding.expand(-1, heads, length, -1) if mask is None else mask + padding

    def _step_by_step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the attention output, (N, heads, L, features), and the weights, (N, heads, L, S)."""
        scaled = q * math.sqrt(1.0 / float(self.head_dim))
        scores = multiply(scaled, k.transpose(-2, -1), self.saver, mask)
        weights = softmax(scores, -1, self.saver)
        if self.training and self.dropout > 0:
            weights = dropout(weights.flatten(0, 1), self.dropout).view(weights.shape)
        return multiply(weights, v, self.saver), weights


def multiply(a: Tensor, b: Tensor, saver: Saver, added: Tensor | None = None) -> Tensor:
    """Return a @ b + added, saving a and b through `saver`; (N, heads, rows, columns) each."""
    return apply(CompressedProduct, a, b, saver, added)


class CompressedProduct(CompressedFunction):
    """a, b -> a b + c, by torch's bmm and baddbmm."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, saver: Saver, added: Tensor | None) -> Tensor:
        """Return torch's product; save a and b compressed."""
        rows = b if b.stride(-1) == 1 else b.mT  # keys are transposed: a row is a key
        wanted = ctx.needs_input_grad[1::-1]
        saves = as_saver(saver).compress_rows
        keep(ctx, tuple(saves(x) if w else None for x, w in zip((a, rows), wanted, strict=True)))
        ctx.is_transposed = rows is not b
        ctx.saver, ctx.dtypes = saver, (a.dtype, b.dtype)
        ctx.added = None if added is None else (added.shape, added.dtype)
        shape = (*a.shape[:3], b.shape[3])
        left, right = a.flatten(0, 1), b.flatten(0, 1)
        if added is None:
            return torch.bmm(left, right).view(shape)
        return torch.baddbmm(added.expand(shape).flatten(0, 1), left, right).view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of a and b."""
        check_first_derivative()
        grad = grads[0]
        (compressed,) = kept(ctx)
        a, b = observed(ctx.saver, compressed, grad)
        grad_a = None
        if b is not None:
            columns = b.decompress().to(grad.dtype)
            grad_a = (grad @ (columns if ctx.is_transposed else columns.mT)).to(ctx.dtypes[0])
        grad_b = None if a is None else (a.decompress().to(grad.dtype).mT @ grad).to(ctx.dtypes[1])
        grad_added = None
        if ctx.needs_input_grad[3]:  # as of a bias by distance that is learnt
            shape, dtype = ctx.added
            grad_added = grad.sum_to_size(shape).to(dtype)
        return grad_a, grad_b, None, grad_added
