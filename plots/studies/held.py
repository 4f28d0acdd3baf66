"""Plans for twelve models that no other study plans for: whether a step ever takes more than the memory of its plan.

    python -m fewbit.plots.studies.held -o plots/results/held.json      or `make held`; goes on where it stopped

Five memories each, from the least of any plan to that of exact training. Steps with AdamW are counted twice: by what
torch's allocator gives, the scratch memory of kernels included, and by the storages that live, as a dispatch mode sees
them, which shares no code with the planner.
"""

import argparse
import gc
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...runtime.memory.allocator import allocations
from ...runtime.plan.eager_planner import Planner
from ...runtime.plan.planner import fit
from ...runtime.plan.problem import Limits, Price
from ...runtime.plan.static import static_bytes
from ...runtime.plan.step import Step
from .. import compact_json

PARTS = (0.0, 0.03, 0.15, 0.4, 0.8)  # of the way from the least memory to that of exact training
_VOCABULARY = 256

Batch = Mapping[str, Tensor]


def _tokens(count: int, length: int) -> Batch:
    ids = torch.randint(1, _VOCABULARY - 2, (count, length))
    return {"input_ids": ids, "labels": ids}


def _images(count: int, size: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(0, 10, (count,))}


class Classifier(nn.Module):
    """A network of images with its loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        logits = self.layers(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def vgg() -> tuple[nn.Module, Batch]:
    """Return convolutions with activations in place."""
    parts: list[nn.Module] = []
    for channels, wider in ((3, 16), (16, 32), (32, 64)):
        parts += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]
        parts += [nn.Conv2d(wider, wider, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return Classifier(*parts, nn.Flatten(), nn.Linear(64 * 16, 10)), _images(8, 32)


class Inverted(nn.Module):
    """A block of a MobileNet: wider, by depth, narrower."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 4 * width
        self.parts = nn.Sequential(
            *(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner)),
            *(nn.Hardswish(inplace=True), nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the parts' output."""
        return x + self.parts(x)


def mobilenet() -> tuple[nn.Module, Batch]:
    """Return inverted residuals, with ReLU6 and Hardswish in place."""
    blocks = [Inverted(16) for _ in range(3)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return Classifier(nn.Conv2d(3, 16, 3, 2, 1), *blocks, *head), _images(8, 32)


def encoder() -> tuple[nn.Module, Batch]:
    """Return torch's own transformer."""
    layer = nn.TransformerEncoderLayer(48, 4, 192, batch_first=True, activation="gelu")
    patches = nn.Conv2d(3, 48, 8, 8)
    head = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 10))
    return Classifier(patches, nn.Flatten(2), _Turned(), nn.TransformerEncoder(layer, 2), *head), _images(16, 32)


class _Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return the transpose of each matrix."""
        return x.transpose(1, 2)


def _bert() -> tuple[nn.Module, Batch]:
    from transformers.models.bert import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    return BertForMaskedLM(BertConfig(vocab_size=_VOCABULARY, num_attention_heads=4, **sizes)), _tokens(8, 48)


def _t5() -> tuple[nn.Module, Batch]:
    from transformers.models.t5 import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 48, "d_kv": 12, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    tokens: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": _VOCABULARY}
    config = T5Config(**tokens, **sizes)
    return T5ForConditionalGeneration(config), _tokens(8, 32)


def _bart() -> tuple[nn.Module, Batch]:
    from transformers.models.bart import BartConfig, BartForConditionalGeneration

    sizes: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads: dict[str, Any] = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = BartConfig(vocab_size=_VOCABULARY, d_model=48, max_position_embeddings=64, **sizes, **heads, **tokens)
    return BartForConditionalGeneration(config), _tokens(8, 32)


def _swin() -> tuple[nn.Module, Batch]:
    from transformers.models.swin import SwinConfig, SwinForImageClassification

    sizes: dict[str, Any] = {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    config = SwinConfig(window_size=4, **sizes)
    config.num_labels = 10
    return SwinForImageClassification(config), _images(8, 64)


def _convnext() -> tuple[nn.Module, Batch]:
    from transformers.models.convnext import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, patch_size=4)
    config.num_labels = 10
    return ConvNextForImageClassification(config), _images(8, 64)


def _clip() -> tuple[nn.Module, Batch]:
    from transformers.models.clip import CLIPConfig, CLIPModel

    both: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "projection_dim": 32}
    both["num_attention_heads"] = 4
    text = {**both, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**both, "image_size": 32, "patch_size": 8}, projection_dim=32)
    ids, images = torch.randint(3, 299, (16, 20)), torch.randn(16, 3, 32, 32)
    return CLIPModel(config), {"input_ids": ids, "pixel_values": images, "return_loss": torch.tensor(True)}


def _lora() -> tuple[nn.Module, Batch]:
    from peft import LoraConfig, get_peft_model
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, num_attention_heads=4, **sizes))
    options = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, options), _tokens(8, 48)  # pyright: ignore[reportReturnType,reportArgumentType]


def _qwen() -> tuple[nn.Module, Batch]:
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=_VOCABULARY, **sizes, **heads)), _tokens(8, 48)


def _nemotron() -> tuple[nn.Module, Batch]:
    from transformers.models.nemotron import NemotronConfig, NemotronForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "pad_token_id": 0}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return NemotronForCausalLM(NemotronConfig(vocab_size=_VOCABULARY, **sizes, **heads)), _tokens(8, 48)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "vgg": vgg,
    "mobilenet": mobilenet,
    "encoder": encoder,
    "swin": _swin,
    "clip": _clip,
    "convnext": _convnext,
    "t5": _t5,
    "bart": _bart,
    "bert": _bert,
    "lora": _lora,
    "qwen": _qwen,
    "nemotron": _nemotron,
}


class Living(TorchDispatchMode):
    """Counts the bytes of the storages that operations return, while they live.

    Attributes:
        most: of these bytes at once.
    """

    def __init__(self, before: Sequence[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {t.untyped_storage()._cdata for t in before}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)):
            key = storage._cdata
            if key not in self._sizes and key not in self._known:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key).atexit = False
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def peaks(model: nn.Module, batch: Batch) -> tuple[int, int]:
    """Return the peak of a step with AdamW, by torch's allocator and by the storages that live, with all that stays."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = model(**batch)
        output["loss"].backward()
        del output
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    state = [t for each in optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
    lasting = [*model.parameters(), *model.buffers(), *state]
    static = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in lasting}.values())
    gc.collect()
    by_allocator = allocations(step, torch.device("cpu")).peak
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    with Living([*lasting, *batch.values()]) as living:
        step()
    return static + by_allocator, static + living.most


def rows(name: str, parts: Sequence[float] = PARTS) -> Iterator[dict[str, Any]]:
    """Yield what is planned for a model, and what it takes."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    planner = Planner(Step(model, (), batch), Limits(error=10.0), Price(), static_bytes(model, "adamw"), None, True)
    known = planner.measured_eagerly()
    least = planner.solved(known)
    for part in parts:
        memory = int(least.peak.total + part * (least.exact_peak - least.peak.total))
        planner.limits = Limits(memory=memory)
        plan = planner.solved(known)
        fitted = fit(model, plan=plan)
        allocator, living = peaks(model, batch)
        fitted.undo()
        of_plan = {"memory": memory, "planned": plan.peak.total, "exact": plan.exact_peak}
        yield {"model": name, "part": part, **of_plan, "allocator": allocator, "living": living}


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what a reader wants to know."""
    for name in MODELS:
        own = [max(row["allocator"], row["living"]) / row["memory"] for row in found if row["model"] == name]
        if own:
            yield f"{name:10} {len(own)} memories: most that a step takes of one {max(own):.4f}"
    above = [row for row in found if max(row["allocator"], row["living"]) > row["memory"]]
    yield f"{len(found)} memories, {len(above)} of them exceeded"


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, train and count, write the file after each model, and print what it says."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; what it has is not measured again")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    chosen = parser.parse_args(arguments)
    found = json.loads(chosen.output.read_text())["rows"] if chosen.output.exists() else []
    for name in chosen.model or MODELS:
        if not any(row["model"] == name for row in found):
            found += rows(name)
            compact_json.write(chosen.output, {"torch": torch.__version__, "rows": found})
    print(*lines(found), sep="\n")


if __name__ == "__main__":
    main()
