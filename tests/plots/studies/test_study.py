import json
from dataclasses import replace

import pytest
from fewbit.plots.demo.runs import Run, Training
from fewbit.plots.demo.settings import Settings
from fewbit.plots.studies.study import Study
from fewbit.tables import FewbitError


def run(variant, losses, validation_loss):
    return Run(variant, tuple(losses), (0.1,) * len(losses), validation_loss, 10, 100)


def study(*seeds):
    """A study of two variants from ((exact losses, validation), (few-bit losses, validation)) of each seed."""
    trainings = [
        Training(Settings(steps=3, seed=seed), 3.0, (run("exact", *exact), run("1 bit", *few)))
        for seed, (exact, few) in enumerate(seeds)
    ]
    return Study("gpt2", tuple(trainings))


def compare(*seeds):
    (comparison,) = study(*seeds).comparisons()
    return comparison


INSIDE = (((4, 3, 1), 1.0), ((4, 3.5, 1.5), 1.25)), (((4.5, 4, 2), 2.0), ((4.5, 3.5, 1.5), 1.75))


def test_a_mean_between_lowest_and_highest_is_inside():
    comparison = compare(*INSIDE)
    assert comparison.outside == (0, 0, 0)
    assert comparison.validation_differences == (0.25, -0.25)
    assert (comparison.gap.mean, comparison.gap.count) == (0, 2)


@pytest.mark.parametrize(
    ("losses", "outside"),
    [((4, 3, 2.5), (0, 0, 0.5)), ((4, 3, 0.5), (0, 0, 0.5)), ((3, 5, 1.5), (1, 1, 0)), ((4, 4, 2), (0, 0, 0))],
)
def test_a_mean_beyond_them_is_outside_by_its_distance(losses, outside):
    comparison = compare(*(((exact), (losses, validation)) for exact, (_, validation) in INSIDE))
    assert comparison.outside == outside
    assert comparison.steps_outside == sum(distance > 0 for distance in outside)
    assert comparison.farthest_outside == max(outside)


def test_losses_are_averaged_over_a_tenth_of_the_steps():
    losses = [float(loss) for loss in range(20)]
    training = Training(Settings(steps=20), 3.0, (run("exact", losses, 1.0),))
    (curve,) = Study("small", (training,)).curves("exact")
    assert curve == [0.0, *(loss - 0.5 for loss in losses[1:])]


def test_one_seed_has_no_spread():
    one = study(INSIDE[0])
    with pytest.raises(FewbitError, match="one seed"):
        one.comparisons()
    assert one.to_dict()["comparisons"] == []  # what is written before the second seed is done


def test_what_json_told_is_the_study_again():
    whole = study(*INSIDE)
    loaded = json.loads(json.dumps(whole.to_dict()))
    assert Study.from_dict(loaded) == whole
    (comparison,) = loaded["comparisons"]
    assert (comparison["variant"], comparison["steps_outside"], comparison["verdict"]) == ("1 bit", 0, "undecided")


@pytest.mark.parametrize(
    "wrong", [3, [], {}, {"model": "gpt2", "versions": {}, "trainings": [{}]}, {"trainings": None}], ids=str
)
def test_other_json_is_refused_in_one_line(wrong):
    with pytest.raises(FewbitError, match=r"^file\.json: not what `fewbit plot training` writes$"):
        Study.from_dict(wrong, "file.json")


def test_trainings_must_be_of_the_same_variants():
    first, second = study(*INSIDE).trainings
    for trainings in [(), (first, replace(second, runs=second.runs[:1])), (replace(first, runs=()),)]:
        with pytest.raises(FewbitError, match="same variants"):
            Study("gpt2", trainings)
