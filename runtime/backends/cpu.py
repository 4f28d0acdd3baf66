"""The CPU backend: torch's own forward, Numba kernels for the codes, spread over torch's number of threads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..forwards import Forward
from ..packing import packed_size
from ..prepared import prepare
from . import host_memory
from .kernels import BLOCK, FORMATS, LINEAR_LIMIT, encode_kernel, multiply_kernel

# Below this a second thread costs more than it saves.
_BLOCKS_PER_THREAD = 128
_PARTS_PER_THREAD = 8


def forward(x: Tensor, function: Forward, parameters: Sequence[float]) -> Tensor:
    """Return f(x) by torch's own function, in the layout that torch gives it."""
    if function.out is None or not host_memory.is_large(x):
        return function.call(x, *parameters)
    return function.out(x, *parameters, out=host_memory.empty_like(x))


def encode(x: Tensor, table: str) -> Tensor:
    """Return the packed codes of the dense tensor `x` in memory order: uint8 (⌈n/8⌉·bits,)."""
    kernel, t = _encoder(table, x.dtype)
    n = x.numel()
    packed = torch.empty(packed_size(n, t.bits), dtype=torch.uint8, device="cpu")
    arguments = (x.data_ptr(), n, t.boundaries, t.steps, t.first, t.codes, t.bits, packed.data_ptr())
    _run(kernel, arguments, n)
    return packed


def multiply(grad: Tensor, packed: Tensor, table: str) -> Tensor:
    """Return gradient × level for the dense tensor `grad`, in its dtype and layout."""
    kernel, levels, bits = _multiplier(table, grad.dtype)
    n = grad.numel()
    if packed.dtype != torch.uint8 or packed.shape != (packed_size(n, bits),) or not packed.is_contiguous():
        raise RuntimeError(f"{n} codes of {bits} bits take {packed_size(n, bits)} bytes, not {_shown(packed)}")
    result = host_memory.empty_like(grad)
    _run(kernel, (grad.data_ptr(), n, packed.data_ptr(), bits, levels, result.data_ptr()), n)
    return result


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} with stride {tensor.stride()}"


@dataclass(frozen=True)
class _EncodeTable:
    boundaries: np.ndarray
    steps: np.ndarray
    first: Any
    codes: np.ndarray
    bits: int


@cache
def _encoder(table: str, dtype: torch.dtype) -> tuple[Callable[..., None], _EncodeTable]:
    name = str(dtype).removeprefix("torch.")
    floats = FORMATS[name]
    prepared = prepare(table, dtype, torch.device("cpu"))
    integer_dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    boundaries = floats.keys(prepared.boundaries.view(integer_dtype).numpy())
    codes = prepared.codes.numpy()
    first = floats.integer(codes[0])
    if boundaries.size <= LINEAR_LIMIT:
        steps = np.diff(codes.astype(floats.integer))
        return encode_kernel(name), _EncodeTable(boundaries, steps, first, codes, prepared.bits)
    padding = (1 << boundaries.size.bit_length()) - 1 - boundaries.size
    boundaries = np.pad(boundaries, (0, padding), constant_values=np.iinfo(floats.integer).max)
    codes = np.pad(codes, (0, boundaries.size + 1 - codes.size), mode="edge")
    nothing = np.empty(0, floats.integer)
    return encode_kernel(name), _EncodeTable(boundaries, nothing, first, codes, prepared.bits)


@cache
def _multiplier(table: str, dtype: torch.dtype) -> tuple[Callable[..., None], np.ndarray, int]:
    prepared = prepare(table, dtype, torch.device("cpu"))
    levels = prepared.levels.numpy()
    padded = np.pad(levels, (0, (1 << prepared.bits) - levels.size))
    kernel = multiply_kernel(str(dtype).removeprefix("torch."), bool((levels == 0).any()))
    return kernel, padded, prepared.bits


def _run(kernel: Callable[..., None], arguments: tuple[Any, ...], n: int) -> None:
    """Run `kernel` over all blocks of n elements, in as many threads as torch uses."""
    blocks = (n + BLOCK - 1) // BLOCK
    threads = min(torch.get_num_threads(), max(1, blocks // _BLOCKS_PER_THREAD))
    if threads == 1:
        kernel(*arguments, 0, blocks)
        return
    # Many parts, taken as threads come free: the threads of torch's last operation spin for a while and hold a core,
    # and a thread of ours that has to wait for it must not keep the others waiting.
    parts = threads * _PARTS_PER_THREAD
    cuts = [blocks * i // parts for i in range(parts + 1)]
    ranges = iter(list(pairwise(cuts)))

    def work() -> None:
        for begin, end in ranges:  # one iterator for all threads: each part goes to one of them
            kernel(*arguments, begin, end)

    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        # One that has not begun has nothing left to do; one that has writes into the caller's memory: wait for it.
        wait([other for other in others if not other.cancel()])
    for other in others:
        if not other.cancelled():
            other.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # One a process: threads do not survive a fork.
    return ThreadPoolExecutor(threads, thread_name_prefix="fewbit")
