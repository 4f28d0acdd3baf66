"""Rotated codes: few bits for any values, unbiased, with one scale a group (DRIVE, EDEN).

A group h of G numbers, turned by a random orthogonal matrix, is close to normal whatever its values were: nothing is
skewed any more, an outlier is spread over all, and the best codes are those of the normal distribution, the compiler's
optimal table of f'(t) = t. With random signs D = diag(±1) of each group, D' of the tensor, and the matrix H of Walsh
and Hadamard, whose entries are ±1/√G,

    r = H D' H D h                                               turned twice; |r| = |h|
    code = the interval between the edges σ·e_k that holds r,  σ = |h|/√G
    S = |h|² / ⟨r, L⟩                                            makes it unbiased: ⟨h, ĥ⟩ = |h|²
    ĥ = S · D H D' H L,                                          L the levels of the codes

E|ĥ − h|² is .571, .133, .0358 and .0096 of |h|² at 1 to 4 bits, of any values; codes between the minimum and the
maximum, rounded at random, have .50 of normal numbers at 2 bits, and 2.6 beside outliers. The scale of least squares,
⟨r, L⟩/⟨L, L⟩, has .363, .1175, .0345, .0095, and ĥ is shorter than h by that part: for what an exponential takes.

Sources: DRIVE (Vargaftik et al. 2021, arXiv 2105.08339), one bit, one turn H D; EDEN (2022, arXiv 2108.08842), any
number of bits and the scale. They prove E ĥ = h for uniformly random rotations. For H D it holds by energy, not by
entry: one entry of 100 among normal ones makes the others come back 3.4 times as large at 2 bits. Turned twice, all
come back.

Exact zeros among other values come back as noise of the size of all: probabilities, masks and results of ReLU are
better off with `PerGroup`. Special groups:

    zeros         exact: the scale is 0.
    not finite    NaN throughout, so that a NaN or an infinity cannot be overlooked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from .. import ops
from ..backends.cpu import rotated as cpu
from ..backends.cuda import rotated as cuda
from ..ops.declare import keys_of
from ..tensors.packing import packed_size
from ..tensors.philox import draw_seed, seed_beside
from ..tensors.rotation import LEAST_PIECE, check_group_size, groups_of
from ..tensors.spec import TensorSpec, as_dense, flat
from ..tensors.traits import as_kind, is_abstract, total_bytes
from ..tensors.validation import Unpickled, check_bits, check_form, check_part
from .base import check_tensor, kernels_of, seeds_beside


@dataclass(frozen=True)
class Rotated(Unpickled):
    """Few-bit codes of groups turned at random, by one scale a group; unbiased, whatever the values.

    A row is what lies innermost in memory, the features of a token; where that has fewer than 64 elements the sample
    x[n], and where that has fewer too the whole tensor. Groups do not span rows: they have 128 elements, then 64 of
    what is left, and the rest by itself. Compressed size: b bits an element, 16 a group and 8 bytes for the seed; 2.125
    bits in all at 2 bits and rows that 128 divides.

    Unbiased: E[decompress()] = x, up to float32 arithmetic and the rounding of the scale to bfloat16, by 0.4 % of |x|
    at groups of 64 and more. |decompress() − x|² has the mean .571, .133, .0358, .0096 of |x|² at 1 to 4 bits.

    Attributes:
        bits: b, 1 to 8.
        group_size: G, number of elements in a group: 64, 128 or 256.
        turns: 2, or 1, which takes two thirds of the time and is biased beside a dominant entry.
        unbiased: the scale that makes the mean right; if False that of the least squared error, .363, .1175, .0345,
            .0095 of |x|², by which the result is too short.

    Raises:
        FewbitError: an attribute is not one of the values above.

    Example:
        quantizer = fewbit.quantizers.Rotated(bits=2)
        quantizer.compress(torch.randn(16, 768)).decompress()
    """

    bits: int = 2
    group_size: int = 128
    turns: int = 2
    unbiased: bool = True

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, 1, 8)
        check_group_size(self.group_size)
        check_integer("turns", self.turns, 1, 2)
        if not isinstance(self.unbiased, bool):
            raise FewbitError(f"unbiased is True or False, not {shown(self.unbiased)}")

    def compress(self, x: Tensor, *, generator: torch.Generator | None = None) -> "RotatedCompressed":
        """Return `x` compressed.

        Args:
            x: float16, bfloat16, float32 or float64 (which is rounded to float32 first), of any shape and layout.
            generator: source of the one number that seeds the signs; by default fewbit's own stream, which
                `torch.manual_seed` restarts (key_stream.py). The same seed gives the same codes on every device.

        Raises:
            FewbitError: `x` is not such a tensor.
        """
        check_tensor("Rotated", x)
        x = as_dense(x.detach())
        form = TensorSpec.of(x)
        rows = flat(x).view(_rows(form))
        how = (self.bits, self.group_size, self.turns, self.unbiased)
        if is_abstract(x):
            N, D = rows.shape
            packed = rows.new_empty(N, packed_size(D, self.bits), dtype=torch.uint8)
            scale = rows.new_empty(N, groups_of(D, self.group_size), dtype=torch.bfloat16)
            return RotatedCompressed(self, form, 0, packed, scale)
        rows = as_kind(rows, keep_positive=False)
        kernels = kernels_of(x, cpu, cuda)
        if kernels is cpu:
            number = draw_seed(generator)
            return RotatedCompressed(self, form, number, *cpu.quantize(rows, *how, number))
        if kernels is cuda:
            seed = seeds_beside(rows, generator)
            (key,) = keys_of(seed)
            return RotatedCompressed(self, form, seed, *cuda.quantize(rows, *how, key))
        seed = ops.draw_seeds(rows, 1) if generator is None else seed_beside(rows, generator)
        return RotatedCompressed(self, form, seed, *ops.rotated_quantize(rows, seed, *how))


@dataclass(frozen=True, eq=False)
class RotatedCompressed(Unpickled):
    """A tensor of N rows of D elements compressed by `Rotated`.

    Attributes:
        quantizer: the quantizer that compressed it.
        form: shape, layout and dtype of the tensor.
        seed: of the signs, a number, or int64 (1,) on the CPU or beside the codes.
        packed: codes, uint8 (N, ⌈D/8⌉·b), each row packed by itself (packing.py).
        scale: S, bfloat16 (N, groups), divided by √G for each turn of a group whose size is a power of two.
    """

    quantizer: Rotated
    form: TensorSpec
    seed: int | Tensor
    packed: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes saved: codes, scales and the seed."""
        return total_bytes((self.packed, self.scale)) + 8

    def check_contents(self) -> None:
        """Raise FewbitError if the parts do not match `form`."""
        check_form("Rotated", self.form)
        if not isinstance(self.quantizer, Rotated):
            raise FewbitError(f"Rotated: the quantizer is a Rotated, not {shown(self.quantizer)}")
        bits, device = self.quantizer.bits, self.form.device
        check_bits("Rotated", bits)
        N, D = _rows(self.form)
        check_part("Rotated", "packed", self.packed, torch.uint8, (N, packed_size(D, bits)), device)
        check_part("Rotated", "scale", self.scale, torch.bfloat16, (N, groups_of(D, self.quantizer.group_size)), device)
        seed = self.seed
        if isinstance(seed, Tensor):
            beside = device if seed.device == device else torch.device("cpu")
            check_part("Rotated", "seed", seed, torch.int64, (1,), beside)
        elif type(seed) is not int or not 0 <= seed < 2**63:
            raise FewbitError(f"Rotated: the seed is an integer from 0 to 2^63 − 1, not {shown(seed)}")

    def decompress(self) -> Tensor:
        """Return the tensor in its shape, dtype and layout; non-dense inputs come back with the strides of `x.clone()`.

        Raises:
            FewbitError: the parts do not match `form`.
        """
        if not torch.compiler.is_compiling():  # a compiled graph has its own codes, and ops check sizes
            self.check_contents()
        form, quantizer, seed = self.form, self.quantizer, self.seed
        sizes = _rows(form)
        how = (quantizer.bits, quantizer.group_size, quantizer.turns)
        kernels = kernels_of(self.packed, cpu, cuda)
        if kernels is cuda or (kernels is cpu and isinstance(seed, int)):
            key = seed if isinstance(seed, int) else keys_of(seed)[0]
            out = form.empty()
            kernels.dequantize(self.packed, self.scale, *how, key, flat(out).view(sizes))
            return out
        if not isinstance(seed, Tensor):
            seed = torch.tensor([seed], device="cpu")
        rows = ops.rotated_dequantize(self.packed, self.scale, seed, *how, sizes[1], form.dtype)
        return rows.view(-1).as_strided(form.shape, form.stride)


def _rows(form: TensorSpec) -> tuple[int, int]:
    """Return N and D: rows are the innermost dimensions in memory, the fewest that have 64 elements, or one is all."""
    n, D = form.numel, 1
    if n == 0:
        return 0, 1
    dimensions = [(size, step) for size, step in zip(form.shape, form.stride, strict=True) if size != 1]
    for _ in dimensions:  # each multiplies the elements of those that lie within it; Dynamo sorts no symbols
        if D >= LEAST_PIECE:
            break
        D *= next(size for size, step in dimensions if step == D)
    return n // D, D
