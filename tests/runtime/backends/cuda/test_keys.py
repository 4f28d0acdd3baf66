"""The stream of keys in a GPU's memory, its kernels built by g++: the keys of the CPU's stream, wherever it goes."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from driver_double import in_place_of_the_driver
from fewbit import FewbitError
from fewbit.runtime import ops
from fewbit.runtime.backends.cuda import keys
from fewbit.runtime.backends.cuda.codegen.keys import keys_source
from fewbit.runtime.tensors.philox import KeyStream
from host_kernels import needs_gxx, start_keys

pytestmark = needs_gxx


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU that runs these kernels; `gpu.seed` is that of torch's generator there."""
    driver = in_place_of_the_driver(monkeypatch)
    driver.seed = 7

    def launch(stream, config, kernel, *arguments):
        if kernel[1] in ("draw", "move"):
            driver.log.append((driver.streams[-1], kernel[1]))
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


def test_a_generator_that_goes_to_another_seed_and_back_draws_no_key_twice(gpu):
    """As Megatron's tracker moves it in each layer, by its own set_state; each time its keys came again."""
    for layer in range(3):
        for seed in (7, 8):
            gpu.seed = seed
            assert keys.stream_of(-1).place == (seed, 3 * layer)
            assert drawn() == expected(seed, 3 * layer)
    gpu.seed = 7
    keys._restart([-1])  # as torch.cuda.manual_seed does
    assert drawn() == expected(7, 0)
    gpu.seed = 8
    assert drawn() == expected(8, 9)


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
    before = torch.cuda.get_rng_state(-1)  # as a checkpoint does before anything was rounded
    torch.cuda.set_rng_state(before, -1)
    assert not gpu.log  # nothing is compiled or launched until something is
    first = drawn()
    torch.cuda.set_rng_state(before, -1)
    assert drawn() == first
    state = torch.cuda.get_rng_state(-1)
    assert drawn() == expected(7, 3)
    torch.cuda.set_rng_state(pickle.loads(pickle.dumps(state)), -1)
    assert drawn() == expected(7, 3)
    for seed_by in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.cuda.random.manual_seed_all):
        seed_by(7)
        assert drawn() == first
    # A forked process, such as a DataLoader's worker: torch's functions wait there for a GPU that never comes.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    done = len(gpu.log)
    torch.cuda.manual_seed(9)
    torch.cuda.manual_seed_all(9)
    assert len(gpu.log) == done


def test_a_capture_draws_from_where_the_stream_is(gpu):
    drawn()
    gpu.capturing, gpu.seed = True, 8  # the generator may not be asked then
    assert drawn() == expected(7, 3)


def test_a_capture_on_another_device_than_the_current_one_is_seen(gpu, monkeypatch):
    """It would have waited for what runs outside of the graph, which breaks the capture."""
    drawn()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.device == -1)
    assert gpu.device == 0
    gpu.log.clear()
    assert drawn() == expected(7, 3)
    assert gpu.log == [(0, "draw")] and keys.stream_of(-1)._recorded == 3
    with pytest.raises(FewbitError, match=r"^the kernel 'draw' is first used while a CUDA graph is captured"):
        keys.DeviceStream(-1)


def test_a_capture_leaves_the_place_of_the_host(gpu):
    """A state from before it is where the keys end that the host drew; in the graph states return, as checkpoints ask.

    A stand-in has no graph: what is captured runs, as in one replay.
    """
    stream = keys.stream_of(-1)
    drawn()
    place = stream.place
    gpu.capturing = True
    drawn()
    in_graph, recorded = stream.place, drawn()
    stream.go_to(in_graph)
    assert drawn() == recorded == expected(7, 6)
    keys._restart([-1])  # torch lets a capture be seeded by the seed that there is, which changes nothing
    gpu.capturing = False
    assert stream.place == place
    stream.go_to(place)
    assert drawn() == expected(7, 9)


def test_kernels_on_two_of_torch_s_streams_run_one_after_the_other(gpu):
    """Else both could draw the same keys, or those of a seed after they were to be another's."""

    def drawn_on(stream):
        gpu.streams[-1] = stream
        drawn()

    drawn_on(0)
    gpu.log.clear()
    drawn_on(0)
    drawn_on(5)
    keys.stream_of(-1).go_to((7, 0))
    drawn_on(0)
    gpu.streams[-1] = 5
    keys._restart([-1])
    on_0, on_5 = ([(stream, "draw"), (stream, "records")] for stream in (0, 5))
    waits, moves = (5, "waits for", 0), [(5, "move"), (5, "records")]
    assert gpu.log == [*on_0, waits, *on_5, *moves, (0, "waits for", 5), *on_0, waits, *moves]
    gpu.log.clear()
    gpu.capturing = True  # a graph may not wait for what runs outside of it
    drawn_on(0)
    gpu.capturing = False
    drawn_on(5)
    assert gpu.log == [(0, "draw"), *on_5]


def test_the_place_moves_before_keys_are_written():
    """A graph's replay beside a draw has keys of its own: the place is taken at once."""
    draw = keys_source().partition("void draw")[2].partition("move")[0]
    assert "atomicAdd(&place.drawn, u64(count))" in draw and draw.count("place.drawn") == 1


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
