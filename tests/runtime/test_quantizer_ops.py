"""The quantizers' ops: torch's own checks, equal results on every backend, traces without breaks, hostile arguments."""

import pytest
import torch
from fewbit import FewbitError
from fewbit.quantizers import FixedPoint, Outlier, PerGroup, Rotated
from fewbit.runtime import ops
from fewbit.runtime.backends.reference import per_group as reference_per_group
from fewbit.runtime.tensors.packing import Rows
from fewbit.runtime.tensors.philox import NEAREST
from quantizer_cases import reference, same_bits

SEED = torch.tensor([12345])
BITS = torch.tensor([1, 8, 3, 4], dtype=torch.uint8)
ROOM = torch.tensor([Rows(4, 300, BITS).starts()[-1]])
LAST = (torch.float32, torch.float16)


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def cases():
    """(name, quantize, its arguments, dequantize, its arguments after the parts)."""
    x, γ, β = numbers(4, 300), numbers(300), numbers(300)
    return {
        "per group": (ops.per_group_quantize, (x, 3, 64, SEED), ops.per_group_dequantize, (3, 64, 300)),
        "per group, to nearest": (ops.per_group_quantize, (x, 3, 64, None), ops.per_group_dequantize, (3, 64, 300)),
        "bits of samples": (
            *(ops.per_group_quantize_samples, (x, BITS, 64, SEED, ROOM)),
            *(ops.per_group_dequantize_samples, (BITS, 64, 300)),
        ),
        "fixed point": (ops.fixed_point_quantize, (x, γ, β, 1, 4), ops.fixed_point_dequantize, (γ, β, 1, 4, 1200)),
        "outliers": (
            *(ops.outlier_quantize, (x.flatten(), 3, 0.02, False, None, 1)),
            *(ops.outlier_dequantize, (3, False, 1200)),
        ),
        "outliers, sampled": (
            *(ops.outlier_quantize, (x.flatten(), 3, 0.02, True, torch.bfloat16, 7)),
            *(ops.outlier_dequantize, (3, True, 1200)),
        ),
    }


def parts_of(result):
    return result if isinstance(result, tuple | list) else (result,)


@pytest.mark.parametrize("bits", range(1, 9))
def test_without_a_seed_codes_are_to_nearest(bits):
    x = numbers(5, 300)
    packed, minimum, range_ = ops.per_group_quantize(x, bits, 50, None)
    back = ops.per_group_dequantize(packed, minimum, range_, bits, 50, 300, x.dtype)
    step = range_.float().repeat_interleave(50, 1) / (2**bits - 1)
    assert torch.all((back - x).abs() <= step / 2 * (1 + 2**-14))  # scaled numbers are rounded to 16 bits first


@pytest.mark.parametrize("seed", [SEED, None], ids=["at random", "to nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "size"), [((3, 5, 128), 64), ((7, 88), 88), ((40, 512), 128), ((2, 0, 8), 2)], ids=str
)
class TestBuffers:
    """Minima, ranges and codes in one tensor: those of the elements taken as one sample."""

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_hold_what_the_parts_hold(self, shape, size, dtype, seed, bits):
        x = numbers(*shape, dtype=dtype)
        buffer = quantized(x, bits, size, seed)
        n, of_parameters = x.numel(), x.numel() // size * 4
        assert buffer.shape == (*shape[:-1], shape[-1] // size * 4 + shape[-1] * bits // 8)
        packed, *parameters = ops.per_group_quantize(x.view(1, n), bits, size, seed)
        expected = torch.cat([part.view(torch.uint8) for part in parameters], 1)
        assert torch.equal(buffer.flatten()[:of_parameters], expected.flatten())
        if seed is None:
            assert torch.equal(buffer.flatten()[of_parameters:], packed.flatten())
        packed = buffer.flatten()[of_parameters:].view(packed.shape)  # at random, by numbers of their own
        for result in (dtype, torch.float64):
            back = dequantized(buffer, bits, size, result)
            rows = ops.per_group_dequantize(packed, *parameters, bits, size, n, result)
            assert back.dtype == result and back.shape == shape and same_bits(back.flatten(), rows.flatten())

    def test_are_plain_torchs(self, shape, size, dtype, seed):
        x = numbers(*shape, dtype=dtype)
        buffer = quantized(x, 5, size, seed)
        (plain,) = reference_per_group.quantize_buffers([x], [5], [size], seed, [seed is not None])
        assert torch.equal(buffer, plain)
        (back,) = reference_per_group.dequantize_buffers([buffer], [5], [size], dtype)
        assert same_bits(dequantized(buffer, 5, size, dtype), back)

    def test_err_by_half_a_step_to_nearest_and_by_one_at_random_without_bias(self, shape, size, dtype, seed):
        """The mean of 256 seeds errs by less than five standard deviations, of at most half a step each."""
        x = numbers(*shape, dtype=dtype)
        seeds = [None] if seed is None else list(torch.arange(256).unsqueeze(1))
        backs = torch.stack([dequantized(quantized(x, 3, size, s), 3, size, torch.float32) for s in seeds])
        groups = x.float().view(-1, size)
        # The range of bfloat16 is up to 2^-7 wider, and begins up to as much below.
        spans = groups.amax(1) - groups.amin(1) + groups.amin(1).abs() * 2**-7 if x.numel() else groups.new_empty(0)
        step = (spans * (1 + 2**-7) / 7).repeat_interleave(size).view(x.shape)
        assert torch.all((backs - x.float()).abs() <= step * (0.5 if seed is None else 1) * (1 + 2**-12))
        if seed is not None:
            assert torch.all((backs.mean(0) - x.float()).abs() <= 5 * step / 2 / 16 + step * 2**-12)

    def test_of_several_tensors_are_those_of_each(self, shape, size, dtype, seed):
        """Tensors of other shapes, dtypes, bits and roundings in one call, one of them with strides of its own."""
        xs = [numbers(*shape, dtype=dtype), numbers(4, 6, 8).transpose(0, 1), numbers(2, 64).bfloat16()]
        bits, sizes = [3, 8, 5], [size, 8, 32]
        seeds, stochastic = (None, [False] * 3) if seed is None else (torch.tensor([7, 8, 9]), [True, False, True])
        buffers = ops.per_group_quantize_buffers(xs, bits, sizes, seeds, stochastic)
        for i, (x, buffer) in enumerate(zip(xs, buffers, strict=True)):
            alone = quantized(x, bits[i], sizes[i], seeds[i : i + 1] if stochastic[i] else None)
            assert torch.equal(buffer, alone)
        backs = ops.per_group_dequantize_buffers(buffers, bits, sizes, dtype)
        for back, buffer, b, G in zip(backs, buffers, bits, sizes, strict=True):
            assert same_bits(back, dequantized(buffer, b, G, dtype))

    @pytest.mark.sample(1)
    def test_opcheck(self, shape, size, dtype, seed):
        x = numbers(*shape, dtype=dtype)
        seeds = None if seed is None else torch.tensor([3, 4])
        arguments = ([x, x + 1], [3, 4], [size, size], seeds, [seed is not None, False])
        torch.library.opcheck(ops.per_group_quantize_buffers, arguments)
        buffers = ops.per_group_quantize_buffers(*arguments)
        torch.library.opcheck(ops.per_group_dequantize_buffers, (buffers, [3, 4], [size, size], dtype))


def quantized(x, bits, size, seed):
    """Return the buffer of one tensor, at random if there is a seed."""
    (buffer,) = ops.per_group_quantize_buffers([x], [bits], [size], seed, [seed is not None])
    return buffer


def dequantized(buffer, bits, size, dtype):
    """Return the tensor of one buffer."""
    (x,) = ops.per_group_dequantize_buffers([buffer], [bits], [size], dtype)
    return x


@pytest.mark.parametrize(
    ("x", "bits", "size", "seeds", "stochastic"),
    [
        (numbers(4, 100), [4], [50], None, [False]),  # not whole groups of the packing
        (numbers(4, 128), [4], [96], None, [False]),
        (torch.tensor(1.0), [4], [8], None, [False]),
        (numbers(4, 128), [9], [64], None, [False]),
        (numbers(4, 128), [4], [0], None, [False]),
        (numbers(4, 128), [4], [64], torch.tensor([1.0]), [True]),
        (numbers(4, 128), [4], [64], torch.tensor([1, 2]), [True]),
        (numbers(4, 128), [4], [64], torch.tensor(1), [False]),
        (numbers(4, 128), [4], [64], None, [True]),
        (numbers(4, 128), [4, 4], [64], None, [False]),
        (numbers(4, 128), [4], [], None, [False]),
        (numbers(4, 128), [4], [64], None, []),
        (numbers(4, 128).double(), [4], [64], None, [False]),
    ],
)
def test_a_buffer_of_other_arguments_is_refused(x, bits, size, seeds, stochastic):
    with pytest.raises((FewbitError, TypeError), match=r"group|bits|seeds|takes"):
        ops.per_group_quantize_buffers([x], bits, size, seeds, stochastic)


@pytest.mark.parametrize("inner", [0, -1])
def test_channels_without_elements_between_them_are_refused(inner):
    """A kernel that walked from channel to channel would not come to an end."""
    one = torch.ones(1)
    with pytest.raises(FewbitError, match="inner"):
        ops.fixed_point_quantize(numbers(8), one, one, inner, 4)
    with pytest.raises(FewbitError, match="inner"):
        ops.fixed_point_dequantize(torch.zeros(4, dtype=torch.uint8), one, one, inner, 4, 8, torch.float32)


@pytest.mark.parametrize(("shape", "bits", "size"), [((4, 67), 4, 64), ((), 4, 64), ((4, 68), 3, 64), ((4, 68), 0, 64)])
def test_a_buffer_of_another_size_is_refused(shape, bits, size):
    dequantized(torch.zeros(4, 72, dtype=torch.uint8), 4, 64, torch.float32)
    with pytest.raises(FewbitError, match=r"codes|bits"):
        dequantized(torch.zeros(shape, dtype=torch.uint8), bits, size, torch.float32)


@pytest.mark.parametrize("name", cases())
class TestEach:
    @pytest.mark.sample(1)
    def test_opcheck(self, name):
        quantize, arguments, dequantize, more = cases()[name]
        # The sizes of some depend on values: what torch traces with dynamic shapes needs them for inputs that it makes.
        torch.library.opcheck(quantize, arguments)
        for dtype in LAST:
            torch.library.opcheck(dequantize, (*parts_of(quantize(*arguments)), *more, dtype))

    def test_is_plain_torchs(self, name):
        quantize, arguments, dequantize, more = cases()[name]
        family = name.split(",")[0].replace("bits of samples", "per group").replace("outliers", "outlier")
        plain = __import__(f"fewbit.runtime.backends.reference.{family.replace(' ', '_')}", fromlist=["quantize"])
        ours = parts_of(quantize(*arguments))
        numbers_of = {id(SEED): 12345, id(None): NEAREST, id(ROOM): int(ROOM)}
        given = [numbers_of.get(id(a), a) if "per group" in family else a for a in arguments]
        expected = parts_of(plain.quantize(*given))
        assert all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))
        for dtype in LAST:
            *of_codes, size = more
            out = torch.empty((4, size) if "per_group" in str(quantize) else (size,), dtype=dtype)
            plain.dequantize(*expected, *of_codes, out)
            assert same_bits(dequantize(*ours, *more, dtype), out)

    def test_has_no_gradient(self, name):
        quantize, arguments, *_ = cases()[name]
        x = arguments[0].clone().requires_grad_()
        assert not any(part.requires_grad for part in parts_of(quantize(x.detach(), *arguments[1:])))

    @pytest.mark.parametrize("at", range(5))
    def test_refuses_parts_of_another_size_or_dtype(self, name, at):
        quantize, arguments, dequantize, more = cases()[name]
        parts = list(parts_of(quantize(*arguments)))
        if at >= len(parts):
            return
        whole = parts[at]
        for wrong in (whole.flatten()[: whole.numel() - 1], whole.double(), whole.to("meta")):
            parts[at] = wrong
            with pytest.raises((FewbitError, TypeError, RuntimeError, NotImplementedError)):
                dequantize(*parts, *more, torch.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "around",
    [
        lambda x: PerGroup(4, 64).compress(x).decompress(),
        lambda x: PerGroup(4).within(x.shape[-1]).compress(x.transpose(0, 1)).decompress(),
        lambda x: FixedPoint(4).compress(x, scale=torch.ones(96), shift=torch.zeros(96)).decompress(),
        lambda x: Outlier(3, 0.02).compress(x).decompress(),
        lambda x: Rotated(3).compress(x).decompress(),
    ],
    ids=["PerGroup", "PerGroup, transposed", "FixedPoint", "Outlier", "Rotated"],
)
def test_quantizers_trace_in_one_graph(around, dynamic):
    compiled = torch.compile(around, fullgraph=True, backend="aot_eager")
    for samples in (4, 7) if dynamic else (4,):
        x = numbers(samples, 96)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        torch.manual_seed(0)
        ours = compiled(x)
        torch.manual_seed(0)
        expected = around(x)
        assert same_bits(ours, expected)
        assert ours.stride() == expected.stride()


@pytest.mark.parametrize("quantizer", [PerGroup(4, 64), Outlier(3, 0.02)])
def test_the_reference_serves_what_has_no_kernels(quantizer):
    x = numbers(3, 200)
    torch.manual_seed(0)
    ours = quantizer.compress(x).decompress()
    torch.manual_seed(0)
    with reference():
        assert same_bits(quantizer.compress(x).decompress(), ours)
