"""Mixed precision in two processes: they share out bits together, and the weights stay one."""

import pytest
from processes import said_by_two


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return [text.splitlines() for text in said_by_two("precision", tmp_path_factory.mktemp("bits"))]


def test_the_weights_stay_one(said):
    assert [lines[0] for lines in said] == ["one model"] * 2, said


def test_processes_may_run_the_model_alone_and_have_more_batches(said):
    assert said[0][1] == said[1][1] and said[0][1].startswith("uneven"), said
    assert [lines[2] for lines in said] == ["joined"] * 2


@pytest.mark.parametrize("quantizer", ["groups", "rotated"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_bits_are_those_of_one_process_with_all_samples(kind, quantizer, said):
    bits = [[line.split()[2:] for line in lines if line.startswith(f"{kind} {quantizer}")] for lines in said]
    if kind == "fsdp" and not bits[0]:
        pytest.skip("FSDP2 of this torch does not run on the CPU")
    alone = [line.split()[2:] for line in said[0] if line.startswith(f"alone {quantizer}")]
    assert bits[0] == bits[1]
    assert len({tuple(row) for row in alone}) > (2 if quantizer == "groups" else 1)  # they change
    for found, expected in zip(bits[0], alone, strict=True):
        # Sums of several processes are added in another order: a sample's bit may go to one of equal worth.
        assert [float(x) for x in found] == pytest.approx([float(x) for x in expected], abs=0.1)
