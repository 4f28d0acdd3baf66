"""The stream of keys in a GPU's memory, its kernels built by g++: the keys of the CPU's stream, wherever it goes."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from driver_double import in_place_of_the_driver
from fewbit.runtime import ops
from fewbit.runtime.backends.cuda import keys
from fewbit.runtime.tensors.key_stream import KeyStream
from host_kernels import needs_gxx, start_keys

pytestmark = needs_gxx


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU that runs these kernels; `gpu.seed` is that of torch's generator there."""
    driver = in_place_of_the_driver(monkeypatch)
    driver.seed = 7

    def launch(stream, config, kernel, *arguments):
        if kernel[1] in ("draw", "move"):
            start_keys(kernel[1], *arguments)

    monkeypatch.setattr(driver, "launch", launch)
    generator = SimpleNamespace(initial_seed=lambda: driver.seed)
    monkeypatch.setattr(torch.cuda, "default_generators", {-1: generator})
    return driver


def drawn(count=3):
    return keys.draw(torch.zeros(8), count).tolist()


def expected(seed, begin, count=3):
    stream = KeyStream()
    torch.default_generator.manual_seed(seed)
    stream.go_to((torch.default_generator.initial_seed(), begin))
    return [stream.next() for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 11, 2**64 - 1])
def test_the_keys_are_those_of_the_cpu(gpu, seed):
    gpu.seed = seed
    assert [*drawn(), *drawn(2)] == expected(seed, 0, 5)


def test_a_seed_starts_its_stream_again(gpu):
    first = drawn()
    assert drawn() != first
    keys._restart([-1])  # as torch.cuda.manual_seed does
    assert drawn() == first
    gpu.seed = 8  # of the generator's own method
    assert drawn() == expected(8, 0)


def test_a_replay_goes_on_and_states_return(gpu):
    """What a graph draws the host does not see: a state that is restored leaves it drawn."""
    stream = keys.stream_of(-1)
    drawn()
    place = stream.place
    assert place == (7, 3)
    assert drawn() == expected(7, 3)
    seeds = torch.zeros(4, dtype=torch.int64)
    start_keys("draw", seeds.data_ptr(), 4)  # a replay
    assert seeds.tolist() == expected(7, 6, 4)
    stream.go_to(place)
    assert drawn() == expected(7, 3 + 4)
    stream.go_to((9, 5))
    gpu.seed = 9
    assert drawn() == expected(9, 5)


def test_the_seeds_and_states_of_torch_move_it(gpu, monkeypatch):
    def state_of_torch(device):
        return torch.zeros(16, dtype=torch.uint8)

    stand_ins = {
        "manual_seed": lambda seed: setattr(gpu, "seed", seed),
        "manual_seed_all": lambda seed: setattr(gpu, "seed", seed),
        "get_rng_state": state_of_torch,
        "set_rng_state": lambda state, device: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda.random, name, stand_in)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    gpu.device = -1
    keys._accompany_torch()
    first = drawn()
    state = torch.cuda.get_rng_state(-1)
    assert drawn() == expected(7, 3)
    torch.cuda.set_rng_state(pickle.loads(pickle.dumps(state)), -1)
    assert drawn() == expected(7, 3)
    for seed_by in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.cuda.random.manual_seed_all):
        seed_by(7)
        assert drawn() == first


def test_a_capture_draws_from_where_the_stream_is(gpu):
    drawn()
    gpu.capturing, gpu.seed = True, 8  # the generator may not be asked then
    assert drawn() == expected(7, 3)


def test_ops_take_seeds_from_the_gpu_s_memory(monkeypatch):
    """Where kernels of plain torch do, too: by the key that lies there, without reading it."""
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    seeds = torch.tensor([3, 2**62 + 1])
    by_number = [
        *ops.per_group_quantize(x, 2, 96, seeds[1:]),
        *ops.rotated_quantize(x, seeds[1:], 2, 128, 2, True),
        *ops.copy_in_groups(x, seeds[1:], 4),
    ]
    from fewbit.runtime.backends.reference import glu, per_group, rotated

    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    by_place = [
        *per_group.quantize(x, 2, 96, seeds[1]),
        *rotated.quantize(x, 2, 128, 2, True, seeds[1]),
        *glu.copy(x, 4, seeds[1]),
    ]
    assert all(map(torch.equal, by_number, by_place))
