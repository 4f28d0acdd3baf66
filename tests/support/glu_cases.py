"""What the tests of the gated linear units share."""

import torch
from fewbit import functional as fewbit_functional
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Name -> (few-bit function, eager act).
UNITS = {
    "swiglu": (fewbit_functional.swiglu, F.silu),
    "geglu": (fewbit_functional.geglu, F.gelu),
    "reglu": (fewbit_functional.reglu, F.relu),
    "glu": (fewbit_functional.glu, torch.sigmoid),
}


def pair(shape, dtype=torch.float32, seed=0):
    """gate and up, standard normal, that ask for gradients."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=draw).to(dtype).requires_grad_() for _ in range(2))


def grads(y, inputs, seed=9):
    draw = torch.Generator().manual_seed(seed)
    return torch.autograd.grad(y, inputs, torch.randn(y.shape, generator=draw).to(y))


def relative(ours, exact):
    """Root mean square of the difference, over that of `exact`."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def same(a, b):
    """Whether two tensors are equal bit for bit, NaN for NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def kept_bytes(function, *inputs):
    """Bytes of what a call saves for backward, each storage once, and what it returned."""
    saved = {}

    def pack(t):
        saved[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function(*inputs)
    return sum(t.untyped_storage().nbytes() for t in saved.values()), y
