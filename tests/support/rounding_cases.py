"""Tables of kind `stochastic` for tests, and numbers to round by them."""

import fewbit
import torch

# f' smooth, with jumps (SELU, ReLU), and as a wave without end.
TABLES = {
    (name, bits): fewbit.load_table(name, bits, "stochastic", weight="normal:0,1")
    for name in ("gelu", "silu", "selu", "tanh", "relu", "sin")
    for bits in (1, 2, 3, 4)
}
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1e-40, 3.0, -3.0]


def numbers(n, dtype=torch.float32, seed=0):
    """n numbers, the special ones first."""
    x = 3 * torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x[: min(n, len(SPECIAL))] = torch.tensor(SPECIAL[:n])
    return x.to(dtype)
