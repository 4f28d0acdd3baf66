"""What rotated codes are made of: the levels of normal numbers, the groups of a row, and how a group is turned.

A row of D elements is cut into groups of G, a power of two; of what is left into groups of G/2, G/4, … down to 64, as
many as it holds; and the fewer than 64 elements that remain are a group of their own. A group of g elements is turned
by *passes*: each flips the signs of elements and then takes sums and differences (butterflies of Walsh and Hadamard) of
p elements, p the largest power of two in g. Where p = g a turn is one pass over the whole group; else three, over the
first p, the last p and the first p again, so that all elements meet, and each divides its result by √p.

Signs are Philox's bits (philox.py) under the tensor's seed, that of element i of a group bit i mod 32 of word i div 32:

    first pass           of all elements of group k: the counters from k·⌈G/128⌉ on, so each group has its own
    pass m = 1, 2, …     of its p elements: the counters from 2^62 + 2m on, shared by all groups of the tensor
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import erf, exp, inf, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from ...tables import FewbitError
from ...tables.errors import shown

GROUP_SIZES = (64, 128, 256)
LARGEST_GROUP = GROUP_SIZES[-1]
LEAST_PIECE = 64  # shorter groups keep more bias beside a dominant entry (.1 to 1 % of |x|² at 32)
SHARED = 1 << 62
SIGNS = 128  # of a counter


@dataclass(frozen=True)
class Piece:
    """Consecutive groups of one size in a row.

    Attributes:
        start: of the first, in elements.
        size: g.
        count: number of groups.
        first: index of the first among the groups of the row.
    """

    start: int
    size: int
    count: int
    first: int

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The elements [from, to) that the passes of one turn combine."""
        p = 1 << (self.size.bit_length() - 1)
        return ((0, p),) if p == self.size else ((0, p), (self.size - p, self.size), (0, p))


def check_group_size(group_size: object) -> None:
    """Raise FewbitError unless `group_size` is 64, 128 or 256."""
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        raise FewbitError(f"group_size is one of {', '.join(map(str, GROUP_SIZES))}, not {shown(group_size)}")


def pieces(D: int, G: int) -> Iterator[Piece]:
    """Return the groups of a row of D elements by their sizes."""
    start, first, size = 0, 0, G
    while start < D:
        left = D - start
        while size > max(left, LEAST_PIECE):
            size //= 2
        size = min(size, left)
        count = left // size
        yield Piece(start, size, count, first)
        start, first = start + count * size, first + count


def groups_of(D: int, G: int) -> int:
    """Return the number of groups of a row of D elements: what is left of groups of G is cut by its binary digits."""
    count, left, size = D // G, D % G, G // 2
    while size >= LEAST_PIECE:
        count, left, size = count + left // size, left % size, size // 2
    return count + (left + LEAST_PIECE - 1) // LEAST_PIECE


@cache
def positive_levels(bits: int) -> NDArray[np.float32]:
    """Return the positive half of the 2^bits levels, ascending, each a number of bfloat16; the others mirror them.

    They are the optimal table of f'(t) = t, ``fewbit.solve(lambda x: x * x / 2, bits=bits, derivative=lambda t: t,
    weight="normal:0,1")``: for a normal distribution there is one best quantizer, that of Lloyd and Max.
    """
    patterns = np.frombuffer(bytes.fromhex(_LEVELS[bits]), ">u2").astype(np.uint32) << 16
    return patterns.view(np.float32)


@cache
def positive_edges(bits: int) -> NDArray[np.float32]:
    """Return the boundaries above 0, each half way between two levels, exactly."""
    levels = positive_levels(bits)
    return np.multiply(levels[1:] + levels[:-1], np.float32(0.5), dtype=np.float32)


@cache
def relative_variance(bits: int) -> float:
    """Return E|ĥ − h|² of |h|² for a turned group, whose numbers r are normal: E L² / (E rL)² − 1, L the level of r."""
    edges = [0.0, *positive_edges(bits).tolist(), inf]
    product = square = 0.0
    for level, low, high in zip(positive_levels(bits).tolist(), edges, edges[1:], strict=False):
        product += 2 * level * (exp(-low * low / 2) - exp(-high * high / 2)) / sqrt(2 * pi)
        square += level * level * (erf(high / sqrt(2)) - erf(low / sqrt(2)))
    return square / product**2 - 1


# bits: four hexadecimal digits a level, the upper half of a float32.
_LEVELS = {
    1: "3f4c",
    2: "3ee83fc1",
    3: "3e7b3f423fac400a",
    4: "3e033ec73f283f713fa13fcf4004402f",
    5: "3d873e4b3eaa3eef3f1b3f3f3f653f863f9b3fb13fca3fe540024014402c4051",
    6: (
        "3d093dcd3e2b3e703e9b3ebe3ee13f023f143f263f393f4c3f5f3f723f833f8e3f983fa33faf3fbb3fc73fd43fe23ff1"
        "400140094013401e402b403b404f4070"
    ),
    7: (
        "3c8a3d4f3dac3df13e1b3e3e3e613e823e933ea53eb63ec83eda3eeb3efd3f083f113f1a3f233f2c3f363f3f3f483f52"
        "3f5c3f663f6f3f7a3f823f873f8c3f923f973f9c3fa23fa83fad3fb33fb93fc03fc63fcc3fd33fda3fe13fe83ff03ff8"
        "400040044009400e40134018401e4024402a4032403a4044404f405d406f4086"
    ),
    8: (
        "3c0a3cd03d2d3d723d9c3dbe3de13e023e133e253e363e473e593e6a3e7c3e873e8f3e983ea13eaa3eb23ebb3ec43ecd"
        "3ed63edf3ee83ef13efa3f013f063f0a3f0f3f143f183f1d3f213f263f2b3f2f3f343f393f3d3f423f473f4c3f513f55"
        "3f5a3f5f3f643f693f6e3f733f783f7d3f813f843f863f893f8b3f8e3f913f933f963f993f9c3f9e3fa13fa43fa73faa"
        "3fad3fb03fb33fb63fb93fbc3fbf3fc23fc53fc93fcc3fcf3fd23fd63fd93fdd3fe03fe43fe83fec3fef3ff33ff73ffb"
        "40004002400440064009400b400d4010401240154018401a401d402040244027402a402e40324036403a403f40434049"
        "404f4055405c4065406f407b40864093"
    ),
}
