import pytest
import torch
from fewbit.plots.demo.data import Corpus, unigram_entropy
from fewbit.plots.demo.settings import Settings, Size
from fewbit.plots.demo.training import EXACT, NUDGED, Variant, few_bit, train
from fewbit.tables import FewbitError

SENTENCE = b"what comes next is easily told, for it has been said before: "
TEXT = torch.frombuffer(bytearray(40 * SENTENCE), dtype=torch.uint8)
CORPUS = Corpus(TEXT[:2000], TEXT[2000:])
SETTINGS = Settings(steps=4, batch=4, size=Size(width=16, depth=2, heads=2, context=12), validation_windows=6)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def training():
    return train([EXACT, few_bit(1), few_bit(3)], CORPUS, SETTINGS)


def test_the_seed_alone_makes_the_losses_not_runs_beside_or_before(training):
    exact = training.runs[0]
    first, second = train([EXACT, Variant("again")], CORPUS, SETTINGS).runs
    assert exact.losses == first.losses == second.losses
    assert exact.validation_loss == first.validation_loss
    assert train([few_bit(3)], CORPUS, SETTINGS).runs[0].losses == training.runs[2].losses
    (other,) = train([EXACT], CORPUS, Settings(**{**vars(SETTINGS), "seed": 1})).runs
    assert other.losses[0] != exact.losses[0]


def test_runs_come_in_order_start_from_the_same_loss_and_then_part(training):
    assert [run.variant for run in training.runs] == ["exact", "1 bit", "3 bits"]
    assert all(len(run.losses) == len(run.seconds) == SETTINGS.steps for run in training.runs)
    exact, *few = training.runs
    for run in few:
        assert run.losses[0] == exact.losses[0]
        assert run.losses[-1] != exact.losses[-1]


def test_a_nudge_is_hardly_seen_in_the_first_loss():
    exact, nudged = train([EXACT, NUDGED], CORPUS, SETTINGS).runs
    assert nudged.losses != exact.losses
    assert nudged.losses[0] == pytest.approx(exact.losses[0], rel=1e-5)
    assert nudged.saved_bytes == exact.saved_bytes


def test_activations_keep_their_input_or_its_bits_and_the_model_saves_just_what_they_save(training):
    elements = SETTINGS.batch * SETTINGS.size.context * 4 * SETTINGS.size.width * SETTINGS.size.depth
    kept = [run.activation_bytes for run in training.runs]
    assert kept == [4 * elements, elements // 8, 3 * elements // 8]
    exact, *few = training.runs
    for run in few:
        assert exact.saved_bytes - run.saved_bytes == exact.activation_bytes - run.activation_bytes


def test_the_model_learns_more_than_the_frequencies_of_characters():
    settings = Settings(**{**vars(SETTINGS), "steps": 100, "batch": 8})
    training = train([EXACT, few_bit(2)], CORPUS, settings)
    assert training.unigram_entropy == unigram_entropy(CORPUS.validation)
    for run in training.runs:
        assert run.final_loss < 0.7 * training.unigram_entropy
        assert run.validation_loss < 0.7 * training.unigram_entropy


def test_every_step_is_reported_once_and_the_callers_random_numbers_are_left_alone():
    reported = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train([EXACT, few_bit(1)], CORPUS, SETTINGS, after_step=lambda: reported.append(1))
    assert torch.equal(torch.rand(3), expected)
    assert len(reported) == SETTINGS.steps


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(FewbitError, match="bits"):
        few_bit(bits)
