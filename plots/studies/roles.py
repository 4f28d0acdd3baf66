"""Noise and bias of a compiled step's gradient, a role of saved tensors at a time.

    python -m fewbit.plots.studies.roles > plots/results/roles.json

The graphs that `torch.compile(backend="fewbit")` divides run op by op, with one role rounded (its default bits, and 4)
and all others exact. `noise` and `bias` are those of bias.py: of one draw, and of the mean of many draws.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.compile.options import AUTO, CompileOptions
from ...runtime.compile.partitioner import FewbitPartitioner
from ...runtime.compile.roles import Role
from .. import compact_json
from .planner import Batch, gradient_of, without_dropout

DRAWS = 32
# What is rounded to nearest, whatever the options say, and so errs alike in each draw.
TO_NEAREST = (Role.ATTENTION, Role.SCORES, Role.NONLINEAR)


@dataclass(frozen=True)
class RoleError:
    """The error of a gradient with one role rounded.

    Attributes:
        model, role, bits: what was rounded.
        noise: of one draw, relative to the gradient's norm; 0 if the role is rounded to nearest.
        bias: of the mean, likewise; 0 where it is below what `DRAWS` draws can tell.
    """

    model: str
    role: str
    bits: int
    noise: float
    bias: float


def _gpt2() -> tuple[nn.Module, Batch]:
    """Return a GPT-2 of two layers, width 128, and 4 × 64 tokens."""
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)), _tokens()


def _llama() -> tuple[nn.Module, Batch]:
    """Return a Llama of two layers, width 128, and 4 × 64 tokens."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 352, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)), _tokens()


def _tokens() -> Batch:
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {"GPT-2": _gpt2, "Llama": _llama}


def measure(name: str, draws: int = DRAWS) -> Iterator[RoleError]:
    """Yield the errors of each role that a model's graphs save, at its default bits and at 4."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    without_dropout(model).train()
    exact = _gradients(model, batch, {role.value: None for role in AUTO}, 1)[0]
    for role, default in AUTO.items():
        for bits in sorted({default, 4}, reverse=True):
            few = 1 if role in TO_NEAREST else draws
            found = _gradients(model, batch, {r.value: bits if r is role else None for r in AUTO}, few)
            if (found[0] - exact).norm() > 1e-6 * exact.norm():  # else no tensor of this role is saved
                yield RoleError(name, role.value, bits, *_noise_and_bias(found, exact))


def _noise_and_bias(draws: Sequence[Tensor], exact: Tensor) -> tuple[float, float]:
    norm, mean = exact.square().sum(), torch.stack([*draws]).mean(0)
    noise = float(sum((draw - mean).square().sum() for draw in draws) / max(1, len(draws) - 1) / norm)
    bias = float((mean - exact).square().sum() / norm) - noise / len(draws)
    # Three standard deviations of what is subtracted, if groups of 128 elements err alike.
    least = 3 * noise / len(draws) * math.sqrt(2 * 128 / exact.numel())
    return math.sqrt(noise), math.sqrt(bias) if bias > least else 0.0


def _gradients(model: nn.Module, batch: Batch, bits: Mapping[str, int | None], draws: int) -> list[Tensor]:
    """Return gradients of the model with these bits by role, each by other random numbers."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend=_op_by_op(CompileOptions(bits=bits, smallest=1024)))
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        model.zero_grad()
        compiled(**batch).loss.backward()
        found.append(gradient_of(model))
    return found


def _op_by_op(options: CompileOptions) -> Callable[..., Any]:
    """Return a backend that divides graphs as fewbit does, and runs them without Inductor."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run(graph: Any, inputs: Any, **_: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=FewbitPartitioner(options),
        decompositions=select_decomp_table(),
    )
    return lambda graph, inputs: backend(graph, inputs)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of docs/numerics.md: noise and bias of each role, model and number of bits."""
    lines = ["| role | bits | GPT-2: noise | bias | Llama: noise | bias |", "|---|--:|--:|--:|--:|--:|"]
    found = {(row["role"], row["bits"], row["model"]): row for row in rows}
    for role, bits in dict.fromkeys((row["role"], row["bits"]) for row in rows):
        cells: list[str] = []
        for model in MODELS:
            row = found.get((role, bits, model))
            cells += [_text(row["noise"]), _text(row["bias"])] if row else ["", ""]
        lines.append(f"| {role} | {bits} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(error: float) -> str:
    return f"{error:.4f}".removeprefix("0") if error else "-"


if __name__ == "__main__":
    rows = [asdict(row) for name in MODELS for row in measure(name)]
    print(compact_json.dumps({"draws": DRAWS, "torch": torch.__version__, "rows": rows}), end="")
