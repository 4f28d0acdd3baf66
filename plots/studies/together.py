"""What training keeps when methods of `convert` are combined: a Llama, whole and with adapters, and a residual network.

python -m fewbit.plots.studies.together -o methods-together.json

Bytes of exact training divided by those saved for the backward pass, counted by `fewbit.memory.profile`: a minute.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...runtime.convert.api import convert
from ...runtime.memory.record import profile
from ...runtime.models import preact_resnet
from .. import compact_json
from .adapters import Adapted

RANK = 8
TOKENS = (4, 256)
IMAGES = (16, 3, 32, 32)

# Names of the page, and arguments of `convert`.
LLAMA: Mapping[str, Mapping[str, Any]] = {
    "nothing more": {},
    "L2": {"level": "L2"},
    "parts": {"glu": "parts"},
    "parts, L2": {"glu": "parts", "level": "L2"},
    "inputs, L2": {"glu": "inputs", "level": "L2"},
    "outliers": {"outliers": 0.02},
    "parts, outliers": {"glu": "parts", "outliers": 0.02},
}
RESNET: Mapping[str, Mapping[str, Any]] = {
    "preact": {"fuse_preact": 4},
    "preact, L2": {"fuse_preact": 4, "level": "L2"},
    "L2": {"level": "L2"},
    "outliers": {"outliers": 0.02},
}
TUNED: Mapping[str, tuple[str, ...]] = {
    "all weights": (),
    "LoRA on q, v": ("q_proj", "v_proj"),
    "LoRA everywhere": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def llama(tuned: Sequence[str]) -> tuple[nn.Module, torch.Tensor]:
    """Return a Llama in bfloat16 with its input; adapters of rank 8 stand beside the named layers, and it is frozen."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8
    )
    model: nn.Module = LlamaForCausalLM(config)
    if tuned:
        model.requires_grad_(False)
    for name in [name for name, _ in model.named_modules() if name.endswith(tuple(tuned))] if tuned else []:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(model.get_submodule(name), RANK))
    return model.bfloat16(), torch.randint(config.vocab_size, TOKENS)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    """Return a pre-activation network of torch's modules, and images."""
    torch.manual_seed(0)
    return preact_resnet(29, width=16, fused=False), torch.randn(IMAGES)


def rows() -> list[dict[str, Any]]:
    """Return a row for each model and combination: bytes kept, and how many times fewer than exact's."""
    found = []
    cases: list[tuple[str, Callable[[], tuple[nn.Module, torch.Tensor]], Mapping[str, Mapping[str, Any]]]] = [
        *((tuned, lambda names=names: llama(names), LLAMA) for tuned, names in TUNED.items()),
        ("pre-activation ResNet", resnet, RESNET),
    ]
    for name, make, combinations in cases:
        model, x = make()
        exact = profile(model, x).total
        found.append({"model": name, "way": "exact", "kept": exact, "times": 1.0})
        for way, keywords in combinations.items():
            model, x = make()
            convert(model, **keywords)
            kept = profile(model, x).total
            found.append({"model": name, "way": way, "kept": kept, "times": exact / kept})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, write the file and print it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args(arguments).output
    found = rows()
    compact_json.write(output, {"torch": torch.__version__, "rows": found})
    for row in found:
        print(f"{row['model']:22} {row['way']:16} {row['kept'] / 2**20:7.1f} MiB {row['times']:6.3f}")


if __name__ == "__main__":
    main()
