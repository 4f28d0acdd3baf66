import threading

import pytest
import torch
from fewbit.runtime.memory.peak import peak_of
from fewbit.runtime.tensors import host_memory
from runtime_cases import DENSE, SETTLED, laid_out
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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


@pytest.mark.parametrize("layout", SETTLED)
def test_layout_and_dtype_are_torch_s(layout, monkeypatch, advised):
    monkeypatch.setattr(host_memory, "_LEAST_BYTES", 0)
    x = laid_out(layout, torch.float16)
    y = host_memory.empty_like(x)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, torch.relu(x).stride(), x.dtype)
    assert len(advised) == 1


class TestReused:
    """Memory for passing results."""

    @pytest.fixture(autouse=True)
    def nothing_kept(self, monkeypatch):
        monkeypatch.setattr(host_memory, "_kept", [])
        monkeypatch.setattr(host_memory, "_LEAST_BYTES", 1 << 20)

    @staticmethod
    def new(mib=4, value=1.0):
        return host_memory.reused(torch.Size([mib << 18]), (1,), torch.float32).fill_(value)

    def test_what_is_gone_makes_room_for_the_next(self):
        x = self.new()
        place = x.data_ptr()
        del x
        y = self.new(value=2.0)
        assert y.data_ptr() == place
        assert (y == 2).all()

    def test_what_is_held_stays_as_it_is(self):
        x = self.new(value=1.0)
        part = self.new(value=2.0)[5:9]
        array = self.new(value=3.0).numpy()
        others = [self.new(value=4.0) for _ in range(3)]
        assert (x == 1).all()
        assert (part == 2).all()
        assert (array == 3).all()
        assert all((other == 4).all() for other in others)

    def test_one_block_at_most_is_kept(self):
        held = [self.new() for _ in range(3)]
        place = held[-1].data_ptr()
        del held[:]
        (block,) = host_memory._kept
        assert block.size < 8 << 20
        assert place  # the three had been there

    @pytest.mark.parametrize(("first", "second", "again"), [(8, 8, True), (8, 5, True), (8, 2, False), (8, 16, False)])
    def test_no_block_is_wasted_on_a_small_tensor(self, first, second, again):
        x = self.new(first)
        start, end = x.data_ptr(), x.data_ptr() + x.nbytes
        del x
        kept = host_memory._kept[0]
        y = self.new(second)
        assert (not host_memory._kept) and start < end
        lies_inside = kept.ctypes.data <= y.data_ptr() < kept.ctypes.data + kept.size
        assert lies_inside == again
        assert y.untyped_storage().nbytes() == y.nbytes == second << 20

    def test_the_system_may_have_it_meanwhile(self, advised):
        x = self.new()
        del x
        assert [advice for _, _, advice in advised] == [14, 8]
        self.new()
        assert [advice for _, _, advice in advised] == [14, 8, 8]

    @pytest.mark.parametrize("layout", DENSE)
    def test_layout_and_dtype_are_torch_s(self, layout, monkeypatch):
        monkeypatch.setattr(host_memory, "_LEAST_BYTES", 0)
        x = laid_out(layout, torch.float16)
        y = host_memory.reused(x.shape, x.stride(), x.dtype)
        assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
        assert torch.equal(y.copy_(x).nan_to_num(), x.nan_to_num())

    def test_is_counted_where_memory_is(self):
        assert peak_of(lambda: self.new(4)) == 4 << 20
        assert peak_of(lambda: (self.new(4), self.new(4))) == 8 << 20

    def test_fake_tensors_take_nothing(self):
        with FakeTensorMode():
            assert isinstance(self.new(), FakeTensor)

    def test_another_thread_may_be_the_last_to_hold_it(self):
        held = [self.new()]
        place = held[0].data_ptr()
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert self.new().data_ptr() == place

    def test_a_graph_gives_it_back(self):
        x = torch.ones(1 << 20, requires_grad=True)
        factor = self.new(value=2.0)
        place = factor.data_ptr()
        y = (x * factor).sum()
        del factor
        assert self.new(value=3.0).data_ptr() != place
        host_memory._kept.clear()
        y.backward()
        assert (x.grad == 2).all()
        assert self.new().data_ptr() == place
