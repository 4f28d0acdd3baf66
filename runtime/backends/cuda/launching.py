"""Kernels on torch's current stream, by `cuda-core`: compiled at first use, loaded once a device.

`available` says whether a device can: it compiles, loads and launches one empty kernel first. Where that fails, plain
torch is used, with one warning.
"""

import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...tensors.graphs import check_no_capture
from ...tensors.philox import Seed
from .codegen import THREADS
from .codegen.compiler import compiler_package, has_compiler, machine_code

_ALIGNMENT = 16  # bytes that kernels load of codes at once
_TRIAL = 'extern "C" __global__ void trial() {}\n'


@cache
def available(device: int) -> bool:
    """Return whether kernels can be compiled for a device, loaded and launched there; if not, warn once."""
    check_no_capture("a kernel", device)
    obstacle = _obstacle(device)
    if obstacle is None:
        return True
    warnings.warn(f"fewbit runs on this GPU in plain torch, slowly: {obstacle}", stacklevel=2)
    return False


def serves(x: Tensor) -> bool:
    """Return whether kernels take `x`: a plain tensor in the memory of a GPU on which they run."""
    if x.device.type != "cuda" or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return available(x.get_device())


def _obstacle(device: int) -> str | None:
    """Return why no kernel runs on a device, in one line."""
    if torch.version.hip:
        return f"its kernels are for NVIDIA's GPUs, and this torch is built for ROCm {torch.version.hip}"
    if not has_compiler():
        return f"cuda-core is not installed; pip install '{compiler_package()}'"
    try:
        loaded(_TRIAL, "trial", device).launch(1)
    except Exception as error:  # each release of cuda-core has its own class; an import of its parts may fail too
        return " ".join(str(error).split())[:500]
    return None


def load(source: str, names: Sequence[str], device: int) -> "list[Loaded]":
    """Return kernels of a source, compiled for the device and loaded on it together.

    Raises:
        FewbitError: a CUDA graph is being captured, or the source cannot be compiled.
        RuntimeError: the driver does not load it.
    """
    check_no_capture(f"the kernel {names[0]!r}", device)
    properties = torch.cuda.get_device_properties(device)
    kind, code = machine_code(source, f"sm_{properties.major}{properties.minor}")

    def load_now() -> list[Loaded]:
        library = getattr(core().ObjectCode, f"from_{kind}")(code)
        found = [library.get_kernel(name) for name in names]
        return [
            Loaded(name, device, _most_blocks(kernel, properties.multi_processor_count), kernel)
            for name, kernel in zip(names, found, strict=True)
        ]

    with torch.cuda.device(device):
        _set_context(device)
        try:
            with suppress(Exception):  # each release of cuda-core has its own class
                return load_now()
            torch.cuda.empty_cache()  # in a large step all memory may be torch's, most of it free for torch alone
            return load_now()
        except Exception as error:
            raise RuntimeError(f"fewbit's CUDA kernel {names[0]!r} was not loaded: {error}") from error


def loaded(source: str, name: str, device: int) -> "Loaded":
    """Return one kernel; raises as `load`."""
    return load(source, [name], device)[0]


class _Thread(threading.local):
    """The devices whose context was made current in this thread."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def _set_context(device: int) -> None:
    """Make the context of the device, which is torch's current one, current in a thread that begins to launch there.

    torch's own calls do that for it, but a launch by the driver does not: in autograd's backward thread, and in any
    new thread on device 0, there is no context until torch has allocated something.
    """
    core().Device(device).set_current()
    _thread.devices.add(device)


def aligned(part: Tensor) -> Tensor:
    """Return `part` as kernels load it: itself, or a copy of one that is a view into a larger tensor."""
    if part.data_ptr() % _ALIGNMENT or not part.is_contiguous():
        return part.clone(memory_format=torch.contiguous_format)
    return part


def seed_arguments(seed: Seed) -> tuple[int, int]:
    """Return a seed as kernels take it: the number and no address, or the address of what was drawn on the GPU."""
    return (seed, 0) if isinstance(seed, int) else (0, seed.data_ptr())


@dataclass(frozen=True)
class Loaded:
    """A kernel loaded on one device.

    Attributes:
        most_blocks: as many as fill the device.
    """

    name: str
    device: int
    most_blocks: int
    kernel: Any

    def launch(self, blocks: int, *arguments: int) -> None:
        """Run on torch's current stream of the device, `blocks` of `THREADS` threads at most; nothing for none.

        Raises:
            RuntimeError: the launch failed.
        """
        if not blocks:
            return
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.launch(blocks, *arguments)
        stream = _stream(torch._C._cuda_getCurrentRawStream(device))
        try:
            if device not in _thread.devices:
                _set_context(device)
            core().launch(stream, _config(min(blocks, self.most_blocks)), self.kernel, *arguments)
        except Exception as error:  # each release of cuda-core has its own class
            raise RuntimeError(f"fewbit's CUDA kernel {self.name!r} was not launched: {error}") from error


def _most_blocks(kernel: Any, multiprocessors: int) -> int:
    """Return the number of blocks that are on a device at once; each processes its share of a larger tensor."""
    return multiprocessors * max(1, kernel.occupancy.max_active_blocks_per_multiprocessor(THREADS, 0))


@cache
def core() -> Any:
    """Return the module `cuda.core`, imported when a kernel is first needed."""
    return import_module("cuda.core")


@lru_cache(4096)
def _config(blocks: int) -> Any:
    return core().LaunchConfig(grid=blocks, block=THREADS)


@lru_cache(64)
def _stream(handle: int) -> Any:
    return core().Stream.from_handle(handle)
