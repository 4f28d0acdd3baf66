"""Two processes over gloo: DDP and FSDP2 of gated MLPs."""

from pathlib import Path

import pytest
import torch
from processes import said_by_two

SCRIPT = Path(__file__).parents[2] / "support" / "parallel_glu.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What two processes that train together say."""
    return said_by_two(SCRIPT, tmp_path_factory.mktemp("parallel") / "meeting")


FSDP = pytest.param(
    "fsdp",
    marks=pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch does not run on the CPU"
    ),
)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["ddp", FSDP])
def test_gradients_are_those_of_one_process(kind, said):
    for text in said:
        assert f"done {kind}\n" in text, text
