"""After sharding: hooks, checkpoints and plans on two processes over gloo; each rank saves its part of a DTensor."""

import pytest
from processes import HAS_FSDP, said_by_two


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each process says, by kind."""
    texts = said_by_two("shards", tmp_path_factory.mktemp("shards"))
    return [{part.partition("\n")[0]: part for part in text.split("kind ")} for text in texts]


@pytest.mark.deep
def test_tensor_parallel(said):
    """The parts of gate, up and their product, 96 of 192 features, are rounded; both ranks have one gradient."""
    one, other = (text["tensor-parallel"] for text in said)
    assert one == other
    assert "exact True" in one and "hooks True" in one and "checkpoint True" in one and "plan True ()" in one, one
    assert "compiled True True" in one, one
    assert "(8, 32, 96)" in one and "192)" not in one


@pytest.mark.deep
def test_a_plan_after_tensor_parallel(said):
    """Both ranks take one plan for the memory of a rank; what could not be carried out is refused in one line."""
    one, other = (text["planned after"] for text in said)
    assert one == other
    assert "plan True True ()" in one and "takes a DTensor: plan before" in one and "leave out compiled=" in one, one


@pytest.mark.deep
def test_pipeline(said):
    """Four microbatches in flight save what the plan of a stage says."""
    for text in said:
        assert "plan True ()" in text["pipeline"], text


@pytest.mark.deep
@pytest.mark.skipif(not HAS_FSDP, reason="FSDP2 of this torch needs a GPU")
def test_shards(said):
    """A plan that was made before fully_shard is one for the model after it."""
    one, other = (text["fsdp"] for text in said)
    assert one == other
    assert "hooks True" in one and "checkpoint True" in one and "plan True ()" in one, one
    assert "compiled True True" in one, one
