"""What works on this machine: plain torch, the kernels of the CPU and of a GPU, and torch.compile's backend."""

from dataclasses import dataclass

import torch

from ..tables.errors import FewbitError
from ..tables.names import counted
from .compile.backend import LEAST_TORCH, is_supported


@dataclass(frozen=True)
class Backend:
    """A way to run fewbit's operations.

    Attributes:
        works: whether it does on this machine.
        note: on what; or why not, and how to get it.
    """

    name: str
    works: bool
    note: str


def backends() -> list[Backend]:
    """Return plain torch, then the backends whose kernels are beside it, then torch.compile's."""
    return [
        Backend("reference", True, f"plain torch, on any device{_other_accelerator()}"),
        Backend("cpu", True, f"Numba, on {counted(torch.get_num_threads(), 'thread')}"),
        _cuda(),
        _compile(),
    ]


def _other_accelerator() -> str:
    """Return what to say of an accelerator that has no kernels here, such as Apple's (mps) or Intel's (xpu)."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None or found.type == "cuda" else f"; all that runs on {found.type}"


def _cuda() -> Backend:
    from .backends.cuda.codegen.compiler import compiler_package, compiler_version, has_compiler

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return Backend("cuda", False, f"no CUDA GPU; {built}")
    gpu = torch.cuda.get_device_name()
    if torch.version.hip:
        return Backend("cuda", False, f"{gpu} runs plain torch: kernels are for NVIDIA's GPUs, not ROCm's")
    if not has_compiler():
        return Backend("cuda", False, f"{gpu} runs plain torch, slowly: pip install '{compiler_package()}'")
    try:
        nvrtc = compiler_version()
    except FewbitError as error:
        return Backend("cuda", False, f"{gpu} runs plain torch: {error}")
    note = f"{gpu}, kernels compiled by NVRTC {nvrtc}"
    release = ".".join((torch.version.cuda or nvrtc).split(".")[:2])
    if nvrtc != release:  # erf, exp and tanh change: between 13.0 and 13.5 GELU of 55 float16 numbers, of 7 bfloat16
        package = "nvidia-cuda-nvrtc-cu12" if release.startswith("12.") else "nvidia-cuda-nvrtc"
        note += f"; torch is of CUDA {release}, and f(x) may differ in the last place: "
        note += f"pip install '{package}=={release}.*'"
    return Backend("cuda", True, note)


def _compile() -> Backend:
    """Return whether torch.compile's backend works here: for a GPU Inductor writes Triton, for the CPU C++."""
    call = "torch.compile(model, backend='fewbit')"
    if not is_supported():
        return Backend("compile", False, f"{call} needs torch {LEAST_TORCH} or newer")
    try:
        if not torch.cuda.is_available():
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
    except RuntimeError:  # InvalidCxxCompiler is one
        return Backend("compile", False, f"{call} needs a C++ compiler on the CPU: g++, or the one that CXX names")
    return Backend("compile", True, call)
