"""The wide zoo: model types of `transformers` beyond those of models.py, from default configurations made small.

    WIDE["mamba2"].build(dropout=0.1) → Case(model, inputs, loss), as in models.py

A configuration is made small by the names of its fields (`SMALL`), in sub-configurations too; `SPECIAL` has what a type
needs besides. The class of the model is the first that transformers' own tables list for a task, and the task says what
it is fed with.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .models import BATCH, CLASSES, LENGTH, VOCABULARY, Case, Model, image, own_loss, projected, unpadded
from .small_networks import NETWORKS, of_network

# A field's value in the small configuration, by its name; a field that a type does not have is not set.
SMALL: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_hidden_size", "model_dim"), 64)
    | dict.fromkeys(("embedding_size", "projection_dim", "decoder_hidden_size", "hidden_dim", "rnn_hidden_size"), 64)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 128)
    | dict.fromkeys(("ffn_hidden_size", "d_inner", "mlp_dim", "encoder_feedforward_dim", "dim_ff"), 128)
    | dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2)
    | dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "n_block"), 2)
    | dict.fromkeys(("decoder_num_hidden_layers", "num_encoder_blocks_per_stage", "depth"), 2)
    | dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), 4)
    | dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads", "encoder_num_attention_heads"), 4)
    | {"num_key_value_heads": 2}
    | dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "kv_channels"), 16)
    | dict.fromkeys(("vocab_size", "vocab_size_src", "decoder_vocab_size", "n_vocab"), VOCABULARY)
    | dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "n_positions_max"), 2 * LENGTH
    )
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"), 2)
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32)
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "qk_rope_head_dim": 8, "first_k_dense_replace": 1}
    | {"state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "time_step_rank": 8, "use_cache": False}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "sliding_window": 16}
    | {"image_size": 32, "patch_size": 8, "num_labels": CLASSES, "conv_dim": (32, 32), "conv_stride": (5, 4)}
    | {"conv_kernel": (10, 8), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    | {"mask_time_prob": 0.0, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    | {"num_mel_bins": 16, "max_source_positions": LENGTH, "max_target_positions": LENGTH, "num_queries": 10}
    | {"num_frames": 4, "tubelet_size": 2}
)

# Fields that are set although they are None by default.
UNSET = frozenset(("head_dim", "num_key_value_heads", "vocab_size"))

STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
WINDOWS = {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
RESNET = {"model_type": "resnet", "embedding_size": 16, **STAGES, "out_features": ["stage4"]}
OF_RESNET = {"use_timm_backbone": False, "backbone_config": RESNET, "d_model": 64}

# What else a type needs; None leaves a field out.
SPECIAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "swinv2": WINDOWS,
        "donut-swin": WINDOWS,
        "maskformer-swin": WINDOWS,
        "swin2sr": WINDOWS | {"patch_size": 1, "upscale": 2},
        "bit": STAGES | {"embedding_size": 16, "num_groups": 4},
        "pvt": STAGES
        | {"num_attention_heads": [1, 2, 3, 4], "image_size": 32, "sequence_reduction_ratios": [1, 1, 1, 1]},
        "focalnet": {"depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "hidden_sizes": [32, 64]},
        "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [16, 32, 48, 64], "drop_path_rate": 0.0},
        "mobilenet_v1": {"depth_multiplier": 0.25, "image_size": 64},
        "mobilevit": {"hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 96], "image_size": 64},
        "hgnet_v2": {
            "embedding_size": 16,
            "stem_channels": [3, 8, 16],
            "hidden_sizes": [16, 32, 48, 64],
            "stage_in_channels": [16, 16, 32, 48],
            "stage_mid_channels": [8, 16, 16, 32],
            "stage_out_channels": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
        },
        "textnet": {
            "stem_out_channels": 16,
            "hidden_sizes": [16, 16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
        },
        "yolos": {"image_size": [32, 32]},
        "detr": OF_RESNET,
        "conditional_detr": OF_RESNET,
        "dab-detr": OF_RESNET | {"hidden_size": 64},
        "table-transformer": OF_RESNET,
        "vivit": {"tubelet_size": [2, 8, 8]},
        "funnel": {"block_sizes": [1, 1], "num_hidden_layers": None},
        "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 16},
        "xmod": {"default_language": "en_XX"},
        "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2, "state_size": 8, "chunk_size": 16},
        "luke": {"entity_vocab_size": 16, "entity_emb_size": 32},
        "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    }
)

# Tasks, in the order in which a type's class is looked for: transformers' table, and what the class is fed with.
TASKS: Mapping[str, str] = MappingProxyType(
    {
        "CAUSAL_LM": "text",
        "MASKED_LM": "text",
        "SEQ_TO_SEQ_CAUSAL_LM": "text to text",
        "CTC": "waveform to text",
        "SPEECH_SEQ_2_SEQ": "spectrogram to text",
        "AUDIO_CLASSIFICATION": "waveform",
        "IMAGE_CLASSIFICATION": "pixels",
        "SEMANTIC_SEGMENTATION": "pixels alone",
        "VIDEO_CLASSIFICATION": "frames",
        "OBJECT_DETECTION": "pixels alone",
        "DEPTH_ESTIMATION": "pixels alone",
        "UNIVERSAL_SEGMENTATION": "pixels alone",
        "IMAGE_TO_IMAGE": "pixels alone",
        "ZERO_SHOT_IMAGE_CLASSIFICATION": "pixels and text",
        "TIME_SERIES_PREDICTION": "series",
        "BACKBONE": "pixels alone",
        "PRETRAINING": "text",
    }
)


def text_to_text() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH)),
        "labels": torch.randint(3, VOCABULARY, (BATCH, 16)),
    }


def spectrogram_to_text(bins: int = 16) -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, bins, 2 * LENGTH), "labels": torch.randint(3, VOCABULARY, (BATCH, 16))}


def waveform_to_text() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 1600), "labels": torch.randint(1, 20, (BATCH, 6))}


def waveform() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 1600), "labels": torch.randint(CLASSES, (BATCH,))}


def frames() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.randint(CLASSES, (2,))}


def pixels_and_text() -> dict[str, Tensor]:
    return image(32, labels=False) | {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}


def series() -> dict[str, Tensor]:
    return {"past_values": torch.randn(BATCH, LENGTH)}


FEEDS: Mapping[str, Callable[[], dict[str, Tensor]]] = MappingProxyType(
    {
        "text": unpadded,
        "text to text": text_to_text,
        "waveform to text": waveform_to_text,
        "waveform": waveform,
        "spectrogram to text": spectrogram_to_text,
        "pixels": partial(image, 32),
        "pixels alone": partial(image, 32, labels=False),
        "frames": frames,
        "pixels and text": pixels_and_text,
        "series": series,
    }
)


def class_of(kind: str) -> tuple[str, str]:
    """Return the name of a type's class, and what it is fed with."""
    from transformers.models.auto import modeling_auto

    for task, feed in TASKS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).get(kind)
        if names:
            return (names if isinstance(names, str) else names[0]), feed
    raise KeyError(kind)


def small(config: type, special: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a small configuration."""
    default = config()
    fields = {name: value for name, value in SMALL.items() if is_for(config, default, name, value)}
    if "qk_rope_head_dim" in fields:  # which such configurations call their head_dim
        fields["head_dim"] = fields["qk_rope_head_dim"]
    for name in getattr(config, "sub_configs", {}):
        of_part = type(getattr(default, name, None))
        if hasattr(of_part, "to_dict"):
            fields[name] = small(of_part, special.get(name, {}))
    fields |= {name: value for name, value in special.items() if name not in getattr(config, "sub_configs", {})}
    return {name: value for name, value in fields.items() if value is not None}


def is_for(config: type, default: Any, name: str, value: Any) -> bool:
    """Tell whether a configuration has this field, of the kind of `value`."""
    try:
        was = getattr(default, name)
    except AttributeError:  # also one that differs by layer
        return name.endswith("token_id")
    described = getattr(config, name, None)
    if isinstance(described, property) and described.fset is None:
        return False
    if was is None:
        return name in UNSET or name.endswith("token_id")
    sequences = (list, tuple)
    return isinstance(was, sequences) == isinstance(value, sequences) and isinstance(was, bool) == isinstance(
        value, bool
    )


def of_type(kind: str, dropout: float) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    built = config(**small(config, SPECIAL.get(kind, {})))
    for part in parts(built):
        for name in vars(part):
            is_dropout = name.endswith(("drop", "drop_rate", "drop_path_rate", "jitter_noise")) or "dropout" in name
            is_dropout = is_dropout or "pdrop" in name
            if is_dropout and type(getattr(part, name)) in (int, float):
                setattr(part, name, dropout)
    return getattr(transformers, class_of(kind)[0])(built)


def parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(type(config), "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from parts(part)


# ---- the models ------------------------------------------------------------------------------------------------------

# Types by family; those of models.py are not repeated. Reformer is left out: it draws its hashes anew in every run.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "decoders": """apertus arcee biogpt bitnet cohere2 cpmant ctrl cwm ernie4_5 exaone glm glm4 gpt_bigcode
            gpt_neo gpt_neox_japanese granite helium hunyuan_v1_dense internlm3 ministral modernbert-decoder nanochat
            nemotron olmo olmo3 openai-gpt persimmon seed_oss smollm3 starcoder2 trocr xglm""",
        "mixtures of experts": """aria_text deepseek_v4 ernie4_5_moe flex_olmo gpt_oss granitemoe hunyuan_v1_moe jetmoe
            llama4_text mimo_v2_flash minimax minimax_m2 olmoe phimoe qwen2_moe solar_open""",
        "state space and recurrent": "falcon_mamba jamba lfm2 mamba2 qwen3_next recurrent_gemma rwkv bailing_hybrid",
        "encoders": """big_bird camembert data2vec-text deberta ernie esm eurobert flaubert fnet funnel ibert layoutlm
            longformer luke megatron-bert mobilebert mpnet mra nomic_bert nystromformer roberta-prelayernorm
            roc_bert roformer squeezebert tapas xlm xlm-roberta-xl xmod yoso""",
        "encoders with decoders": """bigbird_pegasus blenderbot encoder-decoder led longt5 m2m_100 marian mbart mt5 mvp
            nllb-moe pegasus pegasus_x plbart seamless_m4t_v2 switch_transformers t5gemma2 umt5""",
        "speech": "data2vec-audio hubert pop2piano sew unispeech unispeech-sat wavlm",
        "vision": """bit data2vec-vision dinov2_with_registers dinov3_vit donut-swin focalnet hgnet_v2 ijepa
            maskformer-swin mobilenet_v1 mobilevit pixio pp_lcnet_v4 pvt siglip swiftformer swin2sr swinv2
            textnet vit_msn vitdet""",
        "detection": "conditional_detr dab-detr detr table-transformer yolos",
        "video": "timesformer videomae vivit",
        "pictures and text": "altclip blip chinese_clip clipseg idefics3 llava metaclip_2 paligemma",
        "series": "timesfm timesfm2_5",
    }
)


class WideModel(Model):
    """A type of the wide zoo, or one of small_networks.py."""

    def build(self, dropout: float) -> Case:
        """Return the model, always with the same weights and inputs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make(dropout).train()
            inputs = (NETWORKS[self.takes].inputs if self.takes in NETWORKS else FEEDS[class_of(self.takes)[1]])()
        return Case(model, inputs, own_loss if "labels" in inputs else projected, self.differentiable)


WIDE: Mapping[str, Model] = MappingProxyType(
    {
        kind: WideModel("transformers", partial(of_type, kind), kind, differentiable=family != "speech")
        for family, kinds in KINDS.items()
        for kind in kinds.split()
    }
    | {name: WideModel("here", partial(of_network, name), name) for name in NETWORKS}
)
