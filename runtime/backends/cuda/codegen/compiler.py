"""Compile kernel sources with NVRTC through `cuda-core`, and cache the machine code on disk. Needs no GPU.

An entry of the cache is named by a digest of the source, the architecture and the compiler's version, and begins with a
digest of its own content: a damaged entry is detected when it is read, and compiled again.
"""

import contextlib
import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from .....tables.cache import cache_folder
from .....tables.errors import FewbitError
from .....tables.files import atomic_write

FOLDER = "kernels"
_DIGEST = 32  # bytes of SHA-256
_STANDARD = "c++17"
_RESIDENTS = (4, 3, 2, 1)  # blocks per multiprocessor, tried in order: the first without spills is used


@dataclass(frozen=True)
class Usage:
    """Resources of a kernel, as reported by the assembler.

    Attributes:
        kernel: name of the kernel.
        registers: registers per thread.
        spilled: bytes spilled from registers to memory, stores and loads together.
        stack: bytes of stack per thread.
        shared: bytes of shared memory per block.
    """

    kernel: str
    registers: int
    spilled: int
    stack: int
    shared: int


def has_compiler() -> bool:
    """Return whether `cuda-core` is installed; imports only its parent package."""
    with contextlib.suppress(ModuleNotFoundError):
        return find_spec("cuda.core") is not None
    return False


def compiler_package() -> str:
    """Return what pip installs `cuda-core` by, with the NVRTC of the CUDA that torch was built for."""
    import torch

    return f"cuda-core[cu{'12' if (torch.version.cuda or '').startswith('12') else '13'}]"


@cache
def compiler_version() -> str:
    """Return the version of NVRTC, such as ``13.0``.

    Raises:
        FewbitError: NVRTC is not installed.
    """
    try:
        _, major, minor = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the library itself is not found
        raise FewbitError(f"no CUDA compiler: {error}; pip install '{compiler_package()}'") from error
    return f"{major}.{minor}"


def compile_source(source: str, arch: str) -> tuple[bytes, list[Usage]]:
    """Return the cubin of `source` for an architecture such as ``sm_90``, and the resources of each kernel.

    Raises:
        FewbitError: NVRTC is not installed or does not support the architecture.
    """
    compiler_version()
    core = import_module("cuda.core")
    code, usages = b"", []
    for residents in _RESIDENTS:
        log = io.StringIO()
        macro = ("FEWBIT_RESIDENTS", str(residents))
        options = core.ProgramOptions(arch=arch, std=_STANDARD, define_macro=macro, ptxas_options=["-v"])
        try:
            compiled = core.Program(source, "c++", options).compile("cubin", logs=log)
        except Exception as error:  # each release has its own class
            raise _refused(arch, error) from error
        code, usages = bytes(compiled.code), read_usage(log.getvalue())
        if not any(usage.spilled or usage.stack for usage in usages):
            break
    return code, usages


def read_usage(log: str) -> list[Usage]:
    """Return the resources of each kernel from the log of `ptxas -v`."""
    usages = []
    for part in log.split("Compiling entry function '")[1:]:
        usages.append(
            Usage(
                part[: part.index("'")],
                _number(r"Used (\d+) registers", part),
                _number(r"(\d+) bytes spill stores", part) + _number(r"(\d+) bytes spill loads", part),
                _number(r"(\d+) bytes stack frame", part),
                _number(r"(\d+) bytes smem", part),
            )
        )
    return usages


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def machine_code(source: str, arch: str) -> tuple[str, bytes]:
    """Return the kind of code, ``cubin`` or ``ptx``, and the code of `source` for an architecture.

    It is PTX, which the driver compiles, for an architecture newer than this NVRTC: that of the newest which it knows.

    Raises:
        FewbitError: NVRTC is not installed, or knows no architecture as old.
    """
    number = int(re.sub(r"\D", "", arch))
    known = supported_architectures()
    if number in known or number < min(known):
        return "cubin", cubin(source, arch)
    return "ptx", _cached(source, f"compute_{max(one for one in known if one < number)}", _compile_ptx)


@cache
def supported_architectures() -> tuple[int, ...]:
    """Return the architectures that NVRTC compiles for, such as 90.

    Raises:
        FewbitError: NVRTC is not installed.
    """
    compiler_version()
    _, architectures = import_module("cuda.bindings.nvrtc").nvrtcGetSupportedArchs()
    return tuple(architectures)


def cubin(source: str, arch: str) -> bytes:
    """Return the cubin of `source` for an architecture from the disk cache; compile and cache it if it is not there.

    A cache that cannot be written is skipped.
    """
    return _cached(source, arch, lambda source, arch: compile_source(source, arch)[0])


def _compile_ptx(source: str, arch: str) -> bytes:
    """Return PTX, whose registers nobody counts here: two blocks a multiprocessor leave room for 128 a thread."""
    core = import_module("cuda.core")
    options = core.ProgramOptions(arch=arch, std=_STANDARD, define_macro=("FEWBIT_RESIDENTS", "2"))
    try:
        return bytes(core.Program(source, "c++", options).compile("ptx").code)
    except Exception as error:  # each release has its own class
        raise _refused(arch, error) from error


def _refused(arch: str, error: Exception) -> FewbitError:
    message = " ".join(str(error).split())
    return FewbitError(f"NVRTC {compiler_version()} cannot compile for {arch}: {message[:500]}")


def _cached(source: str, arch: str, compile: Callable[[str, str], bytes]) -> bytes:
    try:
        path = _path(source, arch)
    except FewbitError:  # the folder cannot be made
        return compile(source, arch)
    found = _read(path)
    if found is not None:
        return found
    made = compile(source, arch)
    with contextlib.suppress(FewbitError), atomic_write(path, follow=False) as stream:
        stream.write(hashlib.sha256(made).digest() + made)
    return made


def _path(source: str, arch: str) -> Path:
    key = "\0".join([source, arch, compiler_version(), _STANDARD])
    return cache_folder(FOLDER) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}-{arch}.cubin"


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, made = content[:_DIGEST], content[_DIGEST:]
    return made if made and hashlib.sha256(made).digest() == digest else None
