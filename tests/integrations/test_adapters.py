"""Adapters of peft: in another dtype than the model, on 4-bit weights of bitsandbytes, DoRA, and merged weights."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fewbit
import pytest
import small_modules
import torch
from fewbit import memory
from fewbit.quantizers import PerGroup
from torch import Tensor

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
PARTS = {"level": "L2", "glu": "parts"}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return small_modules.llama(num_key_value_heads=2, use_cache=False).to(dtype)


def with_adapters(model: Any, **options: Any) -> Any:
    """Return the model with adapters of which both halves are random."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=NAMES, **options)).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02)
    return model


def kept(model: Any) -> int:
    return memory.profile(model, **BATCH).total


def step(model: Any, context: Any = None) -> tuple[Tensor, Tensor]:
    """Return the logits, and the gradients of the adapters."""
    model.zero_grad()
    torch.manual_seed(2)
    with context or nullcontext():
        output = model(**BATCH)
    output.loss.backward()
    return output.logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


# ---- adapters in float32, as peft makes them, in a model in bfloat16 -------------------------------------------------


@pytest.fixture
def mixed() -> Callable[..., Any]:
    return lambda **options: with_adapters(llama(torch.bfloat16), **options)


@pytest.mark.parametrize("options", [{"level": "L2"}, {"level": "L3"}, PARTS], ids=str)
def test_an_input_that_each_adapter_casts_is_saved_once(mixed: Any, options: Any) -> None:
    model = mixed()
    fewbit.convert(model, **options)
    rows = [row for row in memory.profile(model, **BATCH).saved if row.dtype == torch.uint8]
    block = [row.module.split(".layers.1.")[-1] for row in rows if ".layers.1." in row.module]
    takers = {name.split(".")[1] for name in block if "lora_A" in name}
    # Query, key and value have one input; gate and up have one; that of down is rebuilt by the gated MLP.
    assert takers == {"q_proj", "o_proj", "gate_proj"} | (set() if "glu" in options else {"down_proj"})


def test_hooks_save_it_once(mixed: Any) -> None:
    model = mixed()
    with fewbit.compress_saved_tensors(PerGroup(4)):
        rows = memory.profile(model, **BATCH).saved
    codes = [row for row in rows if row.dtype == torch.uint8 and "layers.1.self_attn" in row.module]
    assert [row.module.split(".")[-3] for row in codes if "lora_A" in row.module] == ["q_proj", "o_proj"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gated_mlps_keep_no_product_for_their_adapters(mixed: Any, dropout: float) -> None:
    model = mixed(lora_dropout=dropout)
    alone = mixed(lora_dropout=dropout)
    exact = step(model)
    fewbit.convert(model, **PARTS)
    fewbit.convert(alone, level="L2")
    assert kept(model) < kept(alone)
    found = step(model)
    assert torch.equal(found[0], exact[0])
    assert error(found[1], exact[1]) < 0.25


def test_what_is_shared_gives_the_gradients_of_what_is_not(mixed: Any) -> None:
    model = mixed()
    exact = step(model)[1]
    fewbit.convert(model, level="L2", bits=8)
    assert error(step(model)[1], exact) < 0.02


# ---- QLoRA -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def quantized(request: Any, folder: Path) -> Callable[..., Any]:
    """Makes models of 4-bit weights with adapters, as the guide of peft has it."""
    pytest.importorskip("bitsandbytes")

    def made(**options: Any) -> Any:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=request.param,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, device_map={"": "cpu"}, dtype=request.param
        )
        prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        return with_adapters(prepared, **options)

    return made


def weights_in_4_bits(model: Any) -> dict[str, tuple[Tensor, ...]]:
    found = {name: p for name, p in model.named_parameters() if hasattr(p, "quant_state")}
    assert len(found) == 2 * len(NAMES)
    return {name: (p.detach().clone(), p.quant_state.absmax.clone()) for name, p in found.items()}


WAYS: dict[str, tuple[Any, Any, float, float]] = {
    # what is kept of the exact step's at most, and the error of the gradient
    "L2": ({"level": "L2"}, None, 0.6, 0.2),
    "L2, parts": (PARTS, None, 0.4, 0.25),
    "hooks": (None, lambda: fewbit.compress_saved_tensors(PerGroup(4)), 0.35, 0.2),
    "L2, parts, hooks": (PARTS, lambda: fewbit.compress_saved_tensors(PerGroup(4)), 0.3, 0.25),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("options", "context", "share", "most"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_4_bit_weights(
    options: Any, context: Any, share: float, most: float, dora: bool, quantized: Callable[..., Any]
) -> None:
    model = quantized(use_dora=dora)
    before, bytes_of_exact, exact = weights_in_4_bits(model), kept(model), step(model)
    if options is not None:
        report = fewbit.convert(model, **options)
        left = [row for row in report.left if "base_layer" in row.name]
        assert left and all("Linear4bit" in row.was for row in left)
    with context() if context else nullcontext():
        now = kept(model)
    if not dora or context:  # DoRA scales outputs by calls of its own, which hooks alone see
        assert now < share * bytes_of_exact
    found = step(model, context() if context else None)
    assert torch.equal(found[0], exact[0])
    assert 0 < error(found[1], exact[1]) < most
    after = weights_in_4_bits(model)
    assert all(torch.equal(*pair) for name in before for pair in zip(before[name], after[name], strict=True))


def test_checkpoints_of_4_bit_blocks(quantized: Callable[..., Any]) -> None:
    model = quantized()
    bytes_of_exact, exact = kept(model), step(model)
    fewbit.checkpoint(model, bits=8)
    assert kept(model) < 0.25 * bytes_of_exact
    found = step(model)
    assert torch.equal(found[0], exact[0])
    assert 0 < error(found[1], exact[1]) < 0.02


def test_frozen_4_bit_weights_keep_nothing_of_their_inputs(quantized: Callable[..., Any]) -> None:
    model = quantized()
    fewbit.convert(model, **PARTS)
    assert not [row for row in memory.profile(model, **BATCH).saved if "base_layer" in row.module]


@pytest.mark.deep
def test_the_callback_trains_them(quantized: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from fewbit.integrations.transformers import FewbitCallback

    model = quantized()
    before = weights_in_4_bits(model)
    data = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in IDS]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    callback = FewbitCallback(method=PARTS)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    state = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name}
    trainer.train()
    assert callback.kept is not None
    assert not any(torch.equal(p, state[name]) for name, p in model.named_parameters() if name in state)
    after = weights_in_4_bits(model)
    assert all(torch.equal(*pair) for name in before for pair in zip(before[name], after[name], strict=True))


# ---- merged weights --------------------------------------------------------------------------------------------------


def merged_equally(exact: Any, model: Any) -> tuple[Any, Any]:
    """Merge the adapters of both, take them out again, and merge for good; outputs are to be equal each time."""
    for change in ("merge_adapter", "unmerge_adapter"):
        for each in (exact, model):
            getattr(each, change)()
        assert torch.equal(logits(model), logits(exact))
    one, two = exact.merge_and_unload(), model.merge_and_unload()
    assert torch.equal(logits(two), logits(one))
    return one, two


@pytest.mark.sample(1)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("options", [{"level": "L2"}, PARTS], ids=str)
def test_merging_after_conversion(options: Any, dora: bool) -> None:
    exact, model = (with_adapters(llama(), use_dora=dora) for _ in range(2))
    fewbit.convert(model, **options)
    exact, model = merged_equally(exact, model)
    assert not any("lora" in name for name, _ in model.named_modules())
    for each in (exact, model):
        each.requires_grad_(True).train()
    right, found = step(exact)[1], step(model)[1]
    assert error(found, right) < 0.25
    whole = kept(exact)
    assert kept(model) < 0.6 * whole
    fewbit.revert(model)
    assert kept(model) == whole
    assert torch.equal(step(model)[1], right)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"level": "L2"}, PARTS], ids=str)
def test_merging_before_conversion_gives_what_converting_again_gives(options: Any) -> None:
    models = []
    for converts_first in (True, False):
        model = with_adapters(llama())
        if converts_first:
            fewbit.convert(model, **options)
        model = model.merge_and_unload().requires_grad_(True).train()
        fewbit.convert(model, **options)
        models.append(model)
    assert kept(models[0]) == kept(models[1])
    assert all(map(torch.equal, step(models[0]), step(models[1])))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_merging_into_4_bit_weights(dora: bool, quantized: Callable[..., Any]) -> None:
    exact, model = (quantized(use_dora=dora) for _ in range(2))
    fewbit.convert(model, **PARTS)
    merged_equally(exact, model)


# ---- conversion before peft ------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"level": "L2"}, {"level": "L3"}, PARTS, {"bits": 2, "adapt": 4}], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_converting_again_after_peft_is_converting_after_it(options: Any, dropout: float) -> None:
    found = []
    for times in (1, 2):
        model = llama()
        if times == 2:
            fewbit.convert(model, **options)
        model = with_adapters(model, lora_dropout=dropout)
        fewbit.convert(model, **options)
        found.append((kept(model), *step(model), *step(model)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


def unconverted_adapters(model: Any) -> list[str]:
    layers = [(n, m) for n, m in model.named_modules() if n.rpartition(".")[0].endswith(("lora_A", "lora_B"))]
    return [name for name, module in layers if "fewbit" not in type(module).__module__]


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"level": "L2"}, {"level": "L3"}, PARTS, {"outliers": 0.02, "bits": 4}], ids=str)
def test_adapters_put_in_later_are_converted_at_the_next_step(options: Any) -> None:
    after, before = with_adapters(llama()), llama()
    fewbit.convert(after, **options)
    fewbit.convert(before, **options)
    before = with_adapters(before)
    exact = step(with_adapters(llama()))
    found = [(*step(model), kept(model), *step(model)) for model in (after, before)]
    assert found[0][2] == found[1][2]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if isinstance(a, Tensor))
    assert torch.equal(found[1][0], exact[0])
    fewbit.revert(before)
    assert all(map(torch.equal, step(before), exact))


def test_a_second_adapter_is_converted_too() -> None:
    model = llama()
    fewbit.convert(model, level="L2")
    model = with_adapters(model)
    step(model)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=NAMES))
    model.set_adapter("second")
    first = kept(model)
    fewbit.convert(model, level="L2")
    assert kept(model) == first
    assert unconverted_adapters(model) == []


def test_a_reverted_model_and_one_converted_otherwise_are_not_followed() -> None:
    reverted, twice = llama(), llama()
    fewbit.convert(reverted, level="L2")
    fewbit.revert(reverted)
    reverted = with_adapters(reverted)
    assert torch.equal(step(reverted)[1], step(with_adapters(llama()))[1])
    fewbit.convert(twice, level="L2")
    twice = with_adapters(twice)
    fewbit.convert(twice, bits=3)
    step(twice)
    assert len(unconverted_adapters(twice)) == 28


def test_evaluation_converts_nothing() -> None:
    model = llama()
    fewbit.convert(model, level="L2")
    model = with_adapters(model)
    logits(model.eval())
    assert len(unconverted_adapters(model)) == 28


def test_a_name_that_no_longer_matches_is_warned_of() -> None:
    model = llama()
    fewbit.convert(model, level="L2", include=["model.layers.*", "lm_head"])
    model = with_adapters(model)
    model.base_model.model.lm_head = torch.nn.Identity()
    with pytest.warns(UserWarning, match="adapters are not converted: include"):
        model(input_ids=IDS)


def test_a_followed_model_is_freed() -> None:
    import gc
    import weakref

    model = llama()
    fewbit.convert(model, level="L2")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_tables_follow_one_training_after_converting_again() -> None:
    from fewbit.runtime.activations.following import adaptation_of

    model = llama()
    fewbit.convert(model, bits=2, adapt=4)
    model = with_adapters(model)
    fewbit.convert(model, bits=2, adapt=4)
    assert [name for name, module in model.named_modules() if adaptation_of(module) is not None] == [""]
