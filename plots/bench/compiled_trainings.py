"""Ways to train small transformers: eager, compiled, checkpointed, with few bits.

    training = Training("fewbit-4", model_of(case), case)
    loss = training.step(tokens_of(case))

`fewbit bench compiled` (compiled.py) measures them.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.compile.backend import with_budget
from ...runtime.convert.api import convert
from ...runtime.memory.record import profile_call
from ...runtime.quantizers import PerGroup
from ...runtime.saved.hooks import compress_saved_tensors
from ...tables import FewbitError
from ..demo.small_networks import OfTransformers

Model = Callable[[Tensor], Tensor]
VOCABULARY = 1024
EAGER, COMPILE = "eager", "compile"
MODELS = ("Llama", "GPT-2")
FLOAT8 = "Llama-float8"  # its blocks' linear layers multiply in float8, as torchao emulates it
DTYPES = ("float32", "bfloat16")
# By options of the backend; those that are not given are its defaults.
FEWBIT: Mapping[str, Mapping[str, Any]] = {
    "fewbit-auto": {},
    "fewbit-8": {"bits": 8},
    "fewbit-4": {"bits": 4},
    "fewbit-4-nearest": {"bits": 4, "rounding": "nearest"},
    "fewbit-3": {"bits": 3},
    "fewbit-2": {"bits": 2},
    "fewbit-2-groups": {"bits": 2, "quantizer": "groups"},
}
BUDGETS = {"budget-0.5": 0.5, "budget-0.25": 0.25}
HOOKS, LEVEL, CHECKPOINT = "hooks-4", "L2", "checkpoint"
VARIANTS = (EAGER, COMPILE, CHECKPOINT, *BUDGETS, HOOKS, LEVEL, *FEWBIT)
LONGEST = 256  # tokens of a sequence that every model can take


@dataclass(frozen=True)
class Case:
    """A problem: a model, and the batch it is trained on.

    Attributes:
        model: a name of `MODELS`, or `FLOAT8`; of width 256 and four heads.
        dtype: "float32", or "bfloat16" for autocast.
        layers: number of blocks.
        batch, tokens: sequences, and the length of each.
        options: of the backend fewbit, by the names of further variants.
    """

    model: str = "Llama"
    dtype: str = "float32"
    layers: int = 4
    batch: int = 4
    tokens: int = 128
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)


class LanguageModel(nn.Module):
    """The loss of a causal model of `transformers` on its own tokens: the logits' cross entropy in float32."""

    def __init__(self, network: OfTransformers) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the tokens int64 (batch, length) but the first."""
        logits = self.network(tokens)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def model_of(case: Case) -> LanguageModel:
    """Return the case's model with the weights of seed 0.

    Raises:
        FewbitError: for `FLOAT8` without torchao.
    """
    torch.manual_seed(0)
    length = max(case.tokens, LONGEST)
    if case.model != "GPT-2":
        names = "a Llama", "LlamaForCausalLM", "LlamaConfig"
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": case.layers}
        options = {**sizes, "num_attention_heads": 4, "max_position_embeddings": length}
    else:
        names = "GPT-2", "GPT2LMHeadModel", "GPT2Config"
        sizes = {"n_embd": 256, "n_layer": case.layers, "n_head": 4, "n_positions": length}
        options = {**sizes, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = LanguageModel(OfTransformers(*names, VOCABULARY, **options))
    return _in_float8(model) if case.model == FLOAT8 else model


def _in_float8(model: LanguageModel) -> LanguageModel:
    try:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        raise FewbitError(f"{FLOAT8} needs torchao: pip install torchao") from None

    def in_a_block(_: nn.Module, name: str) -> bool:
        return ".layers." in name  # and not the head, as torchao advises

    return convert_to_float8_training(model, module_filter_fn=in_a_block, config=Float8LinearConfig(emulate=True))


def tokens_of(case: Case) -> Tensor:
    """Return random tokens int64 (batch, tokens)."""
    return torch.randint(0, VOCABULARY, (case.batch, case.tokens), generator=torch.Generator().manual_seed(0))


def compiles(variant: str, case: Case) -> bool:
    """Return whether a variant compiles its model."""
    return variant == COMPILE or variant in BUDGETS or variant in FEWBIT or variant in case.options


class Training:
    """A copy of a model, trained by one variant."""

    def __init__(self, variant: str, model: LanguageModel, case: Case) -> None:
        self.variant, self.dtype = variant, case.dtype
        self.options = {**FEWBIT, **case.options}.get(variant)  # of the backend fewbit; None without it
        self.own = copy.deepcopy(model)
        if variant == CHECKPOINT:
            of_blocks: Any = self.own.network.model
            # From transformers 5.x on the method has another name.
            enable = getattr(of_blocks, "activation_checkpointing_enable", None)
            (enable or of_blocks.gradient_checkpointing_enable)({"use_reentrant": False})
        if variant == LEVEL:
            convert(self.own, level="L2", glu="parts" if case.model != "GPT-2" else None)
        self.model: Model = self._compiled() if compiles(variant, case) else self.own

    def _compiled(self) -> Model:
        if self.variant in BUDGETS:
            return torch.compile(self.own, backend=with_budget(BUDGETS[self.variant]), fullgraph=True)
        if self.options is not None:
            return torch.compile(self.own, backend="fewbit", options=dict(self.options), fullgraph=True)
        return torch.compile(self.own, fullgraph=True)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the loss with its graph."""
        with self._hooks():
            return self._forward(tokens)

    def _forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return self.model(tokens)

    def _hooks(self) -> AbstractContextManager[object]:
        return compress_saved_tensors(PerGroup(bits=4)) if self.variant == HOOKS else nullcontext()

    def step(self, tokens: Tensor) -> float:
        """Run one training step but the optimizer's; return the loss."""
        loss = self.loss(tokens)
        loss.backward()
        return loss.item()

    def forget(self) -> None:
        """Free the gradients."""
        self.own.zero_grad()

    def gradients(self, tokens: Tensor) -> Tensor:
        """Return the gradients of a step in one vector, in float64."""
        self.forget()
        torch.manual_seed(0)
        self.step(tokens)
        found = torch.cat([p.grad.flatten().double() for p in self.own.parameters() if p.grad is not None])
        self.forget()
        return found

    def kept(self, tokens: Tensor) -> int:
        """Return the bytes kept between forward and backward, without parameters and inputs."""
        # What this module owns is not counted; the profile's hooks on the trained modules would be compiled.
        holder = nn.ParameterList(self.own.parameters())
        for number, tensor in enumerate((*self.own.buffers(), tokens)):
            holder.register_buffer(f"buffer{number}", tensor)
        with self._hooks():  # around the profile, which counts what the hooks return
            return profile_call(holder, lambda: self._forward(tokens)).total
