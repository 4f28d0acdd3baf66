import pytest
import torch
from fewbit.runtime.backends import host_memory
from runtime_cases import DENSE, NOT_DENSE, laid_out

HUGE = 1 << 21


@pytest.fixture
def advised(monkeypatch):
    """Every call of madvise, which is recorded and not made."""
    calls = []
    monkeypatch.setattr(host_memory, "_madvise", lambda *arguments: calls.append(arguments))
    return calls


def test_only_large_tensors_are_large(advised):
    assert host_memory.is_large(torch.empty(32 << 20, dtype=torch.uint8, device="meta"))
    assert not host_memory.is_large(torch.empty((32 << 20) - 1, dtype=torch.uint8, device="meta"))
    host_memory.empty_like(torch.empty(1000))
    assert advised == []


def test_advice_covers_whole_huge_pages_inside_the_tensor(advised):
    x = host_memory.empty_like(torch.empty(10 << 20))
    ((start, length, advice),) = advised
    assert start % HUGE == length % HUGE == 0
    assert x.data_ptr() <= start < x.data_ptr() + HUGE
    assert x.data_ptr() + (40 << 20) - HUGE < start + length <= x.data_ptr() + (40 << 20)
    assert advice == 14


def test_large_memory_can_be_written_where_the_system_has_no_madvise(monkeypatch):
    monkeypatch.setattr(host_memory, "_madvise", None)
    x = torch.zeros(9 << 20)
    assert not host_memory.is_large(x)
    assert host_memory.empty_like(x).fill_(1).sum() == 9 << 20


def test_large_memory_can_be_written():
    assert host_memory.empty_like(torch.zeros(9 << 20)).fill_(1).sum() == 9 << 20


@pytest.mark.parametrize("layout", DENSE | NOT_DENSE)
def test_layout_and_dtype_are_torch_s(layout, monkeypatch, advised):
    monkeypatch.setattr(host_memory, "_LEAST_BYTES", 0)
    x = laid_out(layout, torch.float16)
    y = host_memory.empty_like(x)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, torch.relu(x).stride(), x.dtype)
    assert len(advised) == 1
