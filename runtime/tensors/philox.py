"""Philox4x32-7: random numbers by position in the tensor, the same on every device.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter of 128
bits and a key of 64 into 128 random bits, in rounds of multiplying and mixing: seven rounds are the fewest of this
generator that pass the authors' tests (BigCrush), and take a third less time than their usual ten. No state is carried
from one number to the next, so any thread can draw its own. This file is the specification, in plain torch; kernels
must give these bits.

Eight consecutive codes, a group of the packing, share a counter: 16 bits for each code, the lowest 16 bits of word 0
for element 0 of the group. What `torch.compile` saves is rounded by fewer: `rotated_halves`.
"""

import torch
from torch import Tensor

from ...tables import FewbitError
from .capture import is_capturing
from .key_stream import next_key

NEAREST = -1  # in place of a key, where codes are rounded to nearest
ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
GOLDEN_RATIO = 40503  # (√5 − 1)/2 of 2^16

Seed = int | Tensor
"""A key: a number, or int64 () on the device that draws from it, where nobody waits for its value."""


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return a key from 0 to 2^63 − 1: the next of the stream (key_stream.py), or one drawn from `generator`.

    After the same `torch.manual_seed` the keys are those that GPUs draw (backends/cuda/keys.py).
    """
    return next_key() if generator is None else int(seed_from(generator))


def seed_from(generator: torch.Generator) -> Tensor:
    """Return a key drawn from `generator`, int64 (1,) on its device, which is not waited for."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=generator.device, generator=generator)


def seed_beside(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a key drawn from `generator`, int64 (1,): on the device of `x` if it is drawn there, else on the CPU.

    Raises:
        FewbitError: a CUDA graph is being captured, all of whose replays would round by that one key.
    """
    drawn = seed_from(generator)
    if drawn.device == x.device:
        return drawn
    if is_capturing():
        raise FewbitError(f"a CUDA graph would round by one key in all its replays: give a generator on {x.device}")
    return drawn.cpu()


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Seed, Seed]) -> tuple[Tensor, ...]:
    """Return four words of random bits for each counter of four words, under a key of two.

    Args:
        counter: int64, each element from 0 to 2^32 − 1; the lowest word first.
        key: two words, each from 0 to 2^32 − 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2^64: the sign of int64 is its highest bit
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def random_halves(seed: Seed, groups: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each of the 8 codes of `groups` groups: int32 (groups, 8), from 0 to 65,535."""
    index = torch.arange(groups, device=device)
    zero = torch.zeros_like(index)
    words = philox((index & MASK, index >> 32, zero, zero), (seed & MASK, seed >> 32))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).to(torch.int32)


def rotated_halves(seed: Seed, groups: int, group_size: int, device: torch.device) -> Tensor:
    """Return 16 bits for each element of `groups` groups of the quantizer: int32 (groups, G), from 0 to 65,535.

    Only the first of a group is drawn, group g's as `random_halves` has it for code g. From element to element it is
    rotated by the golden ratio: each is uniform, and those of a group lie evenly.
    """
    first = random_halves(seed, -(-groups // 8), device).view(-1)[:groups].unsqueeze(1)
    return first + torch.arange(group_size, device=device) * GOLDEN_RATIO & 0xFFFF
