"""What a gated linear unit saves for its backward pass, and its size in bytes.

    keep        saved for each element                                       default   a token × channel in bfloat16
    parts       code of act'(gate), copies of up and act(gate)               3 + 4 + 4 bits + 0.25    0.70
    inputs      copies of up and gate; act and act' are computed from them   4 + 4 bits + 0.25        0.52
    exact       gate and up unchanged                                        32 bits in bfloat16      2

A copy is `PerGroup(bits, 256)` of the elements in row-major order: 32 bits for a group's minimum and range; or
`Rotated(bits)` of the rows of the last dimension, with 16 bits for a group of 128 and 8 bytes for the seeds. With
`parts` every gradient is linear in the stochastically rounded values, so that its only bias is the table's, and there
is none if its codes are rounded at random too; `inputs` puts rounded numbers through act and act', which are not
linear. `exact` gives torch's own gradients, bit for bit.

The bits are divided by their effect on the gradients of all parameters (`fewbit bench glu-bits`, a small Llama after
100 steps; squared errors relative to the exact gradient, noise + bias): of all 21 ways to give 11 bits to code, up and
act(gate), 3 + 4 + 4 has the least error, 0.00023 + 0.00003 in groups and 0.00007 + 0.00004 rotated. 2 + 5 + 4 has less
noise, and ten times the table's bias, which no number of steps averages out; act(gate) in 3 bits doubles the
noise of groups, in 2 it is seven times as much. With `inputs`, 4 + 4 has an error of 0.00034 in groups and 0.00010
rotated, and no bias distinguishable from 0, 3 + 5 in groups twice that.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from .packing import packed_size

GROUP_SIZE = 256  # that of PerGroup, at .125 bits an element
DEFAULT_COPY_BITS = 4

Keep = Literal["parts", "inputs", "exact"]
KEEPS: tuple[Keep, ...] = get_args(Keep)


class GLUPlan(NamedTuple):
    """Which parts of act(gate) · up to save. A tuple, so that torch.compile treats it as a constant.

    Attributes:
        function: name of act in `FORWARDS`.
        parameters: of act.
        table: key of the table of act'.
        code_bits: of the table.
        up_bits: of the copy of up.
        second_bits: of the copy of act(gate), with `inputs` of gate.
        keep: "parts", "inputs" or "exact", see above.
        at_random: whether the table is of kind ``stochastic``, whose codes are drawn at random.
        is_rotated: whether copies are those of `Rotated`, and not of `PerGroup`.
    """

    function: str
    parameters: tuple[float, ...]
    table: str
    code_bits: int
    up_bits: int
    second_bits: int
    keep: Keep
    at_random: bool = False
    is_rotated: bool = False

    @property
    def bits(self) -> float:
        """Bits saved for each element if all gradients are needed; nan for `exact`, which depends on the dtype."""
        per_copy = 32 / GROUP_SIZE  # and of rotated groups, of half the size, 16 bits
        if self.keep == "exact":
            return float("nan")
        code = self.code_bits if self.keep == "parts" else 0
        return code + self.up_bits + self.second_bits + 2 * per_copy

    def nbytes(self, n: int, itemsize: int, wanted: "Wanted") -> int:
        """Return the bytes saved for `n` elements of `itemsize` bytes, with copies in groups."""
        if self.keep == "exact":
            return n * itemsize * (1 if wanted.h_alone else sum(wanted.kept(self.keep)[1:]))
        code, up, second = wanted.kept(self.keep)
        groups = -(-n // GROUP_SIZE)
        bits = code * self.code_bits + up * self.up_bits + second * self.second_bits
        return packed_size(n, 1) * bits + 4 * groups * (up + second)


class Wanted(NamedTuple):
    """Which results of the backward pass are needed."""

    d_gate: bool
    d_up: bool
    h: bool

    @property
    def h_alone(self) -> bool:
        """Whether only h is needed."""
        return self == (False, False, True)

    def kept(self, keep: Keep) -> tuple[bool, bool, bool]:
        """Return whether to save the code, up or its copy, and the second copy: only what a needed result reads."""
        code = self.d_gate and keep == "parts"
        up = self.d_gate or self.h
        second = self.d_up or self.h or (self.d_gate and keep != "parts")
        return code, up, second


def check_keep(keep: object) -> Keep:
    """Return `keep`; raise `FewbitError` unless it is one of `KEEPS`."""
    if keep not in KEEPS:
        raise FewbitError(f"keep is one of {', '.join(map(repr, KEEPS))}, not {shown(keep)}")
    return keep  # pyright: ignore[reportReturnType]


def check_copy_bits(copy_bits: object) -> tuple[int, int]:
    """Return the bits of the copy of up and of the second copy.

    Raises:
        FewbitError: `copy_bits` is neither an integer from 1 to 8 nor two of them.
    """
    pair: Any = copy_bits if isinstance(copy_bits, Sequence) else (copy_bits, copy_bits)
    if isinstance(pair, str) or len(pair) != 2:
        raise FewbitError(f"copy_bits is an integer from 1 to 8, or two: of up and of act(gate), not {shown(pair)}")
    for bits in pair:
        check_integer("copy_bits", bits, 1, 8)
    return pair[0], pair[1]
