"""The fused experts that `glu=` knows, by the source of what they compute between their two projections.

    Mixtral, Qwen2/3-MoE, DeepSeek, … (54 classes)       act_fn(gate) * up, in halves
    GPT-OSS, MiniMax-M3                                  both cut, (up + 1) * gate * sigmoid(alpha * gate)
    DeepSeek-V4, GLM-5, HunYuan-V4                       both cut, silu(gate) * up

`transformers` gives each class a method `_apply_gate`, which all its ways of running experts call but the loop of most
classes; that one is known by its source.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import functional as F

from ..layers.gated_experts import Gate, implementation
from ..layers.source_match import is_written_as

__all__ = ["ExpertForm", "experts_of", "has_fused_experts", "why_not_experts"]

ALPHA = 1.702  # of fewbit.QuickGELU
_CALLS_THE_GATE = ("eager", "batched_mm", "grouped_mm", "deepgemm")
_FUSED = {"gate_up_proj", "down_proj"}
_OTHERS = (_FUSED, {"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "v1"})


@dataclass(frozen=True)
class ExpertForm:
    """One way to write the product.

    Attributes:
        source: the method `_apply_gate`.
        activation: the attribute that holds the activation, or a function of torch; None: QuickGELU by `alpha`.
        gate: what happens to gate and up before.
        limit: the attribute that holds the limit of gate and up.
        alpha: the attribute that holds the factor in QuickGELU's sigmoid.
    """

    source: str
    activation: str | Callable[..., Any] | None = "act_fn"
    gate: Gate = Gate()  # noqa: RUF009 - a tuple
    limit: str | None = None
    alpha: str | None = None

    def gate_of(self, experts: Any) -> Gate:
        """Return what happens to gate and up before the product, in these experts."""
        return self.gate if self.limit is None else self.gate._replace(limit=float(getattr(experts, self.limit)))


_CUT_SILU = """
def _apply_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(min=None, max=self.swiglu_limit)
    up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
    return F.silu(gate) * up
"""
_FORMS = (
    ExpertForm(
        """
        def _apply_gate(self, gate_up_out):
            gate, up = gate_up_out.chunk(2, dim=-1)
            return self.act_fn(gate) * up
        """
    ),
    ExpertForm(  # GPT-OSS
        """
        def _apply_gate(self, gate_up):
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            gate = gate.clamp(min=None, max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
            glu = gate * torch.sigmoid(gate * self.alpha)
            gated_output = (up + 1) * glu
            return gated_output
        """,
        None,
        Gate(interleaved=True, plus_one=True),
        "limit",
        "alpha",
    ),
    ExpertForm(  # MiniMax-M3
        """
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            gate = gate.clamp(max=self.swiglu_limit)
            up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
            glu = gate * torch.sigmoid(gate * self.swiglu_alpha)
            return (up + 1.0) * glu
        """,
        None,
        Gate(plus_one=True),
        "swiglu_limit",
        "swiglu_alpha",
    ),
    ExpertForm(  # DeepSeek-V4
        """
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
            return self.act_fn(gate) * up
        """,
        limit="limit",
    ),
    ExpertForm(_CUT_SILU, F.silu, limit="swiglu_limit"),  # GLM-5, HunYuan-V4
)
_LOOP = """
def forward(self, hidden_states, top_k_index, top_k_weights):
    final_hidden_states = torch.zeros_like(hidden_states)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes={classes})
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        current_state = hidden_states[token_idx]
        gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
        current_hidden_states = self.act_fn(gate) * up
        current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])
        current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
        final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
    return final_hidden_states
"""
_LOOPS = tuple(_LOOP.format(classes=classes) for classes in ("self.num_experts + 1", "self.num_experts"))


def has_fused_experts(module: nn.Module) -> bool:
    """Return whether `module` holds the weights of gated experts in three dimensions."""
    weights = {name for name, weight in module._parameters.items() if weight is not None and weight.dim() == 3}
    return any(parts <= weights for parts in _OTHERS)


def experts_of(cls: type[nn.Module]) -> ExpertForm | None:
    """Return how a class of experts computes its product; None if it is written in no known way."""
    found = next((form for form in _FORMS if is_written_as(cls, form.source)), None)
    if found is None and not hasattr(cls, "_apply_gate") and is_loop(cls):
        return _FORMS[0]  # before `transformers` had several ways
    return found


def is_loop(cls: type[nn.Module]) -> bool:
    """Return whether the forward of a class is the loop that computes the product in place of a call."""
    return any(is_written_as(cls, loop) for loop in _LOOPS)


def why_not_experts(experts: Any, cls: type[nn.Module]) -> str | None:
    """Return the reason that experts, of the class `cls`, are left; None if they can be converted."""
    form, way = experts_of(cls), implementation(experts)
    if form is None:
        return "its fused experts compute their product in none of the ways that fewbit knows"
    if "forward" in vars(experts):
        return "its forward was replaced on the instance"
    if form.alpha is not None and getattr(experts, form.alpha) != ALPHA:
        return f"its sigmoid has the factor {getattr(experts, form.alpha)}, and fewbit.QuickGELU {ALPHA}"
    if way not in _CALLS_THE_GATE:
        return f"experts_implementation={way!r} does not compute the product of gate and up apart"
    if way == "eager" and not is_loop(cls) and "self._apply_gate(" not in _source(cls):
        return "its loop over the experts is none that fewbit knows; experts_implementation='grouped_mm' is taken"
    return None


def _source(cls: type[nn.Module]) -> str:
    try:
        return inspect.getsource(cls.forward)
    except (OSError, TypeError):
        return ""
