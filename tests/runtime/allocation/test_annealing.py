"""Activation annealing: a schedule of bits and ratios, in and out of checkpoints."""

import pytest
import torch
from fewbit import FewbitError
from fewbit.memory import profile
from fewbit.runtime.inference.vquant import ActivationAnnealing, value_aware
from torch import nn

SCHEDULE = [(0, 3, 0.02), (2, 3, 0.01), (4, 2, 0.0)]


def model(bits=3):
    return value_aware(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), bits).model


def present(net):
    relu, linear = net[1].quantizer, net[2].saver.quantizer
    assert (relu.bits, relu.ratio) == (linear.bits, linear.ratio)
    assert relu.relu
    assert not linear.relu
    return relu.bits, relu.ratio


def test_the_phases_follow_one_another():
    net = model()
    annealing = ActivationAnnealing(net, SCHEDULE)
    seen = []
    for _ in range(6):
        seen.append(present(net))
        assert annealing.phase == seen[-1]
        annealing.step()
    assert seen == [(3, 0.02), (3, 0.02), (3, 0.01), (3, 0.01), (2, 0.0), (2, 0.0)]


def test_memory_falls_with_the_schedule():
    net, x = model(), torch.randn(256, 32, requires_grad=True)
    annealing = ActivationAnnealing(net, SCHEDULE)
    totals = []
    for _ in range(6):
        totals.append(profile(net, x).total)
        annealing.step()
    assert totals[0] == totals[1] > totals[2] == totals[3] > totals[4] == totals[5]


def test_full_precision_is_a_phase():
    net, x = model(), torch.randn(256, 32, requires_grad=True)
    annealing = ActivationAnnealing(net, [(0, None, 0), (1, 3, 0.02), (2, None, 0)])
    plain = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    whole = profile(plain, x).total
    kept = []
    for _ in range(3):
        kept.append(profile(net, x).total == whole)
        annealing.step()
    assert kept == [True, False, True]


def test_a_checkpoint_goes_on_where_it_was():
    annealing = ActivationAnnealing(model(), SCHEDULE)
    for _ in range(4):
        annealing.step()
    net = model()
    other = ActivationAnnealing(net, [(0, 8, 0)])
    other.load_state_dict(annealing.state_dict())
    assert present(net) == (2, 0.0)
    assert other.state_dict() == annealing.state_dict()
    assert other.schedule == annealing.schedule


def test_its_state_is_saved_by_torch(tmp_path):
    annealing = ActivationAnnealing(model(), SCHEDULE)
    annealing.step()
    torch.save(annealing.state_dict(), tmp_path / "checkpoint.pt")
    other = ActivationAnnealing(model(), SCHEDULE)
    other.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert other.last_epoch == 1


@pytest.mark.parametrize(
    "schedule",
    [[], [(1, 3, 0.02)], [(0, 3, 0.02), (0, 2, 0.0)], [(0, 3)], 3, [(0, 9, 0.0)], [(0, 3, 2.0)], [(0, 1, 0.0)]],
)
def test_a_schedule_is_checked(schedule):
    with pytest.raises(FewbitError):
        ActivationAnnealing(model(), schedule)


@pytest.mark.parametrize("state", [{}, {"schedule": SCHEDULE}, 3, {"schedule": 3, "last_epoch": 1}])
def test_a_state_is_checked(state):
    net = model()
    annealing = ActivationAnnealing(net, SCHEDULE)
    with pytest.raises(FewbitError):
        annealing.load_state_dict(state)
    assert present(net) == (3, 0.02)


def test_a_model_of_torch_has_nothing_to_anneal():
    with pytest.raises(FewbitError, match="outliers"):
        ActivationAnnealing(nn.Linear(3, 3), SCHEDULE)
