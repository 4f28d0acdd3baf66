import pytest
from fewbit import FewbitError
from fewbit.plots.studies import blpa_memory
from fewbit.plots.studies.blpa_memory import largest_batch_by_trial, memory_law, trial_on_gpu

pytestmark = pytest.mark.deep  # runs a study


@pytest.fixture(scope="module")
def law():
    return memory_law([2, 4, 8])


@pytest.mark.parametrize("what", ["saved", "peak"])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_slope_is_α_within_two_percent(law, bits, what):
    assert law.slope(bits, what) / law.slope(None, what) == pytest.approx(bits / 32, rel=0.02)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_rest_is_a_few_activations_whatever_the_depth(law, bits):
    """W + 1 = 3, and what the head and its loss take."""
    assert 2 <= law.fixed(bits, "peak") <= 4.2


@pytest.fixture(scope="module")
def table_2():
    return {(row.depth, row.width): row for row in blpa_memory.largest_batches(11 * 2**30)}


@pytest.mark.parametrize("network", blpa_memory.TABLE_2)
def test_the_formula_gives_larger_batches_than_the_paper_found(table_2, network):
    """By up to 1.3 times exact and 2.0 times with 4 bits: it counts no more than activations and parameters."""
    row = table_2[network]
    assert 1.1 < row.exact / row.paper_exact < 1.3
    assert 1.25 < row.few / row.paper_few < 2.0
    assert row.few / row.exact > 5
    assert 11 < row.buffers_few < 16  # full activations an image; the formula has 3
    assert row.buffers_exact > row.buffers_few


def test_every_row_of_the_papers_table_is_there(table_2):
    assert [network[0] for network in table_2] == [1001, 1001, 488, 254, 164]
    row = table_2[164, 16]
    assert (row.exact, row.few, row.paper_exact, row.paper_few) == (880, 4993, 688, 2522)


@pytest.mark.parametrize("most", [1, 2, 7, 8, 1000])
def test_trial_finds_the_largest(most):
    tried = []

    def step(batch):
        tried.append(batch)
        if batch > most:
            raise MemoryError

    assert largest_batch_by_trial(step, MemoryError) == most
    assert len(tried) < 25


def test_trial_says_when_nothing_fits_or_there_is_no_gpu_and_lets_other_errors_through(monkeypatch):
    def step(batch):
        raise MemoryError

    with pytest.raises(FewbitError, match="not even one sample fits"):
        largest_batch_by_trial(step, MemoryError)
    with pytest.raises(MemoryError):
        largest_batch_by_trial(step, ValueError)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(FewbitError, match="there is no GPU"):
        trial_on_gpu(164, 16, 4)
