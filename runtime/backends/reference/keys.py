"""Seeds of rounding from fewbit's stream, on the host (tensors/philox.py)."""

import torch
from torch import Tensor

from ...tensors.philox import draw_seed


def draw(x: Tensor, count: int) -> Tensor:
    """Return the next `count` seeds, int64 (count,): on the CPU, or beside `x` if that is on a GPU."""
    seeds = torch.tensor([draw_seed() for _ in range(count)], dtype=torch.int64, device="cpu")
    return seeds.to(x.device) if x.device.type == "cuda" else seeds
