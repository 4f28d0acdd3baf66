"""Each kernel of a backend on this machine, beside plain torch: what `fewbit doctor` runs.

    for check in checks("cpu"):
        print(check.kernel, outcome(check, "cpu"))

A check calls one function of a backend's module and the function of the same name in `backends.reference`, on the same
device, with the same numbers: some thousands, with the special ones among them. Codes and what is decoded from them are
compared bit for bit; what a library's exponential or the order of a sum may change, to its rounding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..tables import load_table
from ..tables.compiling import NotCompiledError, refused_compilation, silent_compilation
from .backends.reference import activation as activations
from .backends.reference import fixed_point, outlier, per_group, preact, rotated
from .tensors.table_registry import register_table
from .tensors.traits import KINDS, name_of

# Kernels for a GPU are compiled for each dtype and number of bits, which takes a second each.
_BITS = {"cpu": (1, 2, 3, 4, 5, 6, 7, 8), "cuda": (2, 3, 4)}
_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "cuda": (torch.float32, torch.bfloat16),
}
_SIZE = 5003  # the last group of 8 codes and the last block of a kernel are not full
_ROWS, _FEATURES, _GROUP_SIZE = 7, 704, 64
_LOOKED_UP = 1 << 18  # 16-bit numbers, from which on the CPU looks them up in a table of all of them
# 1e30 is beyond float16, 1e-40 below the normal numbers of float32.
_SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1e-40)
_SEED = 2**40 + 1  # both words of a key count

Results = Sequence[Tensor]


@dataclass(frozen=True)
class Check:
    """A kernel with numbers of one dtype and number of bits.

    Attributes:
        family: the file of the kernel in a backend's folder, such as ``per_group``.
        kernel: the function in it.
        dtype: of the numbers.
        bits: in a code; None where there are no codes.
        call: the results of the function of that name in a module, on a device.
        rounding: permitted difference, in roundings of the dtype of the largest result; 0 for bit for bit.
    """

    family: str
    kernel: str
    dtype: torch.dtype
    bits: int | None
    call: Callable[[ModuleType, torch.device], Results]
    rounding: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes:
        state: ``ok``, ``failed``, or ``not compiled``: nothing was run.
        problem: of a failed check, in one line.
        seconds: it took, compilation included.
    """

    state: str
    problem: str = ""
    seconds: float = 0.0


def outcome(check: Check, backend: str, device: str | torch.device | None = None, *, compiles: bool = True) -> Outcome:
    """Run a check of `backend` ("cpu", "cuda") on its device, or on `device`, and compare with plain torch.

    Without `compiles`, a CPU kernel that is not in Numba's cache is not run.
    """
    device = torch.device(device or backend)
    start = time.perf_counter()
    try:
        with silent_compilation() if compiles else refused_compilation():
            ours = check.call(_module(backend, check.family), device)
        problem = _difference(ours, check.call(_module("reference", check.family), device), check.rounding)
    except NotCompiledError:
        return Outcome("not compiled")
    except Exception as error:  # of whatever kind: the report goes on with the next kernel
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Outcome("failed" if problem else "ok", problem, time.perf_counter() - start)


def checks(backend: str) -> Iterator[Check]:
    """Yield the checks of all kernels of "cpu" or "cuda", the kernels of a family one after another."""
    for dtype in _DTYPES[backend]:
        for kernel, call in (("encode", _encode), ("multiply", _multiply), ("activation", _activation)):
            for bits in _BITS[backend]:
                # On a GPU the forward pass has a formula of its own, in place of torch's.
                rounding = 2.0 if (kernel, backend) == ("activation", "cuda") else 0.0
                yield Check("activation", kernel, dtype, bits, partial(call, dtype, bits), rounding)
    for family, kernel, call in _OF_KINDS:
        if kernel == "masked" and backend == "cuda":  # where plain torch serves
            continue
        for dtype in (dtype for dtype in _DTYPES[backend] if dtype in KINDS):
            for bits in _BITS[backend]:
                if kernel == "encode_at_random" and bits > 4:  # tables of more are not of normal numbers
                    continue
                # Sums are added in another order; a GPU's exponential is not torch's.
                rounding = 100.0 if kernel == "through_normalization" else 2.0 if kernel == "forward" else 0.0
                yield Check(family, kernel, dtype, bits, partial(call, dtype, bits), rounding)
    if backend == "cpu":
        for dtype in (torch.float32, torch.float64):
            for kernel, call in (("max_pool", _max_pool), ("max_pool_backward", _max_pool_backward)):
                yield Check("pooling", kernel, dtype, None, partial(call, dtype))


def _module(backend: str, family: str) -> ModuleType:
    return import_module(f"{__package__}.backends.{backend}.{family}")


def _difference(ours: Results, theirs: Results, rounding: float) -> str:
    """Return how two lists of results differ, in one line; empty if they agree."""
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {i} is {name_of(a.dtype)} {tuple(a.shape)}, not {name_of(b.dtype)} {tuple(b.shape)}"
        same = (a == b) | (a.isnan() & b.isnan())
        if bool(same.all()):
            continue
        wide, other = a.double(), b.double()
        largest = float(other[other.isfinite()].abs().max()) if bool(other.isfinite().any()) else 0.0
        allowed = rounding * torch.finfo(a.dtype).eps * largest if a.is_floating_point() else 0.0
        far = ~same & ~((wide - other).abs() <= allowed)
        if bool(far.any()):
            where = int(far.flatten().int().argmax())
            return (
                f"{int(far.sum())} of {far.numel()} numbers of result {i} differ: "
                f"{wide.flatten()[where].item():.9g}, not {other.flatten()[where].item():.9g}"
            )
    return ""


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(n: int, dtype: torch.dtype, device: torch.device, seed: int = 0, special: bool = True) -> Tensor:
    """Return `n` normal numbers of deviation 3, the special ones first; the same on every device."""
    x = 3 * torch.randn(n, generator=torch.Generator().manual_seed(seed))
    if special:
        x[: min(n, len(_SPECIAL))] = torch.tensor(_SPECIAL[:n])
    return x.to(dtype).to(device)


def _image(dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return _numbers(4 * 6 * 15 * 13, dtype, device, seed, special=False).view(4, 6, 15, 13)


def _key(bits: int, kind: str = "shared") -> str:
    weight = "normal:0,1" if kind == "stochastic" else "uniform:-10,10"
    return register_table(load_table("gelu", bits, kind, weight=weight))


# ---- one function for each kernel: its arguments are made by plain torch ---------------------------------------------


def _encode(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    return [module.encode(_numbers(_SIZE, dtype, device), _key(bits))]


def _multiply(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    results = []
    for table in (_key(bits), register_table(load_table("relu", bits))):  # ReLU's has a level of 0
        packed = activations.encode(_numbers(_SIZE, dtype, device), table)
        results.append(module.multiply(_numbers(_SIZE, dtype, device, 1), packed, table))
    return results


def _activation(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    n = _LOOKED_UP if dtype.itemsize == 2 else _SIZE
    # Finite numbers: what torch's own functions make of infinities differs from device to device.
    return module.activation(_numbers(n, dtype, device, special=False), "gelu", (), _key(bits))


def _encode_at_random(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    return [module.encode_at_random(_numbers(_SIZE, dtype, device), _key(bits, "stochastic"), _SEED)]


def _per_group_quantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x = _numbers(_ROWS * _FEATURES, dtype, device).view(_ROWS, _FEATURES)
    found = (module.quantize(x, bits, _GROUP_SIZE, _SEED, 0, levels) for levels in ("uniform", "fitted"))
    return [part for parts in found for part in parts]


def _per_group_dequantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x = _numbers(_ROWS * _FEATURES, dtype, device).view(_ROWS, _FEATURES)
    results = []
    for levels in ("uniform", "fitted"):
        parts = per_group.quantize(x, bits, _GROUP_SIZE, _SEED, 0, levels)
        results.append(torch.empty_like(x))
        module.dequantize(*parts, bits, _GROUP_SIZE, results[-1], levels)
    return results


def _rotated_quantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x = _numbers(_ROWS * _FEATURES, dtype, device).view(_ROWS, _FEATURES)
    return module.quantize(x, bits, 128, 2, True, _SEED)


def _rotated_dequantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x = _numbers(_ROWS * _FEATURES, dtype, device).view(_ROWS, _FEATURES)
    module.dequantize(*rotated.quantize(x, bits, 128, 2, True, _SEED), bits, 128, 2, _SEED, out := torch.empty_like(x))
    return [out]


def _channels(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scales and shifts of the six channels of an image."""
    scale, shift = (_numbers(6, torch.float32, device, seed, special=False) for seed in (2, 3))
    return scale, shift


def _fixed_point_quantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    return [module.quantize(_image(dtype, device), *_channels(device), 15 * 13, bits)]


def _fixed_point_dequantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x, (scale, shift) = _image(dtype, device), _channels(device)
    packed = fixed_point.quantize(x, scale, shift, 15 * 13, bits)
    module.dequantize(packed, scale, shift, 15 * 13, bits, out := torch.empty_like(x))
    return [out]


def _outlier_quantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x = _numbers(_SIZE, dtype, device)
    found = (module.quantize(x, bits, 0.02, relu, None, 1) for relu in (False, True))
    return [part for parts in found for part in parts]


def _outlier_dequantize(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x = _numbers(_SIZE, dtype, device)
    results = []
    for relu in (False, True):
        parts = outlier.quantize(x, bits, 0.02, relu, None, 1)
        results.append(torch.empty_like(x))
        module.dequantize(*parts, bits, relu, results[-1])
    return results


def _masked(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    packed, *_ = outlier.quantize(_numbers(_SIZE, dtype, device), bits, 0.02, True, None, 1)
    return [module.masked(_numbers(_SIZE, dtype, device, 1), packed, bits)]


def _glu_plan(bits: int) -> tuple[str, tuple[float, ...], str, int, int, bool]:
    return "silu", (), register_table(load_table("silu", bits)), bits, bits, False


def _glu_forward(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    gate, up = (_numbers(_SIZE, dtype, device, seed, special=False) for seed in (4, 5))
    h, codes, up_packed, _, groups = module.forward(gate, up, (_SEED, _SEED + 1), *_glu_plan(bits))
    return [h, codes, up_packed, groups[:2]]  # the copy of act(gate) has its roundings


def _glu_backward(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    gate, up, grad = (_numbers(_SIZE, dtype, device, seed, special=False) for seed in (4, 5, 6))
    _, *parts = _module("reference", "glu").forward(gate, up, (_SEED, _SEED + 1), *_glu_plan(bits))
    return module.backward(grad, tuple(parts), *_glu_plan(bits), (True, True, True))


def _preact_encode(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    A, (γ, β) = _image(dtype, device), _channels(device)
    packed = module.encode(A, A, γ, β, torch.zeros_like(γ), torch.ones_like(γ), bits, 0.0)
    return [packed, A]


def _preact_decode(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    A, (γ, β) = _image(dtype, device), _channels(device)
    packed = preact.encode(A, A, γ, β, torch.zeros_like(γ), torch.ones_like(γ), bits, 0.0)
    out = torch.empty_like(A)
    decoded = module.decode(packed, γ, β, bits, 0.0, out)
    return [out if decoded is None else decoded]


def _preact_backward(dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    A, gradient, (γ, β) = _image(dtype, device), _image(dtype, device, 1), _channels(device)
    one = torch.ones_like(γ)
    packed = preact.encode(A, A, γ, β, torch.zeros_like(γ), one, bits, 0.0)
    *dx, dβ, dγ = module.through_normalization(packed, γ, β, bits, 0.0, gradient, one, True, True)
    return [dx[0] if dx else gradient, dβ.float(), dγ.float()]


def _max_pool(dtype: torch.dtype, module: ModuleType, device: torch.device) -> Results:
    return module.max_pool(_image(dtype, device), (3, 2), (2, 2), (1, 0), (1, 1), False)


def _max_pool_backward(dtype: torch.dtype, module: ModuleType, device: torch.device) -> Results:
    x, window = _image(dtype, device), ((3, 2), (2, 2), (1, 0), (1, 1))
    y, places = _module("reference", "pooling").max_pool(x, *window, False)
    grad = _numbers(y.numel(), dtype, device, 1, special=False).view(y.shape)
    return [module.max_pool_backward(grad, places, x.shape, *window)]


_OF_KINDS: tuple[tuple[str, str, Callable[..., Results]], ...] = (
    ("rounding", "encode_at_random", _encode_at_random),
    ("per_group", "quantize", _per_group_quantize),
    ("per_group", "dequantize", _per_group_dequantize),
    ("rotated", "quantize", _rotated_quantize),
    ("rotated", "dequantize", _rotated_dequantize),
    ("fixed_point", "quantize", _fixed_point_quantize),
    ("fixed_point", "dequantize", _fixed_point_dequantize),
    ("outlier", "quantize", _outlier_quantize),
    ("outlier", "dequantize", _outlier_dequantize),
    ("outlier", "masked", _masked),
    ("glu", "forward", _glu_forward),
    ("glu", "backward", _glu_backward),
    ("preact", "encode", _preact_encode),
    ("preact", "decode", _preact_decode),
    ("preact", "through_normalization", _preact_backward),
)
