"""Two processes on one machine, over gloo: their gradients are those of one process; V-Quant's thresholds are local."""

import pytest
from processes import HAS_FSDP, said_by_two

KINDS = ["ddp", "ddp-checkpointed", "ddp-compiled", "ddp of gated MLPs"]


@pytest.mark.parametrize(
    "names",
    [
        ["L2", "L3", "L4"],
        pytest.param(KINDS, marks=pytest.mark.deep),
        pytest.param(
            ["fsdp", "fsdp of gated MLPs"],
            marks=[pytest.mark.deep, pytest.mark.skipif(not HAS_FSDP, reason="no FSDP2 on the CPU")],
        ),
    ],
    ids=["levels", "ddp", "fsdp"],
)
def test_gradients_are_those_of_one_process_or_the_mean_over_both(names, tmp_path):
    for text in said_by_two("training", tmp_path, *names):
        assert all(f"done {name}\n" in text for name in names), text


@pytest.mark.deep
def test_v_quants_threshold_is_local(tmp_path):
    """Each finds its own in its own activations (V-Quant, Section 4.4)."""
    for said in said_by_two("outliers", tmp_path):
        assert said.splitlines() == ["local", "large 20", "gradients agree"], said
