import numpy as np
import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.backends.cpu.numba_tools import random_words
from fewbit.runtime.tensors.philox import Places, draw_seed, philox, random_halves, seed_beside

# Random123's known answers for philox4x32-7: counter, key, result; words lowest first.
KNOWN = [
    ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(counter, key, words):
    drawn = philox(tuple(torch.tensor([c]) for c in counter), tuple(key))
    assert [int(word) for word in drawn] == words


@pytest.mark.parametrize("seed", [0, 1, 0x299F31D0A4093822, 2**63 - 1])
@pytest.mark.parametrize("first", [0, 5, 2**32 - 3])
def test_the_cpu_kernel_draws_the_same(seed, first):
    words = np.empty(4 * 7, np.uint32)
    random_words(seed, first, 7, words)
    index = torch.arange(first, first + 7)
    zero = torch.zeros_like(index)
    drawn = philox((index & 0xFFFFFFFF, index >> 32, zero, zero), (seed & 0xFFFFFFFF, seed >> 32))
    assert words.reshape(7, 4).tolist() == torch.stack(drawn, 1).tolist()


def test_halves_are_the_words_lowest_bits_first():
    halves = random_halves(0, 1, torch.device("cpu"))
    assert halves.tolist() == [[0xB709, 0x5F6F, 0x3F64, 0x0D89, 0x1F81, 0x4F12, 0x0A48, 0x4F73]]
    assert halves.dtype == torch.int32


def test_halves_are_uniform():
    halves = random_halves(7, 1 << 15, torch.device("cpu")).double()
    deviation = 65536 / 12**0.5 / (1 << 15) ** 0.5
    assert ((halves.mean(0) - 32767.5).abs() < 5 * deviation).all()
    assert (torch.corrcoef(halves.T) - torch.eye(8)).abs().max() < 5 / (1 << 15) ** 0.5


class TestSeed:
    def test_is_drawn_from_torchs_generator(self):
        torch.manual_seed(3)
        first, second = draw_seed(), draw_seed()
        torch.manual_seed(3)
        assert draw_seed() == first != second
        assert 0 <= first < 2**63

    def test_a_generator_that_goes_to_another_seed_and_back_draws_no_key_twice(self):
        """Megatron's tracker, by the generator's own set_state: each layer and step was rounded by the same bits."""
        states = []
        for seed in (3, 4):
            torch.manual_seed(seed)
            states.append(torch.default_generator.get_state())
        drawn = []
        for state in states * 3:
            torch.default_generator.set_state(state)
            drawn.append(draw_seed())
        assert len(set(drawn)) == 6
        torch.manual_seed(3)
        assert draw_seed() == drawn[0]
        torch.manual_seed(4)
        assert [draw_seed(), draw_seed()] == drawn[1::2][:2]

    def test_places_of_the_seeds_used_last_are_kept(self):
        places = Places()
        for seed in range(2000):
            places.leave((seed, 5))
        places.leave((1500, 6))
        assert (places.of(0), places.of(1500), places.of(1999)) == ((0, 0), (1500, 6), (1999, 5))
        assert len(places._drawn) == 1024

    def test_of_a_generator_leaves_torchs_alone(self):
        before = torch.get_rng_state()
        assert draw_seed(torch.Generator().manual_seed(5)) == draw_seed(torch.Generator().manual_seed(5))
        assert torch.equal(torch.get_rng_state(), before)

    def test_of_a_generator_elsewhere_is_refused_in_a_cuda_graph(self, monkeypatch):
        """Every replay would round by the key that the host drew while the graph was captured."""
        elsewhere, generator = torch.empty(3, device="meta"), torch.Generator()
        assert seed_beside(elsewhere, generator).shape == (1,)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert seed_beside(torch.empty(3), generator).shape == (1,)
        with pytest.raises(FewbitError, match=r"^a CUDA graph would round by one key in all its replays"):
            seed_beside(elsewhere, generator)
