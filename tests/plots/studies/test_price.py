"""Weights of noise and bias, from trainings whose gaps follow known ones."""

import numpy as np
import pytest
from fewbit.plots.studies.price import fit, lines


def trainings(noise, bias, scatter=0.0):
    """Rows of five seeds whose losses end above exact by what noise and bias cost."""
    draw = np.random.default_rng(0)
    same = {"network": "n", "activation": "a"}
    rows = [{**same, "seed": seed, "variant": "exact", "bits": 0, "loss": 1.0} for seed in range(5)]
    for bits in (1, 2, 3, 4):
        for variant, of_noise, of_bias in (("table", 0.0, 0.4 / bits), ("random", 0.5 / bits, 0.01)):
            for seed in range(5):
                loss = 1 + noise * of_noise**2 + bias * of_bias**2 + scatter * draw.normal()
                row = {**same, "seed": seed, "variant": variant, "bits": bits}
                rows.append(row | {"loss": loss if bits > 1 else 9.0, "noise": of_noise, "bias": of_bias})
    return rows


def test_weights_are_those_that_made_the_losses_though_a_way_lacks_a_seed():
    found = fit(trainings(0.1, 0.5), "n")
    assert found.noise == pytest.approx(0.1) and found.bias == pytest.approx(0.5)
    assert found.ratio == pytest.approx((5, 5, 5))
    rows = trainings(0.1, 0.5)
    rows = [r for r in rows if not (r["seed"] == 3 and r["bits"] == 2 and r["variant"] == "table")]
    assert fit(rows, "n").bias == pytest.approx(0.5)
    (line,) = lines(trainings(0.1, 0.5))
    assert "bias / noise 5.0, from 5.0 to 5.0" in line


def test_the_interval_holds_the_ratio_where_losses_scatter():
    ratio, low, high = fit(trainings(0.1, 0.5, 3e-4), "n").ratio
    assert low < 5 < high and low < ratio < high and high - low < 5
