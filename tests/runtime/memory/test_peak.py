import pytest
import torch
from fewbit.runtime.memory.peak import peak_of
from fewbit.runtime.plan import memory
from torch import nn


def test_what_lives_at_once_counts():
    assert peak_of(lambda: torch.zeros(1000)) == 4000
    assert peak_of(lambda: [torch.zeros(1000) for _ in range(5)]) == 20_000
    assert peak_of(lambda: [torch.zeros(1000).sum() for _ in range(5)]) == 4000 + 5 * 4


def test_what_was_there_before_does_not():
    x = torch.zeros(1000)
    assert peak_of(lambda: x.add_(1)) == 0
    assert peak_of(lambda: x[10:]) == 0


def test_backward_counts():
    x = torch.zeros(1000, requires_grad=True)
    assert peak_of(lambda: (x * 2).sum().backward()) >= 4000


def network():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_most_of_a_timeline_is_the_peak(device):
    model, x = network().to(device), torch.zeros(16, 32, device=device)
    timeline = memory.timeline_of_step(model, x)
    assert timeline.peak == memory.peak_of_step(model, x)
    assert timeline.levels.max() == timeline.peak.bytes


def test_the_forward_pass_grows_by_what_it_makes():
    timeline = memory.timeline_of_step(network(), torch.zeros(16, 32))
    outputs = [16 * 64 * 4, 2 * 16 * 64 * 4, 2 * 16 * 64 * 4 + 16 * 8 * 4]
    assert timeline.levels[: timeline.backward].tolist() == outputs


def test_marks_are_in_the_order_of_the_step():
    timeline = memory.timeline_of_step(network(), torch.zeros(16, 32))
    marks = [(mark.module, mark.event) for mark in timeline.marks]
    assert marks[:3] == [("", "enter"), ("0", "enter"), ("0", "leave")]
    assert [module for module, event in marks if event == "backward" and module] == ["2", "1", "0"]
    moments = [mark.moment for mark in timeline.marks]
    assert moments == sorted(moments) and moments[-1] <= len(timeline.levels)


def test_a_step_leaves_no_hooks_and_no_gradients():
    model = network()
    memory.timeline_of_step(model, torch.zeros(16, 32))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_gradients_has_a_forward_pass_alone():
    model = network().requires_grad_(False)
    timeline = memory.timeline_of_step(model, torch.zeros(16, 32))
    assert all(mark.event != "backward" for mark in timeline.marks)
    assert timeline.levels.max() == timeline.peak.bytes


def test_a_comparison_has_timelines_where_they_are_asked_for():
    model, x = network(), torch.zeros(16, 32)
    plain, timed = memory.compare(model, x), memory.compare(model, x, timeline=True)
    assert plain == timed and plain.timeline_before is None
    assert timed.timeline_before.peak == timed.peak_before
    assert timed.timeline_after.peak == timed.peak_after
