"""Plans of models that never run, on a small Llama of the meta device; and the tables in the documentation."""

import json
import re
from pathlib import Path

import pytest
import torch
from fewbit.plots.studies import planner_estimated
from fewbit.plots.studies.planner_estimated import lines, planned
from fewbit.runtime.plan.static import static_bytes

ROOT = Path(__file__).parents[3]
MEASURED = json.loads((ROOT / "plots" / "results" / "planner-estimated.json").read_text())["rows"]


@pytest.fixture
def small(monkeypatch):
    """The setups with a Llama of two blocks in place of the built-in one."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 512}

    def build(name, size, dtype):
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(dtype)

    monkeypatch.setattr(planner_estimated, "build", build)


def test_a_plan_fits_or_says_what_would(small):
    (fits, full) = (planned("all weights", memory, lambda: planner_estimated.whole(sequence=128)) for memory in (1, 0))
    assert fits["error"] == 0 and fits["time"] == 1 and fits["peak"] == fits["exact_peak"] < 10**9
    assert "no plan fits into 0 bytes" in full["refused"]
    assert ["peak" in line for line in lines([fits, full])] == [True, False]


def test_adapters_alone_learn_in_float32(small):
    pytest.importorskip("peft")
    model, _ = planner_estimated.lora(sequence=128)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7 and all(p.dtype == torch.float32 and p.device.type == "meta" for p in trained)


def test_4_bit_weights_are_counted_with_their_scales(small):
    """Of all linear layers but the head: half a byte a weight, a byte for 64 of them, four bytes for 64 · 256."""
    for name in ("peft", "bitsandbytes"):
        pytest.importorskip(name)
    exact, few = (planner_estimated.lora(sequence=128, bits=bits)[0] for bits in (16, 4))
    in_bytes = [static_bytes(model, "sgd").parameters for model in (exact, few)]
    weights = sum(p.numel() for n, p in exact.named_parameters() if n.endswith("base_layer.weight"))
    saved = weights * (2 - 1 / 2 - 1 / 64 - 4 / 64 / 256)
    numbers = 2 * 7 * (4 * (16 + 256) + 4)  # levels of both, and an offset, in each layer
    assert in_bytes[0] - in_bytes[1] == saved - numbers


@pytest.mark.parametrize("page", ["README.md", "docs/planning/measured.md"])
def test_the_table_of_a_page_is_what_was_planned(page):
    lines = (ROOT / page).read_text().splitlines()
    for row in MEASURED:
        if row["training"] not in planner_estimated.TRAININGS:
            continue
        (line,) = (line for line in lines if line.startswith(f"| {row['training']}"))
        cell = line.strip("| ").split(" | ")[1 + planner_estimated.MEMORIES.index(row["memory"])]
        if "refused" in row:
            least = int(re.findall(r"least is (?:[\d.]+ GB \()?([\d,]+)", row["refused"])[0].replace(",", ""))
            assert f"{least / 1e9:.1f}" in cell
        elif not row["error"]:
            assert cell.startswith("exact")
        else:
            assert f"{row['error']:.3f}".lstrip("0") in cell and f"{row['time']:.2f}" in cell
