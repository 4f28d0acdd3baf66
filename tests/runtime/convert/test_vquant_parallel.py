"""Two processes over gloo: each finds its own threshold in its own activations (V-Quant, Section 4.4)."""

from pathlib import Path

import pytest
from processes import said_by_two

SCRIPT = Path(__file__).parents[2] / "support" / "parallel_outliers.py"


@pytest.mark.deep
def test_the_threshold_is_local(tmp_path):
    for said in said_by_two(SCRIPT, tmp_path / "meeting"):
        assert said.splitlines() == ["local", "large 20", "gradients agree"], said
