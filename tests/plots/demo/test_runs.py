import json

import pytest
from fewbit.plots.demo.runs import Run, Training, smoothed
from fewbit.plots.demo.settings import Settings, Size
from fewbit.tables import FewbitError

RUN = Run("exact", tuple(range(20)), (0.5, 9.0, 0.25), 1.5, 100, 1000)


def test_final_loss_is_the_mean_of_the_last_tenth_and_time_the_median():
    """So that a slow first step does not count; of a single step the loss is its own."""
    assert (RUN.final_loss, RUN.step_seconds) == (18.5, 0.5)
    assert Run("exact", (3.0,), (1.0,), 1.5, 1, 1).final_loss == 3.0


def test_smoothed_averages_the_losses_so_far():
    assert smoothed([4.0, 2.0, 6.0, 0.0], 2) == [4.0, 3.0, 4.0, 3.0]
    assert smoothed([4.0, 2.0, 6.0], 1) == [4.0, 2.0, 6.0]


def test_every_number_goes_into_json_and_comes_back():
    training = Training(Settings(steps=20, size=Size(width=8)), 3.2, (RUN,))
    data = json.loads(json.dumps(training.to_dict()))
    assert Training.from_dict(data) == training
    assert (data["settings"]["steps"], data["settings"]["size"]["context"], data["unigram_entropy"]) == (20, 64, 3.2)
    (run,) = data["runs"]
    assert run["losses"] == list(range(20))
    assert (run["final_loss"], run["step_seconds"], run["validation_loss"]) == (18.5, 0.5, 1.5)
    assert (run["activation_bytes"], run["saved_bytes"]) == (100, 1000)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -1}, {"seed": -1}, {"seed": 2**63}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(FewbitError, match=next(iter(wrong))):
        Settings(**wrong)
