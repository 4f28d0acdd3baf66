"""Error of the kinds of codes a group may have on what layers of real models save: the evidence against dither.

    python -m fewbit.plots.studies.group_codes -o group-codes.json

The tensors are those of group_levels.py: every input of a layer, and queries, keys, values and probabilities of
attention, fresh and after exact training. A row has, for each kind of codes and number of bits, the squared error
relative to that of the tensor. All are unbiased and take .125 bits an element beside the codes:

    uniform, fitted   between the minimum and the maximum of a group of 256, rounded at random (`PerGroup`)
    dither            the same, but a random number u is added before rounding to nearest and subtracted afterwards, so
                      that the error is that of rounding alone, at no byte, as u is drawn again. Numbers at both ends
                      would leave the codes by u: of 2^b levels one is lost to them.
    rotated           groups of 128, turned at random (`Rotated`)
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ...runtime.quantizers import PerGroup, Rotated
from .. import compact_json
from . import group_levels
from .group_levels import MODELS, record

BITS = (2, 3, 4, 5)
GROUP = 256
_DRAWS, _MOST = 2, 1 << 16  # draws of a tensor, and elements of it

Back = Callable[[Tensor, torch.Generator], Tensor]
"""Returns a tensor (N, D) as it comes back from codes."""


def dithered(x: Tensor, draw: torch.Generator, *, bits: int) -> Tensor:
    """Return `x` (N, D) back from codes of groups with subtractive dither; groups of up to 256 elements of a row."""
    N, D = x.shape
    groups = -(-D // GROUP)
    padded = torch.cat([x, x[:, -1:].expand(N, -D % groups)], 1).view(N, groups, -1)  # in groups of equal size
    low, high = padded.amin(-1, keepdim=True), padded.amax(-1, keepdim=True)
    step = ((high - low) / ((1 << bits) - 2)).clamp(min=1e-30)
    u = torch.rand(padded.shape, generator=draw) - 0.5
    codes = ((padded - low) / step + 0.5 + u).round()
    return (low + (codes - 0.5 - u) * step).view(N, -1)[:, :D]


def _by(quantizer: PerGroup | Rotated, x: Tensor, draw: torch.Generator) -> Tensor:
    if isinstance(quantizer, PerGroup):
        quantizer = quantizer.within(x.shape[-1])
    return quantizer.compress(x, generator=draw).decompress()


KINDS: Mapping[str, Callable[[int], Back]] = {
    "uniform": lambda bits: partial(_by, PerGroup(bits)),
    "fitted": lambda bits: partial(_by, PerGroup(bits, levels="fitted")),
    "dither": lambda bits: partial(dithered, bits=bits),
    "rotated": lambda bits: partial(_by, Rotated(bits)),
}


def measure(name: str, steps: int) -> list[dict[str, Any]]:
    """Return a row for each tensor that is not zero throughout, after so many steps of exact training."""
    rows = []
    for seen in record(name, steps):
        all_rows = seen.rows.float()
        all_rows = all_rows.flatten(0, -2) if seen.by_token else all_rows.flatten(1)
        x = all_rows[: max(1, _MOST // all_rows.shape[1])].contiguous()
        square = float(x.double().square().sum())
        if square:
            row = {"model": name, "steps": steps, "layer": seen.layer, "kind": seen.kind, "of": seen.made_by}
            errors = {kind: [_squared_error(x, back(bits)) / square for bits in BITS] for kind, back in KINDS.items()}
            rows.append({**row, **{kind: [float(f"{e:.3g}") for e in found] for kind, found in errors.items()}})
    return rows


def _squared_error(x: Tensor, back: Back) -> float:
    draw = torch.Generator().manual_seed(0)
    return fmean(float((back(x, draw) - x).double().square().sum()) for _ in range(_DRAWS))


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield median, least and greatest error of each kind of codes and number of bits, and how often it is the least.

    Then the share of tensors in which rotated codes err less than dithered ones, by kind of tensor.
    """
    for i, bits in enumerate(BITS):
        for kind in KINDS:
            of = sorted(row[kind][i] for row in rows)
            first = sum(row[kind][i] <= min(row[other][i] for other in KINDS) for row in rows)
            yield (
                f"{bits} bits {kind:8} {of[len(of) // 2]:.4f}  {of[0]:.4f} to {of[-1]:.4f}, the least of {first} in "
                f"{len(rows)}"
            )
    kinds: dict[str, list[bool]] = {}
    for row in rows:
        name = f"{row['kind']} of {row['of'] or 'a function'}"
        kinds.setdefault(name, []).extend(r < d for r, d in zip(row["rotated"], row["dither"], strict=True))
    for name, better in sorted(kinds.items()):
        yield f"    {name:45} {fmean(better):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models, write the rows and print the errors."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON")
    chosen = parser.parse_args(arguments)
    rows = [row for name in MODELS for steps in (0, group_levels.STEPS) for row in measure(name, steps)]
    compact_json.write(chosen.output, {"rows": rows})
    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    main()
