"""`fewbit doctor`: what is installed, which backends work here, and a test of every kernel on this machine."""

import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from .. import __version__
from ..tables.cache import cache_folder
from ..tables.columns import WIDTH, columns
from ..tables.errors import FewbitError
from ..tables.json_format import dumps
from ..tables.names import counted
from .cache import compile_ahead
from .options import json_option
from .progress import clock, with_progress

# Package -> what it is for.
_PACKAGES = {
    "numpy": "tables",
    "scipy": "the solver",
    "numba": "the solver, CPU kernels",
    "matplotlib": "figures",
    "torch": "training",
    "cuda-core": "CUDA kernels",
    "transformers": "Trainer, attention",
    "accelerate": "Trainer, several processes",
    "trl": "SFTTrainer and others",
    "lightning": "Lightning",
    "peft": "adapters",
    "safetensors": "packed models on disk",
    "zstandard": "smaller packed models",
    "python-flint": "checking proofs",
}
_NOT_COMPILED = "not compiled"


@dataclass(frozen=True)
class Package:
    """A package that fewbit uses.

    Attributes:
        version: None if it is not installed.
        install: how to get it, then.
    """

    name: str
    version: str | None
    purpose: str
    install: str


@dataclass(frozen=True)
class KernelTest:
    """A kernel of a backend beside plain torch.

    Attributes:
        state: ``ok``, ``failed`` or ``not compiled``: it was not run.
        passed, tested: checks, one for each dtype and number of bits.
        seconds: they took, with compilation.
        problems: one line for each failed check.
    """

    backend: str
    kernel: str
    state: str
    passed: int
    tested: int
    seconds: float
    problems: Sequence[str]


@click.command("doctor")
@click.option(
    "--warm", is_flag=True, help="First compile the solver and all CPU kernels; takes minutes, once an install."
)
@json_option
def command(warm: bool, as_json: bool) -> None:
    """Say what is installed and what works here, and test every kernel on this machine.

    Each kernel of the CPU, and of the GPU if there is one, runs beside plain torch with the same numbers, for every
    number of bits and dtype. CPU kernels that were never compiled are named and left out, unless --warm compiles them.
    The exit status is 1 if a kernel failed.

    Example: fewbit doctor --warm
    """
    if warm:
        compile_ahead(everything=True)
    with clock("loading torch", soon=2.0):  # 42 s where nothing of it is in memory yet
        packages, backends = _packages(), _backends()
    tests = [test for name, works, _ in backends if works for test in _kernel_tests(name)]
    failed = [test for test in tests if test.state == "failed"]
    if as_json:
        parts = {"packages": packages, "kernels": tests}
        values: dict[str, Any] = {name: [asdict(part) for part in of] for name, of in parts.items()}
        values["backends"] = [{"name": name, "works": works, "note": note} for name, works, note in backends]
        about = {
            "fewbit": __version__,
            "torch_build": torch_build(),
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        click.echo(dumps({**about, "cache": _cache(), **values, "failed": len(failed)}), nl=False)
    else:
        click.echo("\n".join(_lines(packages, backends, tests)))
    if failed:
        raise click.exceptions.Exit(1)


def _packages() -> list[Package]:
    found, cuda = [], "cuda-core[cu13]"
    if find_spec("torch") is not None:  # the compiler of CUDA kernels, of the release for the installed torch
        from ..runtime.backends.cuda.codegen.compiler import compiler_package

        cuda = compiler_package()
    for name, purpose in _PACKAGES.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = None
        wanted = f"'{cuda}'" if name == "cuda-core" else name
        found.append(Package(name, installed, purpose, "" if installed else f"pip install {wanted}"))
    return found


def _backends() -> list[tuple[str, bool, str]]:
    """Return name, whether it works and a note: of plain torch, the backends beside it, and torch.compile's."""
    if find_spec("torch") is None:
        why = "torch is not installed: pip install torch"
        return [(name, False, why) for name in ("reference", "cpu", "cuda", "compile")]
    from ..runtime.machine import backends

    return [(one.name, one.works, one.note) for one in backends()]


def torch_build() -> str:
    """Return which build of torch is right for this machine, and whether it is the installed one.

    The usual build for Linux brings 2 GB of CUDA, which only an NVIDIA GPU has a use for.
    """
    nvidia, amd = gpu_drivers()
    right = "the one for CUDA" if nvidia else "the one for ROCm" if amd else "the one for the CPU"
    if platform.system() == "Darwin":
        right = "the usual one"
    if find_spec("torch") is None:
        return (
            f"{right}, by the command that torch's page Get Started shows; on Linux `pip install torch` brings 2 GB of "
            "CUDA. Without torch the compiler of tables works alone"
        )
    import torch

    if torch.cuda.is_available() or platform.system() == "Darwin":
        return "the installed one is right"
    cuda = torch.version.cuda
    if nvidia and cuda:
        return (
            f"torch is built for CUDA {cuda} and sees no GPU: its driver may be older than that, take an older CUDA's"
        )
    if nvidia or amd:
        return f"{right}: there is a driver of a GPU, and torch has another build"
    return (
        f"{right}, 2 GB smaller: there is no GPU here" if cuda else "the installed one is right: there is no GPU here"
    )


def gpu_drivers() -> tuple[bool, bool]:
    """Return whether there are drivers of NVIDIA's and of AMD's GPUs, by the files that they bring."""
    nvidia = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    return nvidia, Path("/dev/kfd").exists()


def _kernel_tests(backend: str) -> Iterator[KernelTest]:
    """Yield the tests of a backend's kernels; none of plain torch, with which they are compared."""
    if backend not in ("cpu", "cuda"):
        return
    from ..runtime.self_test import Check, Outcome, checks, outcome
    from ..runtime.tensors.traits import name_of

    todo = list(checks(backend))
    done: dict[str, list[tuple[Check, Outcome]]] = {}
    for check in with_progress(todo, len(todo), f"testing {backend}"):
        done.setdefault(f"{check.family} {check.kernel}", []).append((check, outcome(check, backend, compiles=False)))
    for kernel, results in done.items():
        states = [result.state for _, result in results]
        problems = [
            ", ".join([name_of(check.dtype), *([counted(check.bits, "bit")] if check.bits else [])])
            + f": {result.problem}"
            for check, result in results
            if result.state == "failed"
        ]
        state = next((state for state in ("failed", _NOT_COMPILED) if state in states), "ok")
        seconds = sum(result.seconds for _, result in results)
        yield KernelTest(backend, kernel, state, states.count("ok"), len(states), seconds, problems)


def _cache() -> str | None:
    try:
        return str(cache_folder())
    except FewbitError:
        return None


def _lines(
    packages: Sequence[Package], backends: Sequence[tuple[str, bool, str]], tests: Sequence[KernelTest]
) -> Iterator[str]:
    yield f"fewbit {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"cache: {_cache() or 'its folder cannot be made: set FEWBIT_CACHE'}"
    yield ""
    rows = [(one.name, one.version or "-", one.purpose, one.install) for one in packages]
    yield from columns([("package", "version", "for", "to install"), *rows], left=4)
    yield ""
    rows = [(name, "yes" if works else "no", note) for name, works, note in backends]
    yield from columns([("backend", "works", ""), *rows], left=3)
    yield from wrap(f"torch's build for this machine: {torch_build()}", WIDTH, subsequent_indent="  ")
    if not tests:
        return
    yield ""
    rows = [
        (test.backend, test.kernel, test.state, f"{test.passed} of {test.tested}", f"{test.seconds:.2f} s")
        for test in tests
    ]
    yield from columns([("", "kernel", "beside plain torch", "passed", "time"), *rows], left=3)
    for test in tests:
        for problem in test.problems:
            yield f"{test.backend} {test.kernel}, {problem}"
    yield ""
    yield _verdict(tests)


def _verdict(tests: Sequence[KernelTest]) -> str:
    """Return one line that says what follows from the tests."""
    failed = [test for test in tests if test.state == "failed"]
    waiting = [test for test in tests if test.state == _NOT_COMPILED]
    if failed:
        return f"{counted(len(failed), 'kernel')} of {len(tests)} failed: please report this output"
    if waiting:
        return (
            f"{len(waiting)} of {counted(len(tests), 'kernel')} not compiled yet: by the first use, up to a minute "
            "each, or `fewbit doctor --warm`"
        )
    return f"all {len(tests)} kernels give the numbers of plain torch"
