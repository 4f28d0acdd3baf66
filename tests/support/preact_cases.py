"""Pre-activation layers' codes and what becomes of them, for the tests of their kernels."""

import torch
from fewbit.runtime.layers.preact.function import PreActCodes, compress
from fewbit.runtime.tensors.spec import TensorSpec

LAYOUTS = {
    "planes": (3, 5, 7, 9),
    "large planes": (3, 4, 40, 40),
    "channels last": (3, 5, 7, 9),
    "many channels last": (9, 70, 2, 3),
    "matrix": (70, 40),
    "one channel": (4, 1, 6, 6),
    "one element a channel": (1, 6, 1, 1),
}
KERNELS = ["tabulate", "encode", "tabulate", "decode", "tabulate", "sums", "finish", "normalize"]


def through_a_layer(A, x, γ, β, mean, r, bits, slope, gradient, by_batch=True, into_input=True):
    """All that a layer has of its codes: they themselves, A₃, Ã₃ and the gradients of x, γ and β."""
    A, gradient = A.clone(memory_format=torch.preserve_format), gradient.clone(memory_format=torch.preserve_format)
    form = TensorSpec.of(A)
    packed = compress(A, x, γ, β, mean, r, bits, slope)
    codes = PreActCodes(packed, form, γ, β, bits, slope)
    return packed, A, codes.activated(), *codes.through_normalization(gradient, r, by_batch, into_input)


def case(name, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    layout = torch.channels_last if "last" in name else torch.contiguous_format
    shape = LAYOUTS[name]
    x, gradient = (torch.randn(shape, generator=g).to(dtype).contiguous(memory_format=layout) for _ in range(2))
    C = shape[1]
    γ, β, mean, r = (torch.randn(C, generator=g) for _ in range(4))
    γ[::3] = 0  # there codes are of what was normalized
    β[1::4] = -9.0
    form = [1, C] + [1] * (len(shape) - 2)
    normal = (x.float() - mean.view(form)) * r.abs().view(form)
    A = (normal * γ.view(form) + β.view(form)).to(dtype).contiguous(memory_format=layout)
    return A, x, γ, β, mean, r.abs(), gradient
