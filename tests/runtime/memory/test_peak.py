import torch
from fewbit.runtime.memory.peak import peak_of


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
