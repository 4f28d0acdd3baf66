"""Noise and bias of a compiled step's gradient, a role at a time."""

import json
from pathlib import Path

import fewbit
import pytest
import torch
from fewbit.plots.studies import roles

ROOT = Path(fewbit.__file__).resolve().parent


def test_the_page_on_numerics_has_what_was_measured():
    rows = json.loads((ROOT / "plots" / "results" / "roles.json").read_text())["rows"]
    page = (ROOT / "docs" / "numerics.md").read_text()
    assert f"<!-- [start:roles] -->\n\n{roles.table(rows)}\n\n<!-- [end:roles] -->" in page
    linear = [row for row in rows if row["role"] in ("linear", "probabilities")]
    assert linear and not any(row["bias"] for row in linear)


def test_noise_is_that_of_a_draw_and_bias_that_of_the_mean():
    draw = torch.Generator().manual_seed(0)
    exact = torch.randn(100_000, generator=draw, dtype=torch.float64)
    noisy = [exact + 0.1 * torch.randn(exact.shape, generator=draw, dtype=torch.float64) for _ in range(16)]
    noise, bias = roles._noise_and_bias(noisy, exact)
    assert noise == pytest.approx(0.1, rel=0.02) and bias == 0
    noise, bias = roles._noise_and_bias([x + 0.05 * exact for x in noisy], exact)
    assert noise == pytest.approx(0.1, rel=0.02) and bias == pytest.approx(0.05, rel=0.05)
