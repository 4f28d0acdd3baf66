"""Models by name, built from a configuration of `transformers` on the meta device: no download, no memory.

model = zoo.build("gpt2")
profile(model, **zoo.inputs("gpt2", batch=8))
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...tables import FewbitError
from ...tables.names import find_name, nearest_hint

ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class Entry:
    """A model that `transformers` defines.

    Attributes:
        config, model: names of the two classes.
        options: of the configuration.
        takes: kind of input, "tokens" or "images".
        size: default number of tokens of a sequence, or pixels of an image's side.
        dropouts: the options of the configuration that are dropout probabilities.
        limit: the option that bounds the size, or is the size of images; "" if any size is accepted.
        spare: excess of `limit` over the size.
    """

    config: str
    model: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    takes: str = "tokens"
    size: int = 512
    dropouts: tuple[str, ...] = ()
    limit: str = ""
    spare: int = 0


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> Entry:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    options = {**sizes, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256}
    return Entry("LlamaConfig", "LlamaForCausalLM", options, size=4096)


def _resnet(kind: str, *depths: int) -> Entry:
    sizes = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    options = {"layer_type": kind, "depths": list(depths), "hidden_sizes": sizes, "num_labels": 1000}
    return Entry("ResNetConfig", "ResNetForImageClassification", options, "images", 224)


def _efficientnet(width: float, depth: float, hidden: int, size: int) -> Entry:
    options = {"width_coefficient": width, "depth_coefficient": depth, "hidden_dim": hidden, "num_labels": 1000}
    dropouts = ("dropout_rate", "drop_connect_rate")
    return Entry("EfficientNetConfig", "EfficientNetForImageClassification", options, "images", size, dropouts)


_ENCODER_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_OF_ENCODERS: dict[str, Any] = {"dropouts": _ENCODER_DROPOUTS, "limit": "max_position_embeddings"}
_BERT = Entry("BertConfig", "BertForSequenceClassification", **_OF_ENCODERS)
_ROBERTA = Entry(
    *("RobertaConfig", "RobertaForSequenceClassification"),
    {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    **_OF_ENCODERS,
    spare=2,
)
_GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_GPT2 = Entry("GPT2Config", "GPT2LMHeadModel", size=1024, dropouts=_GPT2_DROPOUTS, limit="n_positions")
_VIT = Entry(
    *("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}, "images", 224, _ENCODER_DROPOUTS, "image_size")
)
_WIDE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def _other(entry: Entry, **options: int) -> Entry:
    """Return a model of another size."""
    return replace(entry, options={**entry.options, **options})


ENTRIES: Mapping[str, Entry] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "gpt2-medium": _other(_GPT2, n_embd=1024, n_layer=24, n_head=16),
        "gpt2-large": _other(_GPT2, n_embd=1280, n_layer=36, n_head=20),
        "gpt2-xl": _other(_GPT2, n_embd=1600, n_layer=48, n_head=25),
        "llama-7b": Entry("LlamaConfig", "LlamaForCausalLM", size=2048),
        "llama-3-8b": _llama3(4096, 14336, 32, 32),
        "llama-3-70b": _llama3(8192, 28672, 80, 64),
        "bert-base": _BERT,
        "bert-large": _other(_BERT, **_WIDE),
        "roberta-base": _ROBERTA,
        "roberta-large": _other(_ROBERTA, **_WIDE),
        "vit-base": _VIT,
        "vit-large": _other(_VIT, **_WIDE),
        "resnet18": _resnet("basic", 2, 2, 2, 2),
        "resnet34": _resnet("basic", 3, 4, 6, 3),
        "resnet50": _resnet("bottleneck", 3, 4, 6, 3),
        "resnet101": _resnet("bottleneck", 3, 4, 23, 3),
        "resnet152": _resnet("bottleneck", 3, 8, 36, 3),
        "efficientnet-b0": _efficientnet(1.0, 1.0, 1280, 224),
        "efficientnet-b3": _efficientnet(1.2, 1.4, 1536, 300),
        "efficientnet-b7": _efficientnet(2.0, 3.1, 2560, 600),
    }
)


def find(name: str) -> str | None:
    """Return the name in `ENTRIES` that matches `name` (ignoring case, ``-`` and ``_``), or None."""
    return find_name(name, ENTRIES)


def build(
    name: str,
    size: int | None = None,
    *,
    dropout: bool = True,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return a model on the meta device, in training mode.

    Args:
        name: of `ENTRIES`.
        size: tokens of a sequence or pixels of an image's side that it must accept; the model's own if None.
        dropout: False sets all its dropout probabilities to 0.
        attention: "sdpa", one fused kernel, or "eager", with the scores in memory.
        dtype: of the parameters.

    Raises:
        FewbitError: there is no such model, or `transformers` is not installed.
    """
    entry = _entry(name)
    if attention not in ATTENTIONS:
        raise FewbitError(f"no attention {attention!r}; there are {', '.join(ATTENTIONS)}")
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise FewbitError("models by name need transformers: pip install transformers") from error
    options = {**entry.options}
    if entry.takes == "tokens" or entry.config == "ViTConfig":
        options["attn_implementation"] = attention
    if not dropout:
        options |= dict.fromkeys(entry.dropouts, 0.0)
    config = getattr(transformers, entry.config)(**options)
    if size and entry.limit:
        room = size + entry.spare
        setattr(config, entry.limit, room if entry.takes == "images" else max(room, getattr(config, entry.limit)))
    with torch.device("meta"):
        return getattr(transformers, entry.model)(config).to(dtype).train()


def inputs(name: str, batch: int = 1, size: int | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return keywords for a model's forward, on the meta device.

    Args:
        name: of `ENTRIES`.
        batch: samples.
        size: tokens of a sequence or pixels of an image's side; the model's own if None.
        dtype: of images.

    Raises:
        FewbitError: there is no such model.
    """
    entry = _entry(name)
    size = size or entry.size
    if entry.takes == "tokens":
        return {"input_ids": torch.zeros(batch, size, dtype=torch.long, device="meta")}
    return {"pixel_values": torch.zeros(batch, 3, size, size, dtype=dtype, device="meta")}


def _entry(name: str) -> Entry:
    found = find(name)
    if found is None:
        hint = nearest_hint(name, ENTRIES, f"; there are {', '.join(ENTRIES)}")
        raise FewbitError(f"no built-in model {name!r}{hint}")
    return ENTRIES[found]
