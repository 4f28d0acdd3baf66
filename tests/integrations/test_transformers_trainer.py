"""Trainer with the callback: what it logs, that a resumed training goes on bit for bit, errors; adapters of peft."""

import argparse
import copy
import inspect
import os
from pathlib import Path
from typing import Any

import fewbit
import pytest
import small_modules
import torch
from fewbit import memory
from fewbit.runtime.memory.listing import size_text
from fewbit.runtime.memory.peak import StorageTracker
from fewbit.tables import FewbitError
from torch import Tensor
from torch.nn import functional as F

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from fewbit.integrations import preparation  # noqa: E402
from fewbit.integrations.kept import kept  # noqa: E402
from fewbit.integrations.transformers import FewbitCallback  # noqa: E402

LENGTH = 64
TEXT = inspect.getsource(argparse).encode()[:30_000]
DATA = [
    {"input_ids": [*TEXT[i : i + LENGTH]], "labels": [*TEXT[i : i + LENGTH]]}
    for i in range(0, len(TEXT) - LENGTH, LENGTH)
]


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    return small_modules.llama(layers=layers, num_key_value_heads=2, use_cache=False)


def with_adapters(model: Any, dropout: float = 0.0) -> Any:
    peft = pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, lora_dropout=dropout))


def collate(samples: list[Any]) -> dict[str, Tensor]:
    return {name: torch.tensor([s[name] for s in samples]) for name in samples[0]}


def train(folder: Path, callback: Any, model: Any, steps: int = 6, resume: str | None = None, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=2,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    callbacks = [] if callback is None else [callback]
    trainer = transformers.Trainer(model, arguments, train_dataset=DATA, data_collator=collate, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


METHODS = {
    "layers and gates": {"method": {"level": "L2", "glu": "parts"}},
    "mixed precision": {"method": {"level": "L3"}},
    "following tables": {"method": {"bits": 2, "adapt": 3}},
    "hooks": {"method": {"saved": fewbit.quantizers.PerGroup(4)}},
    "checkpoints": {"method": {"checkpoint": 8}},
    "a plan": {"error": 0.05},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_resumed_training_goes_on_bit_for_bit(options: Any, tmp_path: Path) -> None:
    whole = train(tmp_path, FewbitCallback(**options), llama())
    again = train(tmp_path, FewbitCallback(**options), llama(), resume=str(tmp_path / "checkpoint-3"))
    assert torch.equal(weights(whole.model), weights(again.model))
    exact = train(tmp_path / "exact", None, llama())
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    exactly = [row["loss"] for row in exact.state.log_history if "loss" in row]
    assert losses[0] == pytest.approx(exactly[0], abs=0.02)


def test_the_log_has_the_bytes_of_a_step(tmp_path: Path) -> None:
    sizes = {}
    for name, options in {"8 bits": {"bits": 8}, "L2": {"level": "L2"}}.items():
        callback = FewbitCallback(method=options)
        trainer = train(tmp_path / name, callback, llama(), steps=2)
        assert callback.kept is not None
        row = trainer.state.log_history[0]
        assert row["fewbit_saved_bytes"] == callback.kept.saved
        assert row["fewbit_peak_bytes"] == callback.kept.peak > callback.kept.saved
        sizes[name] = callback.kept.saved
    assert sizes["L2"] < sizes["8 bits"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["layers and gates", "hooks", "checkpoints", "a plan"])
def test_the_line_has_the_exact_bytes_the_error_and_the_time(name: str, tmp_path: Path, capsys: Any) -> None:
    callback = FewbitCallback(**METHODS[name])
    train(tmp_path, callback, llama(), steps=1)
    assert callback.kept is not None and callback.kept.beside is not None
    exact, beside = kept(llama(), collate(DATA[:4])), callback.kept.beside
    assert exact.beside is None and beside.exact == pytest.approx(exact.saved, rel=0.05)
    assert 0 < beside.error < 0.3 and beside.time > 0
    source = "predicted" if name == "a plan" else "1/4 samples"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fewbit: ")]
    if name == "a plan":  # and the peak, of which its memory is a part
        assert beside.peak == pytest.approx(exact.peak, rel=0.05)
        assert f"(exact {size_text(beside.peak)})" in lines.pop()
    line = lines[-1]
    assert line.endswith(f" ({source})") and f"error {beside.error:.2g}" in line and len(line) <= 100


def test_a_plan_in_the_making_says_what_it_is_at(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(preparation, "EVERY", 0.01)
    plans = preparation.Preparation(limits={"memory": "80%"})
    plans.start(llama(), collate(DATA[:4]), {}, measure=False, tells=True)
    begins, *phases = capsys.readouterr().out.splitlines()
    assert begins == "fewbit: measuring steps, to plan for memory 80%"
    assert any(line.startswith("fewbit: measuring what rounding does to the gradient, ") for line in phases)


class WithoutLoss(torch.nn.Module):
    """A model of a user's own, whose loss is the trainer's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids).logits


def by_next_token(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OfOneTensor(transformers.Trainer):
    """Hands `compute_loss_func` a model's output, which is the logits, and saves no model."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        return by_next_token(model(inputs["input_ids"]), inputs["labels"])


def test_a_model_without_a_loss_is_planned_for_with_the_trainers(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(transformers, "Trainer", OfOneTensor)
    keywords = {"loss": lambda output, batch: by_next_token(output, batch["labels"])}
    callback = FewbitCallback(error=0.05, **keywords)
    train(tmp_path / "plan", callback, WithoutLoss(), steps=1, remove_unused_columns=False)
    assert callback.kept is not None and callback.kept.beside is not None
    train(tmp_path / "L2", FewbitCallback(method={"level": "L2"}), WithoutLoss(), steps=1, remove_unused_columns=False)
    line = capsys.readouterr().out.splitlines()[-3:]
    assert any(text.startswith("fewbit: level L2: not measured, for ") and len(text) <= 100 for text in line)
    with pytest.raises(FewbitError, match="give loss="):
        batch = {"input_ids": collate(DATA[:4])["input_ids"]}
        train(
            tmp_path / "none",
            FewbitCallback(error=0.05, batch=batch),
            WithoutLoss(),
            steps=1,
            remove_unused_columns=False,
        )


@pytest.mark.deep
def test_measuring_changes_nothing(tmp_path: Path) -> None:
    found = [
        weights(train(tmp_path / str(m), FewbitCallback(method={"level": "L3"}, measure=m), llama()).model)
        for m in (False, True)
    ]
    assert torch.equal(*found)


@pytest.mark.deep
def test_plans_are_kept_in_checkpoints(tmp_path: Path) -> None:
    callback = FewbitCallback(memory="6MB", refresh=2)
    train(tmp_path, callback, llama())
    assert callback.preparation.fitted is not None
    plan = callback.preparation.fitted.plan
    assert plan.peak.total <= 6_000_000
    state = torch.load(tmp_path / "checkpoint-6" / "fewbit.pt", weights_only=True)
    assert fewbit.Plan.from_text(state["plan"]).choices == plan.choices
    resumed = FewbitCallback(memory="1GB")  # the checkpoint's plan is taken, also in another folder
    other = train(tmp_path / "other", resumed, llama(), resume=str(tmp_path / "checkpoint-3"))
    assert resumed.preparation.fitted is not None
    assert resumed.preparation.fitted.plan.peak.total <= 6_000_000
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.model.modules())


@pytest.mark.deep
def test_checkpointing_of_the_trainer_is_replaced(tmp_path: Path) -> None:
    callback = FewbitCallback(method={"checkpoint": 8})
    trainer = train(tmp_path, callback, llama(4), steps=2, gradient_checkpointing=True)
    exact = FewbitCallback(method={"bits": 8})
    train(tmp_path, exact, llama(4), steps=2, gradient_checkpointing=True)
    assert callback.kept is not None and exact.kept is not None
    assert callback.kept.saved < exact.kept.saved
    # As long as it trains: afterwards the model is as it was.
    assert "fewbit" not in type(trainer.model.model.layers[0]._gradient_checkpointing_func).__module__


@pytest.mark.deep
def test_adapters_are_trained(tmp_path: Path) -> None:
    callback = FewbitCallback(method={"level": "L2", "glu": "parts"})
    model = with_adapters(llama(), 0.1)
    before = weights(model)
    trainer = train(tmp_path, callback, model)
    assert not torch.equal(before, weights(trainer.model))
    assert callback.preparation.report is not None
    assert any("lora_A" in row.name for row in callback.preparation.report.replaced)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give memory="),
        ({"memory": "1GB", "method": {"level": "L2"}}, "give memory="),
        ({"method": "L2"}, "method is a mapping"),
        ({"method": {"levels": "L2"}}, "nearest: level"),
        ({"method": {"level": "L2"}, "refresh": 5}, "refresh= is for plans"),
    ],
)
def test_errors_of_use_are_one_line(options: Any, message: str) -> None:
    with pytest.raises(FewbitError, match=message) as raised:
        FewbitCallback(**options)
    assert "\n" not in str(raised.value)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    train(tmp_path, None, llama(), steps=3)
    with pytest.raises(FewbitError, match=r"fewbit\.pt is missing"):
        train(tmp_path, FewbitCallback(method={"level": "L2"}), llama(), resume=str(tmp_path / "checkpoint-3"))


# ---- peft ------------------------------------------------------------------------------------------------------------


def test_reverting_keeps_the_adapters_that_were_put_into_gated_mlps() -> None:
    model = llama()
    fewbit.convert(model, glu="parts")
    model = with_adapters(model)
    names = [name for name, _ in model.named_parameters()]
    assert any("mlp.gate_proj.lora_A" in name for name in names)
    twin = copy.deepcopy(model)
    fewbit.revert(twin)
    assert [name for name, _ in twin.named_parameters()] == names


def test_adapters_of_one_input_save_it_once() -> None:
    model = with_adapters(llama(1)).train()
    fewbit.convert(model, level="L2")
    rows = [row for row in memory.profile(model, **collate(DATA[:4])).saved if row.dtype == torch.uint8]
    inputs = [row for row in rows if row.module.endswith("lora_A.default") and row.bytes == 4 * LENGTH * 64 // 2]
    # queries, keys and values; the output projection; gate and up.
    assert len(inputs) == 3


@pytest.mark.deep
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_quarter_of_an_8b_model_with_adapters_is_kept(dropout: float) -> None:
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        options = peft.LoraConfig(r=16, target_modules="all-linear", lora_dropout=dropout)
        model = peft.get_peft_model(model, options)
        ids = torch.zeros(1, 4096, dtype=torch.int64)
    with memory.as_on_gpu():
        exact = memory.profile(model, input_ids=ids, labels=ids).total
        fewbit.convert(model, level="L2", glu="parts")
        now = memory.profile(model, input_ids=ids, labels=ids).total
    assert now <= exact / 3.5


@pytest.mark.parametrize("options", [{"glu": "parts"}, {"level": "L2", "glu": "parts"}, {"level": "L2"}], ids=str)
def test_no_more_is_alive_between_the_passes_than_a_profile_tells(options: Any) -> None:
    batch = collate(DATA[:4])
    model = with_adapters(llama()).train()
    fewbit.convert(model, **options)
    model(**batch).loss.backward()  # what is made once
    with StorageTracker() as tracker:
        output = model(**batch)
        alive = tracker.living
    told = memory.profile(model, **batch).total
    assert alive <= told + output.logits.nbytes + 4096


def test_a_mixed_precision_layer_that_shares_codes_is_restored(tmp_path: Path) -> None:
    model = llama()
    fewbit.convert(model, level="L3")
    precision = model.model.layers[0].self_attn.q_proj.saver.precision
    for _ in range(2):
        model(**collate(DATA[:4])).loss.backward()
    state = copy.deepcopy(precision.state_dict())
    hosts = {name: row["host"] for name, row in state["layers"].items()}
    assert hosts["model.layers.0.self_attn.k_proj"] == "model.layers.0.self_attn.q_proj"
    other = llama()
    fewbit.convert(other, level="L3")
    found = other.model.layers[0].self_attn.q_proj.saver.precision
    found.load_state_dict(state)
    again = found.state_dict()
    assert {name: row["host"] for name, row in again["layers"].items()} == hosts
    counts = [[len(row["batches"]) for row in s["layers"].values()] for s in (state, again)]
    assert counts[0] == counts[1] and sum(counts[0]) > 0
