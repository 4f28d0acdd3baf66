import pytest
from fewbit import FewbitError
from fewbit.runtime.experiments import blpa_memory
from fewbit.runtime.experiments.blpa_memory import largest_batch_by_trial, memory_law, trial_on_gpu


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


def test_the_formula_gives_the_batches_that_the_paper_found_or_more():
    """The paper measured a GPU on which convolutions need room, too."""
    per_sample = {bits: blpa_memory.bytes_per_sample(164, 16, bits) for bits in (None, 8, 4)}
    room = 11 * 2**30
    assert 688 < room / per_sample[None] < 1.4 * 688
    assert 2522 < room / per_sample[4] < 2 * 2522
    assert per_sample[None] / per_sample[4] > 5


@pytest.mark.parametrize("most", [1, 2, 7, 8, 1000])
def test_trial_finds_the_largest(most):
    tried = []

    def step(batch):
        tried.append(batch)
        if batch > most:
            raise MemoryError

    assert largest_batch_by_trial(step, MemoryError) == most
    assert len(tried) < 25


def test_trial_says_when_nothing_fits_and_lets_other_errors_through():
    def step(batch):
        raise MemoryError

    with pytest.raises(FewbitError, match="not even one sample fits"):
        largest_batch_by_trial(step, MemoryError)
    with pytest.raises(MemoryError):
        largest_batch_by_trial(step, ValueError)


def test_without_a_gpu_there_is_no_trial(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(FewbitError, match="there is no GPU"):
        trial_on_gpu(164, 16, 4)
