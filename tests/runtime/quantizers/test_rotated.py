"""Rotated codes: error and bias of any values, special groups, every size of a row; kernels beside plain torch."""

import pickle

import fewbit
import numpy as np
import pytest
import torch
from backends import assert_like_the_reference
from fewbit import FewbitError
from fewbit.quantizers import PerGroup, Rotated
from fewbit.runtime import ops
from fewbit.runtime.backends.reference import rotated as reference
from fewbit.runtime.tensors.rotation import groups_of, pieces, positive_edges, positive_levels, relative_variance
from hypothesis import given
from hypothesis import strategies as st
from quantizer_cases import DTYPES, check_form, generator, tensors
from scipy.stats import norm
from torch.nn.functional import gelu, silu

ERRORS = {1: 0.36338, 2: 0.11748, 3: 0.034548, 4: 0.009501, 8: 4.1185e-5}


def normal(*shape):
    return torch.randn(shape, generator=generator(3))


def nmse(x, y):
    return float((y - x).square().sum() / x.square().sum())


def through(quantizer, x):
    return quantizer.compress(x, generator=generator(5)).decompress()


class TestLevels:
    @pytest.mark.parametrize("bits", range(1, 9))
    def test_are_the_best_of_a_normal_distribution(self, bits):
        """Each is the mean of its interval (Lloyd, Max), to the rounding to bfloat16: there is one such quantizer."""
        levels = positive_levels(bits).astype(float)
        edges = np.concatenate([[0], positive_edges(bits), [np.inf]])
        means = -np.diff(norm.pdf(edges)) / np.diff(norm.cdf(edges))
        assert np.all(np.diff(levels) > 0)
        assert np.allclose(levels, means, rtol=2**-7, atol=0)
        error = 1 + (2 * np.diff(norm.cdf(edges)) * levels * (levels - 2 * means)).sum()
        assert bits not in ERRORS or error == pytest.approx(ERRORS[bits], rel=0.06)  # bfloat16 costs 8 bits 3 %

    def test_are_the_compilers(self):
        table = fewbit.solve(lambda x: x * x / 2, bits=2, derivative=lambda t: t, weight="normal:0,1")
        assert torch.equal(torch.tensor(table.levels[2:]).bfloat16(), torch.tensor(positive_levels(2)).bfloat16())


VALUES = {
    "normal": lambda: normal(200, 768),
    "laplace": lambda: normal(200, 768) * normal(768, 200).T.square().add(normal(200, 768).square()).sqrt(),
    "gelu": lambda: gelu(normal(200, 768)),
    "swiglu": lambda: silu(normal(200, 768)) * normal(768, 200).T,
    "outliers": lambda: normal(200, 768) * torch.ones(768).index_fill(0, torch.tensor([5, 300]), 20.0),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(("bits", "most"), [(1, 0.6), (2, 0.135), (3, 0.04), (4, 0.011), (8, 1e-4)])
def test_the_error_is_the_tables_whatever_the_values(name, bits, most):
    x = VALUES[name]()
    e = ERRORS[bits]
    assert nmse(x, through(Rotated(bits), x)) < most
    assert nmse(x, through(Rotated(bits, unbiased=False), x)) == pytest.approx(e, rel=0.05, abs=1e-5)


@pytest.mark.parametrize(("bits", "largest"), [(1, 1.0), (2, 100.0)])
def test_every_entry_is_unbiased(bits, largest):
    """Over 4,000 draws, also beside a dominant entry; what is left is the rounding of the scale to bfloat16."""
    x = normal(128)
    x[1] = largest
    torch.manual_seed(0)
    y = torch.stack([Rotated(bits).compress(x).decompress() for _ in range(4000)]).double()
    deviation = y.std(0) / 4000**0.5
    assert torch.all((y.mean(0) - x).abs() < 5 * deviation + 0.004 * x.abs())


def test_the_variance_that_allocation_reckons_with_is_that_of_the_codes():
    x = normal(400, 768)
    for bits in (1, 2, 3, 5):
        assert nmse(x, through(Rotated(bits), x)) == pytest.approx(relative_variance(bits), rel=0.06)


def test_one_turn_is_biased_beside_a_dominant_entry():
    x = normal(4000, 128)
    x[:] = x[0]
    x[:, 1] = 100.0
    rest = torch.arange(128) != 1
    slope = (through(Rotated(2, turns=1), x).mean(0)[rest] @ x[0, rest]) / x[0, rest].square().sum()
    assert slope > 3


class TestGroups:
    @given(st.integers(0, 2000), st.sampled_from([64, 128, 256]))
    def test_fill_a_row(self, D, G):
        parts = list(pieces(D, G))
        assert [part.start for part in parts] == [sum(p.size * p.count for p in parts[:i]) for i in range(len(parts))]
        assert sum(part.size * part.count for part in parts) == D
        assert sum(part.count for part in parts) == groups_of(D, G)
        assert all(part.size in (64, 128, 256) for part in parts[:-1])

    @pytest.mark.parametrize("D", [1, 2, 3, 5, 12, 32, 63, 64, 88, 96, 100, 127, 192, 300])
    def test_of_any_size_have_the_tables_error(self, D):
        torch.manual_seed(1)
        x = normal(400, D)
        y = torch.stack([Rotated(2).compress(row).decompress() for row in x]) if D < 64 else through(Rotated(2), x)
        assert nmse(x, y) < 0.15

    def test_no_row_spoils_another(self):
        x = normal(6, 192)
        x[1], x[4] = 0, 1e20
        x[2, 150], x[3, 7] = torch.inf, torch.nan
        y = through(Rotated(2), x)
        assert torch.equal(y[1], torch.zeros(192))
        assert y[2, 128:].isnan().all() and y[3, :128].isnan().all()
        assert y[2, :128].isfinite().all() and y[3, 128:].isfinite().all() and y[[0, 5]].isfinite().all()
        assert nmse(x[[0, 5]], y[[0, 5]]) < 0.2

    @pytest.mark.parametrize("power", [-100, -60, 60, 120])
    def test_scaled_by_powers_of_two_have_the_same_codes(self, power):
        x = normal(8, 100)
        a, b = (Rotated(2).compress(s * x, generator=generator(1)) for s in (1.0, 2.0**power))
        assert torch.equal(a.packed, b.packed)
        assert torch.equal(a.decompress() * 2.0**power, b.decompress())

    def test_one_entry_alone_is_exact_to_the_scales_rounding(self):
        x = torch.zeros(128)
        x[9] = -5.0
        y = through(Rotated(8), x)
        assert (y - x).abs().max() < 5 * 2**-6

    def test_results_stay_within_the_dtype(self):
        x = torch.full((64, 128), 6.5e4, dtype=torch.float16)
        assert through(Rotated(2), x).isfinite().all()


class TestKernelsGiveTheReferencesBits:
    @pytest.mark.deep
    @given(tensors(special=True), st.data())
    def test_of_any_tensor(self, backend, x, data):
        quantizer = Rotated(
            data.draw(st.sampled_from(list(backend.bits))),
            data.draw(st.sampled_from([64, 128, 256])),
            data.draw(st.sampled_from([1, 2])),
            data.draw(st.booleans()),
        )
        assert_like_the_reference(backend, quantizer, x, data.draw(st.integers(0, 2**40)))

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_of_buffers(self, backend, bits):
        """Codes that lie behind an odd number of scales, keys on the host and beside the numbers, rows of any size."""
        xs = [backend.put(x) for x in (normal(3, 7, 192), normal(3, 128), normal(4, 100).bfloat16(), normal(0, 64))]
        offsets, all_bits, unbiased = [0, 3, 1, 2], [bits] * 4, [True, False, True, True]
        module, D = backend.module("rotated"), [x.shape[-1] for x in xs]
        for key in (torch.tensor([2**63 - 2]), backend.put(torch.tensor([2**63 - 2]))):
            how = (key, offsets, all_bits)
            buffers, plain = (m.quantize_buffers(xs, *how, unbiased, 128) for m in (module, reference))
            assert all(map(torch.equal, buffers, plain))
            backs, plain = (m.dequantize_buffers(buffers, *how, D, 128, torch.float32) for m in (module, reference))
            assert all(map(torch.equal, backs, plain))

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("D", [64, 96, 128, 192, 448, 768, 1100, 2048])
    def test_of_rows(self, backend, D):
        for i, bits in enumerate(backend.bits):
            x = normal(5, D).to(DTYPES[i % 4])
            x[0], x[1, 3], x[2, D - 1] = 0, 1e4, torch.nan
            for group_size in (64, 128, 256):
                quantizer = Rotated(bits, group_size, turns=1 + (i + group_size // 64) % 2, unbiased=i % 3 > 0)
                assert_like_the_reference(backend, quantizer, x, 2**40 + i)
                assert backend.name != "host-cuda" or backend.launched


def test_ops_pass_torchs_checks_and_refuse_other_sizes():
    x, seed = normal(4, 300), torch.tensor([12345])
    torch.library.opcheck(ops.rotated_quantize, (x, seed, 3, 64, 2, True))
    packed, scale = ops.rotated_quantize(x, seed, 3, 64, 2, True)
    for dtype in (torch.float32, torch.float64):
        torch.library.opcheck(ops.rotated_dequantize, (packed, scale, seed, 3, 64, 2, 300, dtype))
    for parts in ((packed[:, 1:], scale, seed), (packed, scale[:, 1:], seed), (packed, scale.float(), seed)):
        with pytest.raises(FewbitError):
            ops.rotated_dequantize(*parts, 3, 64, 2, 300, torch.float32)
    with pytest.raises(FewbitError, match="seeds"):
        ops.rotated_quantize(x, seed.int(), 3, 64, 2, True)


@given(tensors())
def test_form_and_bytes(x):
    c = Rotated(3).compress(x)
    check_form(c.decompress(), x)
    assert c.nbytes == c.packed.numel() + 2 * c.scale.numel() + 8


def test_bytes_of_rows_that_groups_divide():
    c = Rotated(2).compress(normal(64, 768))
    assert (c.nbytes - 8) * 8 == 2.125 * 64 * 768
    assert c.nbytes == Rotated(2).compress(normal(64, 768).to("meta")).nbytes


def test_the_seed_is_the_streams_and_torchs_generator_stays():
    x = normal(8, 128)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    a, b = Rotated(2).compress(x), Rotated(2).compress(x)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(7)
    assert torch.equal(Rotated(2).compress(x).packed, a.packed)
    assert not torch.equal(a.packed, b.packed)


def test_pickles_come_back():
    c = Rotated(2, 64).compress(normal(4, 100))
    assert torch.equal(pickle.loads(pickle.dumps(c)).decompress(), c.decompress())


@pytest.mark.parametrize(
    "arguments", [{"bits": 0}, {"bits": 9}, {"group_size": 96}, {"group_size": True}, {"turns": 3}, {"unbiased": 1}]
)
def test_other_attributes_are_refused(arguments):
    with pytest.raises(FewbitError, match=next(iter(arguments))):
        Rotated(**arguments)


@pytest.mark.parametrize("part", ["packed", "scale", "seed"])
def test_altered_parts_are_refused(part):
    c = Rotated(2).compress(normal(4, 128))
    value = getattr(c, part)
    vars(c)[part] = -1 if part == "seed" else value[:, :-1]
    with pytest.raises(FewbitError, match=part):
        c.decompress()


def test_rotated_serves_wherever_a_quantizer_does():
    """Hooks, layers and checkpoints train with it, and keep what 2.125 bits of the rows take."""
    net = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
    x = normal(64, 128)
    net(x).square().sum().backward()
    exact = [p.grad.clone() for p in net.parameters()]
    with fewbit.compress_saved_tensors(Rotated(bits=4)):
        y = net(x)
    net.zero_grad()
    y.square().sum().backward()
    assert all(nmse(a, p.grad) < 0.05 for a, p in zip(exact, net.parameters(), strict=True))
    saver = fewbit.layers.QuantizerSaver(Rotated(bits=2))
    assert saver.compress_rows(x).nbytes < PerGroup(2).within(128).compress(x).nbytes


def test_hooks_keep_the_zeros_of_probabilities():
    """A rotation would make noise of them: values of keys that a mask hides would have gradients."""
    scores, v = normal(64, 64).requires_grad_(), normal(64, 32).requires_grad_()
    with fewbit.compress_saved_tensors(Rotated(bits=2)):
        y = torch.softmax(scores.masked_fill(torch.arange(64) >= 60, -torch.inf), -1) @ v
    y.square().sum().backward()
    assert torch.equal(v.grad[60:], torch.zeros(4, 32)) and v.grad[:60].abs().sum() > 0


def test_levels_and_checkpoints_take_it_by_a_word():
    def trained(change):
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Identity()) for _ in range(3)]
        net = torch.nn.Sequential(torch.nn.Linear(128, 128), *blocks)
        change(net)
        net(normal(64, 128)).square().sum().backward()
        return [p.grad for p in net.parameters()]

    exact = trained(lambda net: None)
    for change in (
        lambda net: fewbit.convert(net, fewbit.ActNN("L2", bits=4, quantizer="rotated")),
        lambda net: fewbit.convert(net, fewbit.ActNN("L3", bits=4, quantizer="rotated")),
        lambda net: fewbit.checkpoint(net, bits=4, quantizer="rotated", blocks=["1", "2", "3"]),
    ):
        found = trained(change)
        errors = [nmse(a, b) for a, b in zip(exact, found, strict=True)]
        assert max(errors) < 0.02 and all(error > 0.0005 for error in errors[2::2])  # the caller holds the first input
    with pytest.raises(FewbitError, match="groups"):
        fewbit.checkpoint(torch.nn.Linear(2, 2), quantizer="rotate")
