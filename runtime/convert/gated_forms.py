"""The gated MLPs and fused experts that `glu=` knows, by their source, and where each has its modules.

Llama, Mistral, Qwen2/3, Gemma, … (134 classes)      down_proj(act_fn(gate_proj(x)) * up_proj(x))
Phi3, GLM, Granite, ModernBERT, Moonshine, …         gate and up by one projection, in two halves
T5, T5Gemma, ModernBERT, timm's SwiGLU and GluMlp    dropout between the product and the projection back
Llama's own code, LFM2, the experts of older Mixtral w2(silu(w1(x)) * w3(x))

Of fused experts, by the source of what they compute between their two projections:

Mixtral, Qwen2/3-MoE, DeepSeek, … (54 classes)       act_fn(gate) * up, in halves
GPT-OSS, MiniMax-M3                                  both cut, (up + 1) * gate * sigmoid(alpha * gate)
DeepSeek-V4, GLM-5, HunYuan-V4                       both cut, silu(gate) * up

`transformers` gives each class a method `_apply_gate`, which all its ways of running experts call but the loop of most
classes; that one is known by its source.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..layers.gated_experts import Gate, implementation
from ..layers.gated_mlp import FUSED, SPLIT, Layout
from ..layers.huggingface import is_written_as


@dataclass(frozen=True)
class GatedForward:
    """One way to write a gated MLP.

    Attributes:
        source: the forward.
        layout: names of the modules in it.
        activation: the attribute that holds the activation, or a function of torch.
        gate_last: the attribute that says whether the gate is the last half, where `layout` does not.
        fits: whether an instance gates the last dimension, where its attributes decide.
    """

    source: str
    layout: Layout = SPLIT
    activation: str | Callable[..., Any] = "act_fn"
    gate_last: str | None = None
    fits: Callable[[Any], bool] = lambda block: True


_T5 = Layout(("wi_0", "wi_1"), "wo", between=("dropout",))
_TIMM = Layout(("fc1_g", "fc1_x"), "fc2", between=("drop1", "norm"), after=("drop2",))
_W123 = Layout(("w1", "w3"), "w2")
_FORWARDS = (
    GatedForward(
        """
        def forward(self, x):
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return down_proj
        """
    ),
    GatedForward(
        """
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        """
    ),
    GatedForward(  # RecurrentGemma
        """
        def forward(self, hidden_states):
            gate = self.act_fn(self.gate_proj(hidden_states))
            return self.down_proj(gate * self.up_proj(hidden_states))
        """
    ),
    GatedForward(  # Llama 4
        """
        def forward(self, x):
            down_proj = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(down_proj)
        """,
        activation="activation_fn",
    ),
    GatedForward(  # T5Gemma, GTE
        """
        def forward(self, x):
            hidden_states = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            hidden_states = self.dropout(hidden_states)
            down_proj = self.down_proj(hidden_states)
            return down_proj
        """,
        SPLIT._replace(between=("dropout",)),
    ),
    GatedForward(  # Phi3, GLM
        """
        def forward(self, x):
            up_states = self.gate_up_proj(x)
            gate, up_states = up_states.chunk(2, dim=-1)
            up_states = up_states * self.activation_fn(gate)
            return self.down_proj(up_states)
        """,
        FUSED,
        "activation_fn",
    ),
    GatedForward(  # T5, mT5, UMT5, Pix2Struct, …
        """
        def forward(self, hidden_states):
            hidden_gelu = self.act(self.wi_0(hidden_states))
            hidden_linear = self.wi_1(hidden_states)
            hidden_states = hidden_gelu * hidden_linear
            hidden_states = self.dropout(hidden_states)
            if (
                isinstance(self.wo.weight, torch.Tensor)
                and hidden_states.dtype != self.wo.weight.dtype
                and self.wo.weight.dtype != torch.int8
            ):
                hidden_states = hidden_states.to(self.wo.weight.dtype)
            hidden_states = self.wo(hidden_states)
            return hidden_states
        """,
        _T5._replace(casts=True),
        "act",
    ),
    GatedForward(  # LongT5
        """
        def forward(self, hidden_states):
            hidden_gelu = self.act(self.wi_0(hidden_states))
            hidden_linear = self.wi_1(hidden_states)
            hidden_states = hidden_gelu * hidden_linear
            hidden_states = self.dropout(hidden_states)
            hidden_states = self.wo(hidden_states)
            return hidden_states
        """,
        _T5,
        "act",
    ),
    GatedForward(  # ModernBERT
        """
        def forward(self, hidden_states):
            input, gate = self.Wi(hidden_states).chunk(2, dim=-1)
            return self.Wo(self.drop(self.act(input) * gate))
        """,
        Layout(("Wi",), "Wo", between=("drop",)),
        "act",
    ),
    GatedForward(  # Granite's shared experts
        """
        def forward(self, hidden_states):
            hidden_states = self.input_linear(hidden_states)
            chunked_hidden_states = hidden_states.chunk(2, dim=-1)
            hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
            hidden_states = self.output_linear(hidden_states)
            return hidden_states
        """,
        Layout(("input_linear",), "output_linear"),
        "activation",
    ),
    GatedForward(  # Moonshine
        """
        def forward(self, hidden_states):
            hidden_states = self.fc1(hidden_states)
            hidden_states, gate = hidden_states.chunk(2, dim=-1)
            hidden_states = self.activation_fn(gate) * hidden_states
            hidden_states = self.fc2(hidden_states)
            return hidden_states
        """,
        Layout(("fc1",), "fc2", gate_last=True),
        "activation_fn",
    ),
    GatedForward(  # Llama's own code, LFM2
        """
        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        """,
        _W123,
        F.silu,
    ),
    GatedForward(  # an expert of Mixtral or Phi-MoE, before transformers fused them
        """
        def forward(self, hidden_states):
            current_hidden_states = self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)
            current_hidden_states = self.w2(current_hidden_states)
            return current_hidden_states
        """,
        _W123,
    ),
    GatedForward(  # DINOv2 of older transformers
        """
        def forward(self, hidden_state):
            hidden_state = self.weights_in(hidden_state)
            x1, x2 = hidden_state.chunk(2, dim=-1)
            hidden = nn.functional.silu(x1) * x2
            return self.weights_out(hidden)
        """,
        Layout(("weights_in",), "weights_out"),
        F.silu,
    ),
    GatedForward(  # DINOv2's own code
        """
        def forward(self, x):
            x12 = self.w12(x)
            x1, x2 = x12.chunk(2, dim=-1)
            hidden = F.silu(x1) * x2
            return self.w3(hidden)
        """,
        Layout(("w12",), "w3"),
        F.silu,
    ),
    GatedForward(  # timm's SwiGLU: EVA02 with a normalization, DINOv3
        """
        def forward(self, x):
            x_gate = self.fc1_g(x)
            x = self.fc1_x(x)
            x = self.act(x_gate) * x
            x = self.drop1(x)
            x = self.norm(x)
            x = self.fc2(x)
            x = self.drop2(x)
            return x
        """,
        _TIMM,
        "act",
    ),
    GatedForward(  # timm's GluMlp and SwiGLUPacked: EVA02
        """
        def forward(self, x):
            x = self.fc1(x)
            x1, x2 = x.chunk(2, dim=self.chunk_dim)
            x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
            x = self.drop1(x)
            x = self.norm(x)
            x = self.fc2(x)
            x = self.drop2(x)
            return x
        """,
        _TIMM._replace(first=("fc1",)),
        "act",
        gate_last="gate_last",
        fits=lambda block: block.chunk_dim == -1,
    ),
)


def form_of_block(block: nn.Module) -> GatedForward | None:
    """Return how the forward of a gated MLP is written; None if it is in none of the known ways."""
    if "forward" in vars(block):
        return None
    found = next((form for form in _FORWARDS if is_written_as(type(block), form.source)), None)
    if found is None or found.gate_last is None:
        return found
    return replace(found, layout=found.layout._replace(gate_last=bool(getattr(block, found.gate_last))))


# ---- units without projections ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitForward:
    """One way to write the product alone, of the two halves of one tensor.

    Attributes:
        source: the forward.
        activation: the attribute that holds the activation, or a function of torch.
        gate_last: whether the gate is the last half.
    """

    source: str
    activation: str | Callable[..., Any]
    gate_last: bool


_FUNCTIONS: dict[str, str | Callable[..., Any]] = {
    **{f"{f}.{name}": getattr(F, name) for f in ("F", "nn.functional") for name in ("silu", "gelu", "relu", "sigmoid")},
    "torch.sigmoid": torch.sigmoid,
    "self.act": "act",
    "self.act_fn": "act_fn",
    "self.activation": "activation",
}


_UNITS = tuple(
    UnitForward(
        f"def forward(self, x):\n    {first}, {last} = x.chunk(2, dim=-1)\n    return {product}", act, gate_last
    )
    for called, act in _FUNCTIONS.items()
    for first, last in (("x", "gate"), ("x1", "x2"))  # the argument's name again, or two new ones
    for gate_last, gate, up in ((False, first, last), (True, last, first))
    for product in (f"{called}({gate}) * {up}", f"{up} * {called}({gate})")
)


def form_of_unit(module: nn.Module) -> UnitForward | None:
    """Return how the forward of a module without weights computes act(gate) · up; None if it is another module."""
    if "forward" in vars(module) or module._parameters or module._buffers or len(module._modules) > 1:
        return None
    if type(module).__module__.startswith("torch."):
        return None
    return next((form for form in _UNITS if is_written_as(type(module), form.source)), None)


# ---- fused experts ---------------------------------------------------------------------------------------------------

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
