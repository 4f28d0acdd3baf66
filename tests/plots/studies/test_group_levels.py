import pytest
import torch
from fewbit.plots.studies import group_levels
from fewbit.plots.studies.group_levels import BITS, NAMES, lines, measure
from torch.nn import functional as F

pytestmark = pytest.mark.deep  # runs a study


@pytest.fixture(scope="module")
def rows():
    return measure("GPT-2", 0)


def test_a_row_for_each_tensor_that_a_layer_saves_a_line_for_each_number_of_bits_and_nothing_left_behind(rows):
    kinds = {(row["kind"], row["of"]) for row in rows}
    assert {("Conv1D", "NewGELUActivation"), ("Conv1D", "LayerNorm"), ("attention", "probabilities")} <= kinds
    assert all(len(row[levels]) == len(BITS) for row in rows for levels in NAMES)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    text = "\n".join(lines(rows))
    assert all(f"{bits} bits fitted" in text for bits in BITS) and f"of {len(rows)} > 1.02" in text


def test_levels_are_good_where_they_are_meant_to_be(rows):
    of = {(row["kind"], row["of"]): row for row in rows}
    after_norm, after_gelu = of["Conv1D", "LayerNorm"], of["Conv1D", "NewGELUActivation"]
    assert max(after_norm["normal"]) < 0.96 and max(after_gelu["skewed"]) < 0.9
    assert min(after_norm["skewed"]) > 1 and min(after_gelu["normal"]) > 1
    assert max(ratio for row in rows for ratio in row["fitted"]) < 1.03


def test_written_as_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(group_levels, "MODELS", {"GPT-2": group_levels.MODELS["GPT-2"]})
    monkeypatch.setattr(group_levels, "STEPS", 0)
    group_levels.main(["-o", str(tmp_path / "levels.json")])
    assert "2 bits fitted" in capsys.readouterr().out and (tmp_path / "levels.json").stat().st_size > 1000
