"""Small models of `transformers` and `timm` with random weights: enough layers for every kind of module to occur.

    MODELS["llama"].build(dropout=0.1) → Case(model, inputs, loss)

Language models get a batch in which some sequences are padded and one token of padding is not masked, and a table of
embeddings whose padding row is zero: rows of zeros reach every layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

BATCH, LENGTH, VOCABULARY, CLASSES = 4, 32, 128, 10
PADDED = MappingProxyType({1: 8, 3: 20})  # sequence → its last tokens that are padding
SEED = 0


@dataclass(frozen=True)
class Case:
    """A model in training mode, keywords for its forward pass, and the loss of what it returns; see `Model`."""

    model: nn.Module
    inputs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    differentiable: bool


@dataclass(frozen=True)
class Model:
    """One entry of the zoo.

    Attributes:
        source: "transformers" or "timm".
        make: dropout → model; draws its weights from torch's generator.
        takes: which of `INPUTS`.
        gated: whether its MLPs are gated linear units, which `glu=` is for.
        differentiable: whether its inputs may require a gradient; Wav2Vec2 sets that itself, on a view of them.
    """

    source: str
    make: Callable[[float], nn.Module]
    takes: str
    gated: bool = False
    differentiable: bool = True

    def build(self, dropout: float) -> Case:
        """Return the model, always with the same weights and inputs; every dropout in it has this probability."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = self.make(dropout).train()
            inputs = INPUTS[self.takes]()
        return Case(model, inputs, own_loss if "labels" in inputs else projected, self.differentiable)


# ---- inputs and losses -----------------------------------------------------------------------------------------------


def tokens(mask: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH))
    attended = torch.ones_like(ids)
    for row, length in PADDED.items() if mask else ():
        ids[row, -length:], attended[row, -length:] = 0, 0
    ids[2, 5] = 0  # a token of padding that the mask lets through
    return {"input_ids": ids, "attention_mask": attended} if mask else {"input_ids": ids}


def language() -> dict[str, Tensor]:
    """Return tokens whose labels are themselves, but for the padding, which has none."""
    inputs = tokens()
    return inputs | {"labels": inputs["input_ids"].masked_fill(inputs["input_ids"] == 0, -100)}


def unpadded() -> dict[str, Tensor]:
    inputs = tokens(mask=False)
    return inputs | {"labels": inputs["input_ids"]}


def image(side: int, labels: bool = True) -> dict[str, Tensor]:
    pixels = {"pixel_values": torch.randn(BATCH, 3, side, side)}
    return pixels | {"labels": torch.randint(CLASSES, (BATCH,))} if labels else pixels


def map_of_labels() -> dict[str, Tensor]:
    return image(64, labels=False) | {"labels": torch.randint(CLASSES, (BATCH, 64, 64))}


def mel_spectrogram() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 16, 2 * LENGTH), "labels": torch.randint(1, VOCABULARY, (BATCH, 16))}


def waveform() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 800), "labels": torch.randint(CLASSES, (BATCH,))}


def image_and_text() -> dict[str, Tensor]:
    return tokens() | image(32, labels=False)


def batch_of_images(side: int) -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 3, side, side)}


INPUTS: Mapping[str, Callable[[], dict[str, Tensor]]] = MappingProxyType(
    {
        "language": language,
        "unpadded language": unpadded,
        "32 pixels": partial(image, 32),
        "64 pixels": partial(image, 64),
        "32 pixels, no labels": partial(image, 32, labels=False),
        "64 pixels, no labels": partial(image, 64, labels=False),
        "map of labels": map_of_labels,
        "mel spectrogram": mel_spectrogram,
        "waveform": waveform,
        "image and text": image_and_text,
        "batch of 32 pixels": partial(batch_of_images, 32),
        "batch of 64 pixels": partial(batch_of_images, 64),
    }
)


def own_loss(output: Any) -> Tensor:
    return output.loss


def projected(output: Any) -> Tensor:
    """Return cross-entropy where the output is one score a class, else its inner product with a fixed direction."""
    if isinstance(output, Tensor) and output.shape == (BATCH, CLASSES):
        return F.cross_entropy(output, torch.arange(BATCH) % CLASSES)
    total = torch.zeros(())
    for tensor in outputs_of(output):
        n = tensor.numel()
        total = total + (tensor * torch.linspace(-1, 1, n, dtype=tensor.dtype).cos_().view_as(tensor)).sum() / n
    return total


def outputs_of(output: Any) -> list[Tensor]:
    """Return the floating-point tensors in what a model returned."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


# ---- transformers ----------------------------------------------------------------------------------------------------

TEXT = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
)
GROUPED = TEXT | {"num_key_value_heads": 2}
HEAD_DIM = GROUPED | {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
GPT = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
)
IMAGE = MappingProxyType(
    {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "num_labels": CLASSES,
    }
)
T5 = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }
)
ENCODER_DECODER = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "use_cache": False,
        "forced_eos_token_id": None,
    }
)


def of_transformers(config: str, model: str, options: Mapping[str, Any], dropout: float) -> nn.Module:
    """Return a model from a configuration; every probability of dropout in it is `dropout`."""
    import transformers

    made = getattr(transformers, config)(**options)
    for part in (made, *(value for value in vars(made).values() if isinstance(value, transformers.PretrainedConfig))):
        for name, value in list(vars(part).items()):
            if ("drop" in name and "layerdrop" not in name) and type(value) is float:
                setattr(part, name, dropout)
    return getattr(transformers, model)(made)


def entry(config: str, model: str, options: Mapping[str, Any], takes: str, gated: bool = False, **more: Any) -> Model:
    make = partial(of_transformers, f"{config}Config", model, {**options, **more})
    return Model("transformers", make, takes, gated)


def causal(name: str, options: Mapping[str, Any], gated: bool = False, **more: Any) -> Model:
    return entry(name, f"{name}ForCausalLM", options, "language", gated, **more)


def masked(name: str, options: Mapping[str, Any], gated: bool = False, **more: Any) -> Model:
    return entry(name, f"{name}ForMaskedLM", options, "language", gated, **more)


def classifier(
    name: str, options: Mapping[str, Any], takes: str = "32 pixels", gated: bool = False, **more: Any
) -> Model:
    return entry(name, f"{name}ForImageClassification", options, takes, gated, **more)


_STAGES = {"num_channels": 3, "num_labels": CLASSES}

TRANSFORMERS: Mapping[str, Model] = {
    # Decoders.
    "gpt2": entry("GPT2", "GPT2LMHeadModel", GPT, "language"),
    "gpt-neox": causal("GPTNeoX", TEXT),
    "opt": causal("OPT", TEXT, ffn_dim=128, word_embed_proj_dim=64),
    "bloom": causal("Bloom", TEXT, n_layer=2, n_head=4),
    "falcon": causal("Falcon", TEXT, new_decoder_architecture=False),
    "llama": causal("Llama", GROUPED, gated=True),
    "mistral": causal("Mistral", GROUPED, gated=True, sliding_window=16),
    "qwen2": causal("Qwen2", GROUPED, gated=True),
    "qwen3": causal("Qwen3", HEAD_DIM, gated=True),
    "qwen3 heads of 64": causal("Qwen3", GROUPED, gated=True, head_dim=64),
    "qwen3-moe": causal("Qwen3Moe", HEAD_DIM, gated=True, moe_intermediate_size=32, **EXPERTS),
    "mixtral": causal("Mixtral", GROUPED, gated=True, **EXPERTS),
    "gemma": causal("Gemma", HEAD_DIM, gated=True),
    "gemma2": causal("Gemma2", HEAD_DIM, gated=True, sliding_window=16),
    "gemma3": entry("Gemma3Text", "Gemma3ForCausalLM", HEAD_DIM, "language", True, sliding_window=16),
    "phi": causal("Phi", TEXT),
    "phi3": causal("Phi3", GROUPED, gated=True),
    "stablelm": causal("StableLm", GROUPED, gated=True),
    "olmo2": causal("Olmo2", GROUPED, gated=True),
    "cohere": causal("Cohere", GROUPED, gated=True),
    "gptj": causal("GPTJ", GPT, rotary_dim=8),
    "codegen": causal("CodeGen", GPT, rotary_dim=8),
    "mamba": entry("Mamba", "MambaForCausalLM", TEXT, "unpadded language", state_size=8),
    # Encoders.
    "bert": masked("Bert", TEXT),
    "roberta": masked("Roberta", TEXT, max_position_embeddings=68),
    "albert": masked("Albert", TEXT, embedding_size=32),
    "electra": masked("Electra", TEXT, embedding_size=32),
    "deberta-v2": masked("DebertaV2", TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "distilbert": masked("DistilBert", TEXT, dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    "modernbert": masked("ModernBert", TEXT, gated=True, cls_token_id=1, sep_token_id=2, local_attention=16),
    # Encoders with decoders.
    "t5": entry("T5", "T5ForConditionalGeneration", T5, "language", feed_forward_proj="relu"),
    "t5 gated": entry("T5", "T5ForConditionalGeneration", T5, "language", True, feed_forward_proj="gated-gelu"),
    "bart": entry("Bart", "BartForConditionalGeneration", ENCODER_DECODER, "language", max_position_embeddings=64),
    # Sound.
    "whisper": entry(
        "Whisper",
        "WhisperForConditionalGeneration",
        ENCODER_DECODER,
        "mel spectrogram",
        num_mel_bins=16,
        max_source_positions=LENGTH,
        max_target_positions=32,
    ),
    "wav2vec2": replace(
        entry(
            "Wav2Vec2",
            "Wav2Vec2ForSequenceClassification",
            {
                name: TEXT[name]
                for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            },
            "waveform",
            conv_dim=(32, 32, 32),
            conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 2),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0,
            layerdrop=0.0,
            num_labels=CLASSES,
            classifier_proj_size=32,
        ),
        differentiable=False,
    ),
    # Images.
    "clip": entry(
        "CLIP",
        "CLIPModel",
        {},
        "image and text",
        text_config={name: value for name, value in TEXT.items() if name != "use_cache"},
        vision_config={name: value for name, value in IMAGE.items() if name != "num_labels"},
        projection_dim=32,
    ),
    "vit": classifier("ViT", IMAGE),
    "deit": classifier("DeiT", IMAGE),
    "beit": classifier("Beit", IMAGE, use_relative_position_bias=True),
    "dinov2": classifier("Dinov2", IMAGE, mlp_ratio=2),
    "dinov2 swiglu": classifier("Dinov2", IMAGE, gated=True, use_swiglu_ffn=True),
    "swin": classifier(
        "Swin", _STAGES, image_size=32, patch_size=2, embed_dim=32, depths=[1, 2], num_heads=[2, 4], window_size=4
    ),
    "convnext": classifier("ConvNext", _STAGES, "64 pixels", depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64]),
    "resnet": classifier(
        "ResNet", _STAGES, "64 pixels", embedding_size=16, depths=[1, 1, 1], hidden_sizes=[32, 48, 64]
    ),
    "mobilenet-v2": classifier("MobileNetV2", _STAGES, "64 pixels", depth_multiplier=0.35, image_size=64),
    "efficientnet": classifier(
        "EfficientNet",
        _STAGES,
        "64 pixels",
        image_size=64,
        width_coefficient=0.25,
        depth_coefficient=0.5,
        hidden_dim=320,
        depthwise_padding=[],
        initializer_range=0.2,  # at its own 0.02 signals vanish beside the epsilon of the normalizations
    ),
    "regnet": classifier(
        "RegNet", _STAGES, "64 pixels", embedding_size=16, hidden_sizes=[32, 48, 64], depths=[1, 1, 1], groups_width=16
    ),
    "segformer": entry(
        "Segformer",
        "SegformerForSemanticSegmentation",
        _STAGES,
        "map of labels",
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 48, 64],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=32,
    ),
    "levit": classifier(
        "Levit",
        _STAGES,
        "64 pixels",
        image_size=64,
        hidden_sizes=[64, 64, 96],
        num_attention_heads=[4, 4, 4],
        depths=[1, 1, 1],
        key_dim=[16, 16, 16],
    ),
    "poolformer": classifier(
        "PoolFormer", _STAGES, "64 pixels", depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], num_encoder_blocks=4
    ),
}


# ---- timm ------------------------------------------------------------------------------------------------------------


def of_timm(name: str, options: Mapping[str, Any], dropout: float) -> nn.Module:
    import timm

    dropouts = {"drop_rate": dropout, "drop_path_rate": dropout} | dict(options)
    given = {option: value for option, value in dropouts.items() if value is not None}
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **given)


def timm_model(name: str, side: int = 64, gated: bool = False, **options: Any) -> Model:
    return Model("timm", partial(of_timm, name, options), f"batch of {side} pixels", gated)


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}

TIMM: Mapping[str, Model] = {
    "timm resnet26": timm_model("resnet26", layers=[1, 1, 1, 1], stem_width=16, channels=(16, 24, 32, 48)),
    "timm resnet10t": timm_model("resnet10t", channels=(16, 24, 32, 48)),
    "timm vit_tiny": timm_model("vit_tiny_patch16_224", 32, **_VIT),
    "timm deit3": timm_model("deit3_small_patch16_224", 32, **_VIT),
    "timm beit": timm_model("beit_base_patch16_224", 32, **_VIT),
    "timm eva02": timm_model("eva02_tiny_patch14_224", 32, gated=True, **_VIT),
    "timm convnext_atto": timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    "timm efficientnet_lite0": timm_model("efficientnet_lite0"),
    "timm mobilenetv3_small_050": timm_model("mobilenetv3_small_050"),
    "timm mixer": timm_model("mixer_s16_224", 64, img_size=64),
    "timm gmlp": timm_model("gmlp_ti16_224", 64, gated=True, img_size=64),
    "timm swin": timm_model(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        patch_size=4,
        window_size=4,
        embed_dim=32,
        depths=(1, 2),
        num_heads=(2, 4),
    ),
    "timm regnetx_002": timm_model("regnetx_002"),
    "timm densenet": timm_model("densenet121", growth_rate=8, block_config=(2, 2, 2), drop_path_rate=None),
    "timm ghostnet_050": timm_model("ghostnet_050", drop_path_rate=None),
    "timm mobilevit_xxs": timm_model("mobilevit_xxs"),
}

MODELS: Mapping[str, Model] = MappingProxyType({**TRANSFORMERS, **TIMM})
