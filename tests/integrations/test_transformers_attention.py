"""attn_implementation="fewbit": outputs, gradients and bytes beside transformers' sdpa."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fewbit import memory
from fewbit.tables import FewbitError
from processes import said_by_two
from torch import Tensor

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")
from fewbit.integrations.transformers import register_attention  # noqa: E402

IDS = torch.randint(0, 128, (3, 48), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(3, 48, dtype=torch.int64)
PADDED[1, :9] = 0
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def model(kind: str, attention: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **HEADS, **options, use_cache=False)
    config._attn_implementation = attention
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def gradients(found: Any, mask: Tensor | None) -> tuple[float, Tensor]:
    found.zero_grad()
    torch.manual_seed(1)
    loss = found(input_ids=IDS, labels=IDS, attention_mask=mask).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in found.parameters()])


CASES = {
    "Llama": ("Llama", {}),
    "Llama with dropout": ("Llama", {"attention_dropout": 0.2}),
    "Mistral with a window": ("Mistral", {"sliding_window": 8}),
}


@pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["causal", "padded"])
def test_outputs_are_those_of_sdpa_and_gradients_nearly(kind: str, options: Any, mask: Tensor | None) -> None:
    exact, few = model(kind, "sdpa", **options), model(kind, "fewbit", **options)
    (loss, right), (same, found) = gradients(exact, mask), gradients(few, mask)
    assert same == pytest.approx(loss, rel=1e-6)
    assert (found - right).norm() < 0.05 * right.norm()


def test_query_key_and_value_are_all_that_is_saved() -> None:
    few = model("Llama", "fewbit")
    found = [s for s in memory.profile(few, input_ids=IDS, labels=IDS).saved if s.op == "CompressedAttention"]
    elements = 3 * 48 * 16 * (4 + 2 + 2)  # of queries, and of keys and values as they are
    assert len(found) == 2 * 3 * 3  # for two layers: codes, minima and ranges
    assert 6 / 8 <= sum(s.bytes for s in found) / (2 * elements) <= 6 / 8 + 4 / 16


def test_bits_are_chosen_by_name() -> None:
    register_attention(bits=2, name="fewbit-2")
    _, right = gradients(model("Llama", "sdpa"), None)
    errors = [(gradients(model("Llama", name), None)[1] - right).norm() for name in ("fewbit", "fewbit-2")]
    assert errors[0] < errors[1]
    with pytest.raises(FewbitError, match="bits is an integer from 1 to 8"):
        register_attention(bits=9)


def test_arguments_of_other_attentions_are_refused() -> None:
    gemma = model("Gemma2", "fewbit", head_dim=16)
    with pytest.raises(FewbitError, match="does not support softcap of Gemma2Attention"):
        gemma(input_ids=IDS)


@pytest.mark.deep
@pytest.mark.parametrize("way", ["ddp", "checkpointed, sharded", "sharded, checkpointed"])
def test_two_processes_have_the_gradient_of_one(way: str, tmp_path: Path) -> None:
    if way != "ddp" and not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    found = [said.splitlines()[-2:] for said in said_by_two("checkpoints", tmp_path, way)]
    errors, digests = zip(*found, strict=True)
    assert all(float(e) < 0.05 for e in errors)
    assert digests[0] == digests[1]
