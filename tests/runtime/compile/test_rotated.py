"""Rotated codes between compiled graphs: every layout, the error that the mathematics promises, what is turned."""

import copy

import pytest
import torch
from compiled import LanguageModel, exactly, few_bits, gradients
from fewbit import FewbitError
from fewbit.quantizers import Rotated
from fewbit.runtime import ops
from fewbit.runtime.backends.reference import rotated as reference
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.roles import Role
from fewbit.runtime.compile.rotated import dequantize, quantize, rotation_of

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
}
ERROR = {1: 0.571, 2: 0.133, 3: 0.0358}  # of |x|², by quantizers/rotated.py


def there_and_back(x, seed=7, bits=2, unbiased=True, centered=False):
    form = rotation_of(x, bits, 128, unbiased=unbiased, centered=centered)
    key = torch.tensor([seed])
    parts = quantize(key, x, offsets=[3], forms=[form])
    assert sum(part.nbytes for part in parts) == form.nbytes(x)
    (back,) = dequantize(key, *parts, offsets=[3], forms=[form], dtype=x.dtype)
    return back


class TestBuffers:
    """Of several tensors: other shapes, dtypes, bits and seeds in one call."""

    XS = torch.randn(4, 6, 200), torch.randn(3, 64).bfloat16(), torch.randn(5, 2, 30).transpose(0, 1), torch.ones(0, 8)
    BITS, OFFSETS, UNBIASED = [2, 3, 8, 1], [0, 4, 1, 2], [True, False, True, True]

    def test_are_plain_torchs(self):
        key = torch.tensor([2**63 - 3])
        how = (key, self.OFFSETS, self.BITS, self.UNBIASED, 128)
        buffers, plain = ops.rotated_quantize_buffers(self.XS, *how), reference.quantize_buffers(self.XS, *how)
        assert all(map(torch.equal, buffers, plain))
        how = (key, self.OFFSETS, self.BITS, [x.shape[-1] for x in self.XS], 128, torch.float32)
        backs, plain = ops.rotated_dequantize_buffers(buffers, *how), reference.dequantize_buffers(buffers, *how)
        assert all(map(torch.equal, backs, plain)) and [x.shape for x in backs] == [x.shape for x in self.XS]

    def test_opcheck(self):
        xs, how = [torch.randn(4, 6, 200), torch.randn(3, 64)], (torch.tensor([9]), [0, 1], [2, 3])
        torch.library.opcheck(ops.rotated_quantize_buffers, (xs, *how, [True, False], 64))
        buffers = ops.rotated_quantize_buffers(xs, *how, [True, False], 64)
        torch.library.opcheck(ops.rotated_dequantize_buffers, (buffers, *how, [200, 64], 64, torch.bfloat16))

    @pytest.mark.parametrize(
        ("key", "offsets", "bits", "features", "group_size"),
        [
            (torch.tensor([1.0]), [0], [2], [200], 128),
            (torch.tensor([1]), [], [2], [200], 128),
            (torch.tensor([1]), [0], [9], [200], 128),
            (torch.tensor([1]), [0], [2], [208], 128),
            (torch.tensor([1]), [0], [2], [-1], 128),
            (torch.tensor([1]), [0], [2], [200], 100),
        ],
    )
    def test_of_other_arguments_are_refused(self, key, offsets, bits, features, group_size):
        (buffer,) = ops.rotated_quantize_buffers([torch.ones(4, 200)], torch.tensor([1]), [0], [2], [True], 128)
        with pytest.raises(FewbitError, match=r"seed|bits|codes|elements|group_size"):
            ops.rotated_dequantize_buffers([buffer], key, offsets, bits, features, group_size, torch.float32)


class TestCodes:
    @pytest.mark.parametrize("bits", ERROR)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_err_by_their_law_in_every_layout(self, layout, bits):
        """In groups of 64, whose share of the channels that stand out differs: the law is that of many."""
        x = LAYOUTS[layout](torch.randn(2, 64, 8, 8) * torch.tensor([1.0, 20.0, 1, 1, 1, 1, 1, 1]))
        back = there_and_back(x, bits=bits)
        assert back.shape == x.shape and back.stride() == x.stride()
        assert float((back - x).square().sum() / x.square().sum()) == pytest.approx(ERROR[bits], rel=0.2)

    @pytest.mark.parametrize("shape", [(3, 96), (5, 100), (4, 3, 700), (70,), (2, 3, 40, 24)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_take_any_size_and_dtype(self, shape, dtype):
        x = torch.randn(shape).to(dtype)
        back = there_and_back(x, bits=8, centered=len(shape) > 1)
        assert back.dtype == dtype and (back - x).norm() < 0.03 * x.norm()

    def test_are_those_of_the_quantizer(self):
        x = torch.randn(16, 256)
        codes = Rotated(bits=2).compress(x)
        form = rotation_of(x, 2, 128, unbiased=True, centered=False)
        (buffer,) = quantize(torch.tensor([int(codes.seed) - 5]), x, offsets=[5], forms=[form])
        whole = torch.cat([codes.scale.view(torch.uint8).flatten(), codes.packed.flatten()])
        assert torch.equal(buffer.flatten(), whole)

    def test_of_scores_do_without_the_mean_over_tokens(self):
        """A channel's offset, of which keys have some ten times the rest, would else be most of what is rounded."""
        x = torch.randn(2, 32, 4, 32)
        offset = 10 * torch.randn(2, 1, 4, 32)
        plain, centered = (there_and_back(x + offset, centered=c) - offset - x for c in (False, True))
        assert float(centered.square().mean()) == pytest.approx(ERROR[2], rel=0.15)
        assert float(plain.square().mean()) > 30 * ERROR[2]

    def test_of_the_greatest_float16_stay_finite_without_their_mean(self):
        """A difference to the mean, and a sum with it, may lie outside the dtype."""
        x = torch.full((1, 4, 128), 60000.0, dtype=torch.float16)
        x[:, 0] = -60000
        assert there_and_back(x, bits=8, centered=True).isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    @pytest.mark.parametrize("centered", [False, True])
    def test_of_float8_come_back_so_the_greatest_too(self, dtype, centered):
        """Kernels write no 8 bits; and what is turned back may exceed the dtype, whose infinity is NaN."""
        most = torch.finfo(dtype).max
        x = (torch.randn(2, 16, 128) * most).clamp(-most, most).to(dtype)
        back = there_and_back(x, bits=4, centered=centered)
        assert back.dtype == dtype and back.float().isfinite().all()
        assert (back.float() / most - x.float() / most).norm() < 0.15 * (x.float() / most).norm()

    @pytest.mark.parametrize("shape", [(8, 4), (63,), (0, 4), (4, 0)], ids=str)
    def test_of_too_few_elements_in_a_row_there_are_none(self, shape):
        assert rotation_of(torch.empty(shape), 2, 128, unbiased=True, centered=False) is None


class TestChoice:
    def test_turns_what_has_few_bits_but_no_probabilities(self):
        auto, groups = CompileOptions(bits=2), CompileOptions(bits=2, quantizer="groups")
        assert [auto.rotates(Role.LINEAR, bits) for bits in (1, 3, 4)] == [True, True, False]
        assert [auto.rotates(Role.SCORES, bits) for bits in (3, 4, 5)] == [True, True, False]
        assert not auto.rotates(Role.PROBABILITIES, 2) and not auto.rotates(Role.BOOLEAN, 1)
        assert not groups.rotates(Role.LINEAR, 2)
        assert CompileOptions(quantizer="rotated").rotates(Role.LINEAR, 8)

    @pytest.mark.deep
    def test_errs_less_in_a_step_than_groups_of_as_many_bits(self):
        tokens = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(0))
        model = LanguageModel(blocks=2)
        loss, true = gradients(exactly(copy.deepcopy(model)), tokens)
        errors = {}
        for quantizer in ("groups", "rotated"):
            few = few_bits(copy.deepcopy(model), bits=2, quantizer=quantizer, smallest=1024)
            found, near = gradients(few, tokens)
            assert torch.equal(found, loss)
            errors[quantizer] = float((near - true).norm() / true.norm())
        assert errors["rotated"] < 0.7 * errors["groups"]

    @pytest.mark.deep
    def test_follows_sizes_that_vary(self):
        model = LanguageModel(blocks=1)
        exact, few = exactly(copy.deepcopy(model)), few_bits(copy.deepcopy(model), bits=3, smallest=1024)
        for rows in (4, 6, 9):
            tokens = torch.randint(0, 320, (rows, 64))
            (_, true), (_, near) = gradients(exact, tokens), gradients(few, tokens)
            assert (near - true).norm() < 0.4 * true.norm()
