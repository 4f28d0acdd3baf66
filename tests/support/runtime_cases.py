"""What the tests of the runtime share: activations beside torch's own, layouts, awkward numbers, equality of bits."""

import numpy as np
import torch
from fewbit.runtime.activations.dispatch import key_for
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.runtime.tensors.levels import register_table, table_of
from fewbit.tables import Table
from torch import nn

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Class name in torch.nn and in fewbit, with arguments that both take.
ACTIVATIONS = [
    *(("ReLU", {}), ("ReLU6", {}), ("LeakyReLU", {}), ("LeakyReLU", {"negative_slope": 0.3}), ("ELU", {})),
    *(("ELU", {"alpha": 0.7}), ("CELU", {"alpha": 2.0}), ("SELU", {}), ("GELU", {})),
    *(("GELU", {"approximate": "tanh"}), ("SiLU", {}), ("Mish", {}), ("Softplus", {})),
    *(("Softplus", {"beta": 2.0, "threshold": 5.0}), ("Softsign", {}), ("Sigmoid", {}), ("LogSigmoid", {})),
    *(("Tanh", {}), ("Tanhshrink", {}), ("Hardtanh", {}), ("Hardtanh", {"min_val": -0.7, "max_val": 0.1})),
    *(("Hardsigmoid", {}), ("Hardswish", {}), ("Hardshrink", {}), ("Hardshrink", {"lambd": 0.3}), ("Softshrink", {})),
    ("Threshold", {"threshold": 0.1, "value": 20}),
]
ACTIVATION_IDS = [name + "".join(f"-{v}" for v in arguments.values()) for name, arguments in ACTIVATIONS]
# Those whose derivative one bit holds.
EXACT = ("ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Hardsigmoid", "Hardshrink", "Softshrink", "Threshold")
# Those that torch has in place.
INPLACE = [
    *(("ReLU", {}), ("ReLU6", {}), ("LeakyReLU", {}), ("ELU", {}), ("CELU", {}), ("SELU", {}), ("SiLU", {})),
    *(("Mish", {}), ("Hardtanh", {"max_val": 0.7}), ("Hardsigmoid", {}), ("Hardswish", {})),
    ("Threshold", {"threshold": 0.1, "value": 20}),
]
INPLACE_IDS = [name for name, _ in INPLACE]


def function_name(name):
    """What torch.nn.functional and fewbit.functional call the function of a module."""
    return "leaky_relu" if name == "LeakyReLU" else name.lower()


def parameters_of(function):
    """Values for the parameters of a function in FORWARDS: torch's defaults, and some where it has none."""
    values = {"threshold": 0.5, "value": -2.0}
    return [values[name] if default is None else default for name, default in FORWARDS[function].parameters]


def _channels_last(x):
    return x.view(2, 3, 5, 7).to(memory_format=torch.channels_last)


# Name -> (elements needed, view of that many elements).
DENSE = {
    "contiguous": (210, lambda x: x.view(7, 30)),
    "odd": (211, lambda x: x),
    "scalar": (1, lambda x: x.view(())),
    "empty": (0, lambda x: x.view(0, 3)),
    "transposed": (210, lambda x: x.view(7, 30).t()),
    "permuted": (210, lambda x: x.view(5, 6, 7).permute(2, 0, 1)),
    "channels-last": (210, _channels_last),
    "size-one": (30, lambda x: x.view(5, 1, 6).permute(2, 1, 0)),
    "size-one-of-stride-0": (30, lambda x: x.as_strided((5, 1, 6), (6, 0, 1))),
    "offset": (211, lambda x: x[1:]),
}
NOT_DENSE = {
    "strided": (420, lambda x: x[::2]),
    "sliced": (210, lambda x: x.view(7, 30)[:, 3:20]),
    "transposed-sliced": (210, lambda x: x.view(7, 30).t()[2:, 1:]),
    "channels-last-sliced": (210, lambda x: _channels_last(x)[:, 1:, :, ::2]),
    "expanded": (30, lambda x: x.view(1, 30).expand(7, 30)),
    "expanded-inside": (35, lambda x: x.view(5, 1, 7).expand(5, 6, 7)),
    "overlapping": (40, lambda x: x.as_strided((5, 8), (3, 1))),
}
LAYOUTS = DENSE | NOT_DENSE
# Those whose strides torch's own functions agree on: `empty_like` keeps a stride of 0, `relu` does not.
SETTLED = {name: case for name, case in LAYOUTS.items() if name != "size-one-of-stride-0"}


def normal(n, dtype, seed=0):
    """n normal numbers of deviation 4."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(4).to(dtype)


def laid_out(layout, dtype, seed=0, special=True):
    """Normal values of some spread, a NaN and infinities among them if `special`, in one of `LAYOUTS`."""
    n, view = LAYOUTS[layout]
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4
    if n > 4 and special:
        values[1], values[2], values[n - 1], values[3] = torch.nan, torch.inf, -torch.inf, 0
    return view(values.to(dtype))


def reverse(x):
    return x.permute(tuple(reversed(range(x.dim()))))


def gradient_layouts(y, seed=1):
    """Gradients of the shape of `y` as they come: like y, row-major, column-major, expanded."""
    values = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
    yield "like y", torch.empty_like(y).copy_(values)
    yield "row-major", values
    yield "column-major", reverse(reverse(values).contiguous())
    yield "expanded", torch.tensor(1.5, dtype=y.dtype).expand(y.shape)


def bits_of(x):
    """The elements of `x` as integers, in the shape of `x`; one integer stands for every NaN."""
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).contiguous().view(INTEGERS[x.element_size()])


def assert_same_bits(a, b):
    """a and b are equal bit for bit, −0 and +0 told apart; a NaN is a NaN."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    unequal = bits_of(a) != bits_of(b)
    assert not unequal.any(), f"{int(unequal.sum())} differ, first {a[unequal][0].item()} and {b[unequal][0].item()}"


def product(grad, levels):
    """gradient × level as it is specified: rounded once, 16 bits by way of float32; a level of 0 selects 0."""
    arithmetic = torch.float64 if grad.dtype == torch.float64 else torch.float32
    levels = torch.as_tensor(levels, dtype=torch.float64).to(arithmetic)
    return torch.where(levels == 0, 0, grad.to(arithmetic) * levels).to(grad.dtype)


def expected_gradient(table, x, grad):
    """grad · table(x): what the backward pass must return."""
    return product(grad, torch.as_tensor(table(x.detach().double().numpy())))


def table_of_bits(bits, kind="shared", m=None, seed=0):
    """A table of 2^bits random levels: of m intervals, twice as many as levels where they are shared."""
    random = np.random.default_rng(seed + bits)
    K = 1 << bits
    m = m or (K if kind == "interval" else 2 * K)
    codes = np.arange(K) if kind == "interval" else random.integers(0, K, m)
    boundaries = np.sort(random.normal(0, 4, m - 1))
    return Table("gelu", kind, "uniform:-10,10", boundaries, codes, random.normal(0.5, 0.5, K), 1.0)


def table_with(boundaries, seed=0):
    """A shared table with these boundaries and 256 random levels, one of them huge and one subnormal."""
    random = np.random.default_rng(seed)
    levels = random.normal(0.5, 0.5, 256)
    levels[:4] = 1e30, 1e-42, -0.0, 3e-8
    codes = random.integers(0, 256, len(boundaries) + 1)
    return Table("gelu", "shared", "uniform:-10,10", boundaries, codes, levels, 1.0)


def key_of(table):
    return register_table(table)


def around(boundaries, dtype):
    """Numbers of `dtype` at, one step below and one step above each boundary, and all that is special."""
    boundaries = np.asarray(boundaries, dtype=np.float64)
    exact = torch.from_numpy(boundaries.copy()).to(dtype)
    integers = INTEGERS[exact.element_size()]
    steps = [(exact.view(integers) + i).view(dtype) for i in (-1, 0, 1)]
    limits = torch.finfo(dtype)
    quiet = torch.tensor([torch.nan], dtype=dtype)
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, limits.max, limits.min, limits.tiny, -limits.tiny], dtype=dtype
    )
    smallest = torch.tensor([1], dtype=integers).view(dtype)  # the least subnormal
    return torch.cat([*steps, special, quiet, negative_nan(dtype), smallest, -smallest])


def negative_nan(dtype):
    integers = INTEGERS[dtype.itemsize]
    return (torch.tensor([torch.nan], dtype=dtype).view(integers) | torch.iinfo(integers).min).view(dtype)


def all_halves(dtype):
    """Every number of a 16-bit type, NaN by all its names."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def table_in(module, dtype):
    """The table that a module uses for x of `dtype`: where f' jumps at 0.1, float32 has another."""
    if module._one_table:
        return module.table
    return table_of(key_for(dtype, module._function, module._parameters_of_function))


def pair(name, arguments, inplace=False, **fewbit_arguments):
    """fewbit's module and torch's."""
    import fewbit

    if inplace:
        arguments = {**arguments, "inplace": True}
    return getattr(fewbit, name)(**arguments, **fewbit_arguments), getattr(nn, name)(**arguments)
