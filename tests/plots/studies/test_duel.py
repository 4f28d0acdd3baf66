"""Tables beside ActNN's derivatives: a few steps of a small network."""

import json
from dataclasses import replace

import pytest
import torch
from fewbit.plots.studies import duel
from fewbit.runtime.layers.activation import Activation
from torch import nn

pytest.importorskip("sklearn")


def perceptron(activation):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 10)
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What `main` writes of two seeds, the second after it was broken off."""
    path = tmp_path_factory.mktemp("duel") / "duel.json"
    given = ["-o", str(path), "--network", "transformer", "--activation", "GELU", "--bits", "2", "--steps", "12"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duel, "NETWORKS", {"transformer": replace(duel.NETWORKS["ResNet-18"], make=perceptron)})
        duel.main([*given, "--seeds", "1"])
        first = json.loads(path.read_text())["rows"]
        duel.main([*given, "--seeds", "2"])
    rows = json.loads(path.read_text())["rows"]
    assert rows[: len(first)] == first
    return rows


@pytest.mark.deep
def test_every_variant_has_a_row_for_each_seed(rows):
    assert [row["variant"] for row in rows] == 2 * ["exact", *duel.VARIANTS]
    assert len({row["loss"] for row in rows}) == len(rows)


def test_rounding_at_random_has_noise_and_tables_have_bias(rows):
    for row in rows:
        if row["variant"] in ("stochastic", "groups"):
            assert row["noise"] > 0.01 and row["bias"] < 0.5 * row["noise"]
        elif row["variant"] != "exact":
            assert row["noise"] < 1e-6 < 1e-3 < row["bias"]
    bias = {row["variant"]: row["bias"] for row in rows[:5] if row["variant"] != "exact"}
    assert bias["following"] != bias["default"]


def test_lines_compare_with_exact_training(rows):
    lines = list(duel.lines(rows))
    assert len(lines) == len(duel.VARIANTS)
    gaps = [b["loss"] - a["loss"] for a, b in zip(rows[::5], rows[1::5], strict=True)]
    assert f"loss {sum(gaps) / 2:+.4f}" in lines[0] and "of 2" in lines[0] and "default" in lines[0]


def test_groups_are_actnns_activations():
    model = duel.in_groups(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Sequential(nn.SiLU(), nn.Linear(8, 2))), 3)
    assert isinstance(model[1], Activation) and isinstance(model[2][0], Activation)
    model(torch.randn(2, 4)).sum().backward()


def test_the_narrow_resnet_has_eighteen_layers():
    model = duel.NETWORKS["ResNet-18"].make(nn.GELU)
    weighted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([m for m in weighted if getattr(m, "kernel_size", None) != (1, 1)]) == 18
