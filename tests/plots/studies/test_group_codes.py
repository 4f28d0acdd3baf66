import json

import pytest
import torch
from fewbit.plots.studies import group_codes
from fewbit.plots.studies.group_codes import BITS, KINDS, dithered


def test_dither_has_no_bias_and_the_error_of_rounding_alone():
    """Whatever the numbers lie between, Δ²/12 of 2^b − 1 levels, where stochastic rounding has up to Δ²/4."""
    x = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) ** 3
    draw = torch.Generator().manual_seed(1)
    errors = torch.stack([dithered(x, draw, bits=3) - x for _ in range(200)])
    step = ((x.amax(1) - x.amin(1)) / 6).square().mean()
    assert errors.mean(0).abs().max() < 0.05
    assert float(errors.square().mean()) == pytest.approx(float(step) / 12, rel=0.05)


@pytest.mark.deep
def test_rotated_codes_err_least_at_few_bits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(group_codes, "MODELS", {"GPT-2": group_codes.MODELS["GPT-2"]})
    monkeypatch.setattr(group_codes.group_levels, "STEPS", 0)
    group_codes.main(["-o", str(tmp_path / "codes.json")])
    text = capsys.readouterr().out
    assert all(f"{bits} bits {kind}" in text for bits in BITS for kind in KINDS)
    rows = json.loads((tmp_path / "codes.json").read_text())["rows"]
    normal = [row for row in rows if row["of"] == "LayerNorm"]
    assert normal and all(row["rotated"][0] < row["dither"][0] / 2 for row in normal)
