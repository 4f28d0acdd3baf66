import pytest
import torch
from fewbit.plots.studies import actnn
from fewbit.plots.studies.actnn_runs import Evidence, Trained
from fewbit.tables import FewbitError

TASKS = {name: make() for name, make in actnn.TASKS.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TASKS)
def test_runs_of_a_seed_begin_alike_and_learn(name):
    chosen = (actnn.VARIANTS[0], actnn.VARIANTS[1], actnn.VARIANTS[3])
    task, before = TASKS[name], torch.get_rng_state()
    runs = actnn.train(task, chosen, seed=0, steps=6)
    torch.set_rng_state(before)
    assert [run.variant for run in runs] == [variant.name for variant in chosen]
    if name == "resnet":  # the transformer has dropout, and codes are drawn from the generator that drops
        assert len({run.losses[0] for run in runs}) == 1
    for run in runs:
        assert run.losses[-1] < run.losses[0]
        assert len(run.losses) == len(run.seconds) == 6
        assert 0 <= run.accuracy <= 1
    assert runs[0].saved_bytes > 4 * runs[1].saved_bytes > 4 * runs[2].saved_bytes


@pytest.mark.deep
def test_a_block_keeps_what_the_paper_says():
    """64 bits to 5.25 (Section 6.2) is 12.19; channels' statistics and a byte a sample and layer cost 1 % at most."""
    assert actnn.block_ratio(2, "L2") == pytest.approx(64 / 5.25, rel=0.01)
    assert actnn.block_ratio(2) == pytest.approx(64 / 5.25, rel=0.01)
    assert actnn.block_ratio(2) > 12


class TestEvidence:
    def evidence(self):
        def one(variant, seed, loss, kept):
            return Trained("t", variant, seed, (2.0, loss), (0.5, 1.0), loss, 0.5, kept)

        runs = (one("exact", 1, 1.0, 96), one("L2", 1, 1.25, 8), one("exact", 0, 2.0, 96), one("L2", 0, 1.5, 8))
        return Evidence(runs, {"2": 12.0})

    def test_compares_runs_of_a_seed_and_survives_json(self):
        found = self.evidence()
        assert found.differences("t", "L2") == [-0.5, 0.25]
        assert found.ratio("t", "L2") == 12
        assert found.step_seconds("t", "L2") == 0.75
        assert Evidence.from_dict(found.to_dict()) == found

    @pytest.mark.parametrize("data", [{}, [], {"runs": [{}], "block_ratios": {}, "versions": {}}])
    def test_refuses_what_is_none(self, data):
        with pytest.raises(FewbitError, match="file: not what"):
            Evidence.from_dict(data, "file")
