import pytest
import torch
from fewbit.plots.demo.trainer import Curve, Trainee, cross_entropy, learning_rate_factor, train
from torch import nn


def trainee(weight=1.0, **options):
    """A model w·x of one weight, whose loss is its output: the gradient is x."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return Trainee(model, lambda model, batch: model(batch).sum(), optimizer, **options)


def batches(*values):
    return [torch.tensor([[value]]) for value in values]


def test_every_batch_is_a_step_whose_loss_is_that_before_it():
    curve = Curve()
    one = trainee(record=curve)
    train([one], batches(2.0, 4.0))
    assert curve.losses == [2.0, 0.0]  # the weight is 1, then 1 - 0.5·2
    assert one.model.weight.item() == -2.0
    assert len(curve.seconds) == 2 and min(curve.seconds) > 0
    assert one.model.weight.grad is None


def test_models_take_turns_and_another_begins_each_time():
    order = []
    several = [trainee(before_step=lambda step, i=i: order.append((step, i))) for i in range(3)]
    train(several, iter(batches(1.0, 1.0)), lambda: order.append("done"))
    assert order == [(0, 0), (0, 1), (0, 2), "done", (1, 1), (1, 2), (1, 0), "done"]


def test_a_gradient_is_cut_where_it_is_longer():
    one = trainee(largest_gradient=1.0)
    train([one], batches(0.5, 8.0))
    assert one.model.weight.item() == pytest.approx(1 - 0.5 * 0.5 - 0.5)


def test_the_schedule_moves_on_after_each_step():
    one = trainee()
    schedule = torch.optim.lr_scheduler.StepLR(one.optimizer, 1, 0.5)
    train([Trainee(one.model, one.loss, one.optimizer, schedule)], batches(1.0, 1.0))
    assert one.model.weight.item() == 1 - 0.5 - 0.25


def test_the_classes_of_a_batch_are_told_from_its_inputs():
    classes = torch.tensor([0, 1])
    assert cross_entropy(nn.Identity(), (torch.zeros(2, 4), classes)).item() == pytest.approx(torch.tensor(4.0).log())


@pytest.mark.parametrize("steps", [1, 3, 40, 1000])
def test_the_learning_rate_rises_then_falls_and_is_never_zero(steps):
    factors = [learning_rate_factor(step, steps) for step in range(steps)]
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert min(factors) > 0
    assert max(factors) <= 1
