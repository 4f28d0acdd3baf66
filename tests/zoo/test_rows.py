"""A handful of the zoo's rows, and that its rules see what they are for; `make zoo` measures all rows."""

import math
from dataclasses import replace

import pytest
import torch

from .__main__ import write
from .measure import Row, compared, converted, evaluated, fresh, gradient_fields, prepared, row, run
from .methods import METHODS, OTHER_SUMS, WIDE_METHODS
from .models import MODELS
from .rules import LARGEST_ERRORS, REASONS, across, violations
from .wide import WIDE

pytest.importorskip("transformers")

ROWS = [
    *(("gpt2", "exact"), ("gpt2", "3 bits"), ("llama", "L2"), ("llama", "glu=parts"), ("qwen3", "L2")),
    *(("resnet", "L2"), ("resnet", "outliers=0.02"), ("vit", "L2 + hooks")),
]
# Of the wide zoo: ops in place on the outputs of layers, layers in several calls, and a scatter among them.
WIDE_ROWS = [("deberta", "L2"), ("graph network", "hooks"), ("u-net", "L2"), ("recurrent", "3 bits")]
SOUND = Row("llama", "L2", evaluation=True, training=True, masks=True, state=True, weights=0.1, inputs=0.1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "method"), ROWS + WIDE_ROWS, ids=[" ".join(key) for key in ROWS + WIDE_ROWS])
def test_row_breaks_no_rule(model, method):
    assert violations(row(model, method)) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("key", REASONS, ids=" ".join)
def test_reason_for_an_error_is_one(key):
    """Without what it names, the rule holds."""
    model, method = key
    case = REASONS[key].without(WIDE[model].build(0.0))
    evaluated(case)
    near = prepared(fresh(case), WIDE_METHODS[method])
    converted(near, WIDE_METHODS[method])
    fields = gradient_fields(run(near, WIDE_METHODS[method].around), run(fresh(case)))
    assert max(fields["weights"], fields["inputs"]) <= LARGEST_ERRORS[method] < REASONS[key].most


def test_a_plan_with_the_loss_in_chunks_may_sum_in_another_order():
    """As docs/planning/how.md says; every other plan's outputs are exact's bit for bit."""
    near, far = torch.tensor([1.0 + 1e-6]), torch.tensor([1.1])
    model = torch.nn.Linear(1, 1)
    for chunks in (False, True):
        vars(model)[OTHER_SUMS] = chunks
        alike = compared(WIDE_METHODS["plan"], model)
        assert alike((near,), (torch.ones(1),)) == chunks and not alike((far,), (torch.ones(1),))


def test_there_are_forty_models_of_transformers_alone():
    assert sum(model.source == "transformers" for model in MODELS.values()) >= 40


def test_the_wide_zoo_has_more_than_120_types_that_the_other_has_not():
    kinds = {name.replace(" ", "-") for name, model in WIDE.items() if model.source == "transformers"}
    assert len(kinds) > 120 and not kinds & set(MODELS)


def test_sound_row_breaks_no_rule():
    assert violations(SOUND) == []


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        *(({"evaluation": False}, "forward"), ({"training": False}, "forward"), ({"masks": False}, "masks")),
        *(({"state": False}, "generator"), ({"kept_bytes": 2, "exact_bytes": 1}, "bytes")),
        *(({"weights": 0.26}, "gradient"), ({"inputs": 0.26}, "gradient")),
        *(({"method": "hooks", "weights": math.nan}, "gradient"), ({"method": "exact", "weights": 1e-9}, "gradient")),
        *(({"reverted": "outputs differ"}, "revert"), ({"state_dict": "keys differ"}, "state_dict")),
        *(({"copied": "its outputs differ"}, "deepcopy"), ({"pickled": "its outputs differ"}, "pickle")),
        *(({"silent": "glu"}, "silent"), ({"failure": "RuntimeError: no"}, "failure")),
    ],
)
def test_each_fault_breaks_its_rule(fault, rule):
    assert [text.partition(":")[0] for text in violations(replace(SOUND, **fault))] == [rule]


def test_l4_that_differs_from_l3_breaks_a_rule():
    at_l3, at_l4 = replace(SOUND, method="L3", digest="a"), replace(SOUND, method="L4", digest="b", kept_bytes=1)
    assert list(across([at_l3, at_l4])) == [("llama", "L4")]
    assert across([at_l3, replace(at_l3, method="L4")]) == {}


def test_every_method_that_must_equal_another_names_one():
    assert all(method.same_as in METHODS for method in METHODS.values() if method.same_as)


def test_writing_rows_keeps_what_stands_above_them(tmp_path):
    (tmp_path / "zoo.md").write_text("# The zoo\n\nAgainst us: this.\n\n## The rows\n\nof another day\n")
    write(tmp_path, [SOUND], {})
    page = (tmp_path / "zoo.md").read_text()
    assert page.startswith("# The zoo\n\nAgainst us: this.\n\n## The rows\n\n`make zoo`, with ")
    assert "| llama | " in page and "another day" not in page
