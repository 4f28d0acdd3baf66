import json

import pytest
from fewbit.plots.demo.runs import Run, Training, smoothed
from fewbit.plots.demo.settings import Settings, Size
from fewbit.tables import FewbitError

RUN = Run("exact", tuple(range(20)), (0.5, 9.0, 0.25), 1.5, 100, 1000)


def test_final_loss_is_the_mean_of_the_last_tenth():
    assert RUN.final_loss == 18.5


def test_final_loss_of_a_single_step_is_its_loss():
    assert Run("exact", (3.0,), (1.0,), 1.5, 1, 1).final_loss == 3.0


def test_time_per_step_is_the_median_so_that_a_slow_first_step_does_not_count():
    assert RUN.step_seconds == 0.5


def test_smoothed_averages_the_losses_so_far():
    assert smoothed([4.0, 2.0, 6.0, 0.0], 2) == [4.0, 3.0, 4.0, 3.0]
    assert smoothed([4.0, 2.0, 6.0], 1) == [4.0, 2.0, 6.0]


def test_every_number_goes_into_json():
    data = json.loads(json.dumps(Training(Settings(steps=20), 3.2, (RUN,)).to_dict()))
    assert data["settings"]["steps"] == 20
    assert data["settings"]["size"]["context"] == 64
    assert data["unigram_entropy"] == 3.2
    (run,) = data["runs"]
    assert run["losses"] == list(range(20))
    assert (run["final_loss"], run["step_seconds"], run["validation_loss"]) == (18.5, 0.5, 1.5)
    assert (run["activation_bytes"], run["saved_bytes"]) == (100, 1000)


def test_what_json_told_is_the_training_again():
    training = Training(Settings(steps=20, size=Size(width=8)), 3.2, (RUN,))
    assert Training.from_dict(json.loads(json.dumps(training.to_dict()))) == training


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -1}, {"seed": -1}, {"seed": 2**63}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(FewbitError, match=next(iter(wrong))):
        Settings(**wrong)
