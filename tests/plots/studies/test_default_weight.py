"""The study of the default weight: errors of whole models, and the rule that chooses."""

import pytest
import torch
from fewbit.plots.studies import default_weight
from fewbit.plots.studies.default_weight import CASES, UNIFORM, best, gradient, ratios, with_tables


def row(errors, bits=2, model="GPT-2"):
    return {"model": model, "steps": 0, "dtype": "float32", "bits": bits, "errors": errors}


def test_the_rule_takes_the_least_mean_that_is_nowhere_much_worse():
    rows = [row({UNIFORM: 0.1, "narrow": 0.02, "wide": 0.08})]
    rows += [row({UNIFORM: 0.1, "narrow": 0.12, "wide": 0.1}, model="BERT")]
    found = ratios(rows)
    assert found[UNIFORM] == [1, 1]
    assert found["narrow"] == pytest.approx([0.2, 1.2])
    assert found["wide"] == pytest.approx([0.8, 1.0])
    assert best(rows) == "wide"
    assert best(rows[:1]) == "narrow"


def test_numbers_of_bits_are_chosen():
    rows = [row({UNIFORM: 1.0, "narrow": 0.1}, bits=1), row({UNIFORM: 1.0, "narrow": 2.0})]
    assert best(rows, bits=(1,)) == "narrow"
    assert best(rows, bits=(2,)) == UNIFORM


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_every_model_learns_and_has_activations_that_save_tables(name):
    if name != "ResNet with GELU":
        pytest.importorskip("transformers")
    case = CASES[name]
    torch.manual_seed(0)
    model, batch = case.make(), next(case.batches(0))
    exact = gradient(model, case.loss, batch, "float32")
    errors = [
        float((gradient(with_tables(model, bits, UNIFORM), case.loss, batch, "float32") - exact).norm() / exact.norm())
        for bits in (1, 4)
    ]
    assert 0 < 4 * errors[1] < errors[0]


def test_rows_of_a_trained_model(monkeypatch):
    monkeypatch.setattr(default_weight, "BITS", (2,))
    monkeypatch.setattr(default_weight, "DTYPES", ("float32",))
    rows = default_weight.measure("ResNet with GELU", 2, (UNIFORM, "normal:0,1"))
    (found,) = rows
    assert found["steps"] == 2 and list(found["errors"]) == [UNIFORM, "normal:0,1"]
    assert all(0 < error < 1 for error in found["errors"].values())
