"""TRL's SFTTrainer with the callback, on text: it tokenizes, puts adapters in and enables checkpointing by itself."""

import argparse
import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
import tokenizers  # noqa: E402
from datasets import Dataset  # noqa: E402
from fewbit.integrations.transformers import FewbitCallback  # noqa: E402

TEXTS = [part for part in inspect.getsource(argparse).split("\n\n") if len(part) > 50][:64]
SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
PARTS: dict[str, Any] = {"method": {"level": "L2", "glu": "parts"}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of bytes and their most frequent pairs."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=[*SPECIAL.values()], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def train(
    folder: Path, tokenizer: Any, callback: Any, adapters: bool, resume: str | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer))
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        max_length=64,
        learning_rate=1e-3,
        logging_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1) if adapters else None,
        callbacks=[] if callback is None else [callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "LoRA"])
def test_layers_are_converted_after_the_adapters_are_in(adapters: bool, tokenizer: Any, tmp_path: Path) -> None:
    callback, idle = FewbitCallback(**PARTS), FewbitCallback(method={})
    plain = {"gradient_checkpointing": False}
    trainer = train(tmp_path / "converted", tokenizer, callback, adapters, **plain)
    exact = train(tmp_path / "exact", tokenizer, idle, adapters, **plain)
    assert callback.kept is not None and idle.kept is not None and callback.preparation.report is not None
    assert callback.kept.saved < idle.kept.saved / 2
    assert any("lora_A" in row.name for row in callback.preparation.report.replaced) == adapters
    first, last = ([row["loss"] for row in t.state.log_history if "loss" in row] for t in (trainer, exact))
    assert first == pytest.approx(last, abs=0.02)
    assert trainer.state.log_history[0]["fewbit_saved_bytes"] == callback.kept.saved


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_resumed_training_goes_on_bit_for_bit(packing: bool, tokenizer: Any, tmp_path: Path) -> None:
    whole = train(tmp_path, tokenizer, FewbitCallback(**PARTS), adapters=True, packing=packing)
    path = str(tmp_path / "checkpoint-2")
    again = train(tmp_path, tokenizer, FewbitCallback(**PARTS), adapters=True, resume=path, packing=packing)
    assert torch.equal(weights(whole.model), weights(again.model))


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "LoRA"])
def test_a_plan_takes_the_place_of_its_checkpointing(adapters: bool, tokenizer: Any, tmp_path: Path) -> None:
    callback = FewbitCallback(error=0.05)
    trainer = train(tmp_path, tokenizer, callback, adapters)
    assert trainer.args.gradient_checkpointing  # TRL's default
    assert callback.preparation.fitted is not None
    assert any(choice.bits for choice in callback.preparation.fitted.plan.choices)


def test_what_is_planned_and_measured_is_what_its_own_head_saves(tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    """Its loss is a function of its own behind a keyword; by the model's loss a plan met tensors that it did not know,
    and the copy that trains exactly had no gradient."""
    callback = FewbitCallback(**PARTS)
    train(tmp_path / "parts", tokenizer, callback, adapters=True)
    assert callback.kept is not None and callback.kept.beside is not None and 0 < callback.kept.beside.error < 0.3
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fewbit")
        train(tmp_path / "plan", tokenizer, FewbitCallback(error=0.05), adapters=True)
    assert "fewbit: measuring steps, to plan for error 0.05\n" in capsys.readouterr().out


@pytest.mark.parametrize("options", [PARTS, {"error": 0.05}], ids=["parts", "a plan"])
def test_dpo_whose_batch_has_no_labels(options: Any, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def dpo(model: Any, arguments: Any, train_dataset: Any, **keywords: Any) -> Any:
        pairs = {"prompt": TEXTS[:8], "chosen": TEXTS[8:16], "rejected": TEXTS[16:24]}
        return trl.DPOTrainer(model, args=arguments, train_dataset=Dataset.from_dict(pairs), **keywords)

    monkeypatch.setattr(trl, "SFTConfig", trl.DPOConfig)
    monkeypatch.setattr(trl, "SFTTrainer", dpo)
    callback = FewbitCallback(**options)
    train(tmp_path, tokenizer, callback, adapters=True)
    assert callback.kept is not None and callback.kept.beside is not None and callback.kept.beside.error > 0


def test_hooks_run_around_its_checkpointing(tokenizer: Any, tmp_path: Path) -> None:
    from fewbit.quantizers import PerGroup

    callback, idle = FewbitCallback(method={"saved": PerGroup(4)}), FewbitCallback(method={})
    train(tmp_path / "hooks", tokenizer, callback, adapters=True)
    train(tmp_path / "exact", tokenizer, idle, adapters=True)
    assert callback.kept is not None and idle.kept is not None
    assert callback.kept.saved < idle.kept.saved
