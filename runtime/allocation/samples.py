"""The bits of the samples of one tensor, by tensor operations alone: the device that holds their sensitivities is not
waited for.

All samples are of one size. The greedy solution of Prob. (10) is then exact, and simple: of all steps by one bit, of
all samples, those of the largest gains w_n · g(b) are taken, as many as the budget allows. As g decreases, a sample's
first steps are among them before its later ones.
"""

import torch
from torch import Tensor

from .problem import LEAST, MOST


def allocate_samples(sensitivity: Tensor, least: int, total: int) -> Tensor:
    """Return numbers of bits, uint8 (N,), that minimize the variance, on the device of the sensitivities.

    Equal gains go to the fewest bits, then to the first sample.

    Args:
        sensitivity: w, floating-point (N,), not negative; one that is not finite counts as 0.
        least: of each sample, if the budget allows it; else 1.
        total: upper bound of the sum of the bits; N if it is below that.

    Example:
        allocate_samples(torch.tensor([9.0, 1.0]), 1, 5) gives [3, 2]
    """
    N = len(sensitivity)
    floor = least if N * least <= total else LEAST
    steps = min(max(total - N * floor, 0), N * (MOST - floor))
    w = sensitivity.nan_to_num(0, 0, 0)
    tops = (1 << torch.arange(floor, MOST + 1, device=w.device)) - 1
    left = tops.to(w.dtype).square().reciprocal()  # of the variance
    gains = torch.outer(left[:-1] - left[1:], w / w.amax().clamp(min=torch.finfo(w.dtype).tiny)) if N else w
    taken = torch.zeros(gains.numel(), dtype=torch.uint8, device=w.device)
    taken.scatter_(0, gains.flatten().sort(descending=True, stable=True).indices[:steps], 1)
    return taken.view(-1, N).sum(0, dtype=torch.uint8) + floor if N else taken
