"""What the tests of the quantizers share: tensors of every shape, layout and kind, the way to the reference."""

from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FAMILIES = ("per_group", "fixed_point", "outlier", "rotated")
_MODULES = {
    import_module(f"fewbit.runtime.quantizers.{name}"): import_module(f"fewbit.runtime.backends.reference.{name}")
    for name in _FAMILIES
}


@contextmanager
def reference():
    """Inside, quantizers run in plain torch."""
    with ExitStack() as stack:
        for module, plain in _MODULES.items():
            stack.enter_context(patch.object(module, "cpu", plain))
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _layouts(x):
    """Views of `x`, dense and not."""
    yield x
    if x.dim() > 1:
        yield x.transpose(0, -1)
        yield x.transpose(1, -1)
        yield x[:, ::2]
        yield x.unsqueeze(1).expand(x.shape[0], 3, *x.shape[1:])
        yield with_one_of_stride(x, 0)
        yield with_one_of_stride(x, 1)
    if x.dim() == 4:
        yield x.contiguous(memory_format=torch.channels_last)
    if x.dim() > 0:
        yield x[1:]
        yield x[::2]


def with_one_of_stride(x, stride):
    """`x` with a second dimension of one element that has this stride, which means nothing: it is dense if `x` is."""
    shape, strides = (x.shape[0], 1, *x.shape[1:]), (x.stride(0), stride, *x.stride()[1:])
    return x.as_strided(shape, strides)


KINDS = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "offset": lambda n, g: 100.25 + torch.rand(n, generator=g),
    "constant": lambda n, g: torch.full((n,), -0.1),
    "two": lambda n, g: torch.randint(0, 2, (n,), generator=g).double() - 0.25,
    "relu": lambda n, g: torch.randn(n, generator=g).relu(),
    "wide": lambda n, g: torch.randn(n, generator=g) * torch.exp2(torch.randint(-20, 12, (n,), generator=g).double()),
    "huge": lambda n, g: torch.randn(n, generator=g).double() * 1e38,
    "tiny": lambda n, g: torch.randn(n, generator=g).double() * 1e-42,
}


@st.composite
def tensors(draw, kinds=tuple(KINDS), special=False, dtypes=DTYPES, min_dim=0):
    """A tensor of some hundred elements at most; with `special`, NaN and infinities may be among them."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 0, 17]), min_size=min_dim, max_size=4))
    if len(shape) == 1:
        shape = [shape[0] * draw(st.integers(1, 40))]
    while torch.Size(shape).numel() > 2000:
        shape[shape.index(max(shape))] = 1
    g = generator(draw(st.integers(0, 2**31)))
    values = KINDS[draw(st.sampled_from(kinds))](torch.Size(shape).numel(), g).to(draw(st.sampled_from(dtypes)))
    if special and values.numel():
        for value in draw(st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0, -0.0]), max_size=4)):
            values[draw(st.integers(0, values.numel() - 1))] = value
    return draw(st.sampled_from(list(_layouts(values.view(shape)))))


def is_dense(x):
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.permute(order).is_contiguous()


def check_form(y, x):
    """`y` has the shape, dtype, device of `x`, its strides where it is dense, and memory of its own."""
    assert (y.shape, y.dtype, y.device, y.requires_grad) == (x.shape, x.dtype, x.device, False)
    assert y.stride() == (x.stride() if x.is_contiguous() or is_dense(x) else x.clone().stride())
    assert y.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def same_bits(a, b):
    """Whether two tensors agree bit for bit, one NaN like another."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    return bool(((a.contiguous().view(integer) == b.contiguous().view(integer)) | nan).all())


# Deviations and means of a channel: usual ones, and all that are awkward.
_PARAMETERS = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, 1e-3, 1e-30, 1e-38, 1e-44, -1e-44, 1e30, 3e38, -3e38]),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
)


@st.composite
def fixed_point_cases(draw, **kinds):
    """A tensor with channels, γ and β, its bits, and the dimension of the channels."""
    x = draw(tensors(min_dim=1, **kinds))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    C = x.shape[dim]
    γ, β = (torch.tensor(draw(st.lists(_PARAMETERS, min_size=C, max_size=C)), dtype=torch.float32) for _ in range(2))
    if draw(st.booleans()):  # what a normalization puts out
        form = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
        x = (x.double() * γ.view(form) + β.view(form)).to(x.dtype)
    return x, γ, β, draw(st.integers(1, 8)), dim


# Arguments of `Outlier`, and the parts of what it compressed.
RATIOS = st.sampled_from([0, 0.02, 0.1, 0.5, 1.0, 1])
VALUES = st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32])
OUTLIER_PARTS = ("packed", "counts", "offsets", "values", "levels")
OUTLIER_KINDS = (
    *("normal", "relu", "constant", "two", "sorted", "periodic", "sparse", "special", "nans", "all nan", "zero"),
)


def outlier_numbers(kind, n):
    """At least 10,001 numbers whose largest are easy to find, or hard."""
    x = KINDS[kind](n, generator()).float() if kind in KINDS else torch.randn(n, generator=generator())
    if kind == "sorted":
        x = x.sort().values
    elif kind == "periodic":  # in step with a sample of every fourth
        x[::4] = 0.001
    elif kind == "sparse":
        x[torch.rand(n, generator=generator()) < 0.99] = 0
    elif kind == "special":
        x[5], x[77], x[10_000], x[n - 1] = torch.nan, -torch.nan, torch.inf, -torch.inf
    elif kind == "nans":  # of every payload and both signs, and they rank alike
        payloads = torch.randint(0x7F800001, 0x7FFFFFFF, (n,), generator=generator())
        signs = torch.randint(-1, 1, (n,), generator=generator()) << 31
        x = torch.where(torch.arange(n) % 7 > 0, x, (payloads | signs).int().view(torch.float32))
    elif kind == "all nan":
        x[:] = torch.nan
    elif kind == "zero":
        x[:] = 0
    return x
