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
from .tensors.levels import register_table
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
        for kernel in ("encode", "multiply", "activation"):
            for bits in _BITS[backend]:
                # On a GPU the forward pass has a formula of its own, in place of torch's.
                rounding = 2.0 if (kernel, backend) == ("activation", "cuda") else 0.0
                yield Check("activation", kernel, dtype, bits, partial(_activation, kernel, dtype, bits), rounding)
    for family, (call, kernels) in _OF_KINDS.items():
        for kernel in kernels:
            if kernel == "masked" and backend == "cuda":  # where plain torch serves
                continue
            for dtype in (dtype for dtype in _DTYPES[backend] if dtype in KINDS):
                for bits in _BITS[backend]:
                    if kernel == "encode_at_random" and bits > 4:  # tables of more are not of normal numbers
                        continue
                    # Sums are added in another order; a GPU's exponential is not torch's.
                    rounding = {"through_normalization": 100.0, "forward": 2.0}.get(kernel, 0.0)
                    yield Check(family, kernel, dtype, bits, partial(call, kernel, dtype, bits), rounding)
    if backend == "cpu":
        for dtype in (torch.float32, torch.float64):
            for kernel in ("max_pool", "max_pool_backward"):
                yield Check("pooling", kernel, dtype, None, partial(_pooling, kernel, dtype))


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


# ---- one function for each family: the arguments of its kernels are made by plain torch ------------------------------


def _activation(kernel: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    if kernel == "encode":
        return [module.encode(_numbers(_SIZE, dtype, device), _key(bits))]
    if kernel == "activation":
        n = _LOOKED_UP if dtype.itemsize == 2 else _SIZE
        # Finite numbers: what torch's own functions make of infinities differs from device to device.
        return module.activation(_numbers(n, dtype, device, special=False), "gelu", (), _key(bits))
    results = []
    for table in (_key(bits), register_table(load_table("relu", bits))):  # ReLU's has a level of 0
        packed = activations.encode(_numbers(_SIZE, dtype, device), table)
        results.append(module.multiply(_numbers(_SIZE, dtype, device, 1), packed, table))
    return results


def _rounding(_: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    return [module.encode_at_random(_numbers(_SIZE, dtype, device), _key(bits, "stochastic"), _SEED)]


def _per_group(kernel: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x, results = _numbers(_ROWS * _FEATURES, dtype, device).view(_ROWS, _FEATURES), list[Tensor]()
    for levels in ("uniform", "fitted"):
        if kernel == "quantize":
            results += module.quantize(x, bits, _GROUP_SIZE, _SEED, 0, levels)
        else:
            parts = per_group.quantize(x, bits, _GROUP_SIZE, _SEED, 0, levels)
            results.append(torch.empty_like(x))
            module.dequantize(*parts, bits, _GROUP_SIZE, results[-1], levels)
    return results


def _rotated(kernel: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x = _numbers(_ROWS * _FEATURES, dtype, device).view(_ROWS, _FEATURES)
    if kernel == "quantize":
        return module.quantize(x, bits, 128, 2, True, _SEED)
    module.dequantize(*rotated.quantize(x, bits, 128, 2, True, _SEED), bits, 128, 2, _SEED, out := torch.empty_like(x))
    return [out]


def _channels(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scales and shifts of the six channels of an image."""
    scale, shift = (_numbers(6, torch.float32, device, seed, special=False) for seed in (2, 3))
    return scale, shift


def _fixed_point(kernel: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x, (scale, shift) = _image(dtype, device), _channels(device)
    if kernel == "quantize":
        return [module.quantize(x, scale, shift, 15 * 13, bits)]
    packed = fixed_point.quantize(x, scale, shift, 15 * 13, bits)
    module.dequantize(packed, scale, shift, 15 * 13, bits, out := torch.empty_like(x))
    return [out]


def _outlier(kernel: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    x, results = _numbers(_SIZE, dtype, device), list[Tensor]()
    if kernel == "masked":
        packed, *_ = outlier.quantize(x, bits, 0.02, True, None, 1)
        return [module.masked(_numbers(_SIZE, dtype, device, 1), packed, bits)]
    for relu in (False, True):
        if kernel == "quantize":
            results += module.quantize(x, bits, 0.02, relu, None, 1)
        else:
            parts = outlier.quantize(x, bits, 0.02, relu, None, 1)
            results.append(torch.empty_like(x))
            module.dequantize(*parts, bits, relu, results[-1])
    return results


def _glu(kernel: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    gate, up, grad = (_numbers(_SIZE, dtype, device, seed, special=False) for seed in (4, 5, 6))
    plan = "silu", (), register_table(load_table("silu", bits)), bits, bits, False
    if kernel == "forward":
        h, codes, up_packed, _, groups = module.forward(gate, up, (_SEED, _SEED + 1), *plan)
        return [h, codes, up_packed, groups[:2]]  # the copy of act(gate) has its roundings
    _, *parts = _module("reference", "glu").forward(gate, up, (_SEED, _SEED + 1), *plan)
    return module.backward(grad, tuple(parts), *plan, (True, True, True))


def _preact(kernel: str, dtype: torch.dtype, bits: int, module: ModuleType, device: torch.device) -> Results:
    A, gradient, (γ, β) = _image(dtype, device), _image(dtype, device, 1), _channels(device)
    zero, one = torch.zeros_like(γ), torch.ones_like(γ)
    if kernel == "encode":
        return [module.encode(A, A, γ, β, zero, one, bits, 0.0), A]
    packed = preact.encode(A, A, γ, β, zero, one, bits, 0.0)
    if kernel == "decode":
        decoded = module.decode(packed, γ, β, bits, 0.0, out := torch.empty_like(A))
        return [out if decoded is None else decoded]
    *dx, dβ, dγ = module.through_normalization(packed, γ, β, bits, 0.0, gradient, one, True, True)
    return [dx[0] if dx else gradient, dβ.float(), dγ.float()]


def _pooling(kernel: str, dtype: torch.dtype, module: ModuleType, device: torch.device) -> Results:
    x, window = _image(dtype, device), ((3, 2), (2, 2), (1, 0), (1, 1))
    if kernel == "max_pool":
        return module.max_pool(x, *window, False)
    y, places = _module("reference", "pooling").max_pool(x, *window, False)
    grad = _numbers(y.numel(), dtype, device, 1, special=False).view(y.shape)
    return [module.max_pool_backward(grad, places, x.shape, *window)]


_OF_KINDS: dict[str, tuple[Callable[..., Results], tuple[str, ...]]] = {
    "rounding": (_rounding, ("encode_at_random",)),
    "per_group": (_per_group, ("quantize", "dequantize")),
    "rotated": (_rotated, ("quantize", "dequantize")),
    "fixed_point": (_fixed_point, ("quantize", "dequantize")),
    "outlier": (_outlier, ("quantize", "dequantize", "masked")),
    "glu": (_glu, ("forward", "backward")),
    "preact": (_preact, ("encode", "decode", "through_normalization")),
}
