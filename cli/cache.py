"""`fewbit cache`: files that fewbit keeps on disk and can recompute."""

import time
from importlib.util import find_spec

import click

from ..tables import KINDS, FewbitError
from ..tables.cache import cache_folder, cached_files
from ..tables.compiling import silent_compilation
from ..tables.files import reason
from ..tables.names import counted
from .lazy import WholeHelpGroup
from .progress import with_progress


@click.group("cache", cls=WholeHelpGroup)
def command() -> None:
    """Show, fill and clear the folder of compiled kernels and solved tables.

    Everything in it can be rebuilt. The environment variable FEWBIT_CACHE names the folder; without it, it is the
    user's cache folder.

    Example: fewbit cache info
    """


@command.command()
def info() -> None:
    """Show the cache folder, with the number and size of its files.

    Example: fewbit cache info
    """
    sizes = [path.stat().st_size for path in cached_files()]
    click.echo(f"{cache_folder()}: {counted(len(sizes), 'file')}, {sum(sizes) / 2**20:.1f} MiB")


@command.command()
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also compile every other CPU kernel: quantizers, gated MLPs, pre-activation layers; takes minutes.",
)
def warm(everything: bool) -> None:
    """Compile in advance the code that the first solve and the first CPU training would compile.

    Numba stores the machine code in the folder that the environment variable NUMBA_CACHE_DIR names; otherwise beside
    the installed package or, if that folder is read-only, in the user's cache folder. Another processor, another
    version of Numba or changed source makes it compile again. `fewbit doctor --warm` is `--all`, and then tests them.

    Example: fewbit cache warm
    """
    compile_ahead(everything)


def compile_ahead(everything: bool) -> None:
    """Compile the solver and, with torch, the kernels of activations, or of `everything`; say how long it took."""
    start = time.perf_counter()
    with silent_compilation():
        _compile_solver()
    if find_spec("torch"):
        from ..runtime.self_test import checks, outcome

        chosen = [check for check in checks("cpu") if everything or check.family in ("activation", "rounding")]
        # A kernel serves all numbers of bits, so that one check of each dtype compiles it.
        kernels = {(check.family, check.kernel, check.dtype): check for check in chosen}
        for check in with_progress(kernels.values(), len(kernels), "compiling"):
            outcome(check, "cpu")
    click.echo(f"compiled, or found compiled, in {time.perf_counter() - start:.1f} s", err=True)


def _compile_solver() -> None:
    from ..fewbit_gen import solve

    for kind in KINDS:
        solve("gelu", levels=4, kind=kind)
    solve("gelu", bits=4, certify=False)  # of levels enough for the fast programme


@command.command()
def clear() -> None:
    """Delete every file that fewbit wrote to the cache.

    Example: fewbit cache clear
    """
    files = cached_files()
    try:
        for path in files:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FewbitError(f"cannot clear {cache_folder()}: {reason(error)}") from None
    click.echo(f"{cache_folder()}: {counted(len(files), 'file')} deleted", err=True)
