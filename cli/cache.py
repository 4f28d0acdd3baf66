"""`fewbit cache`: files that fewbit keeps on disk and can recompute."""

import time
from importlib.util import find_spec

import click

from ..tables import FewbitError
from ..tables.cache import cache_folder, cached_files
from ..tables.files import reason
from ..tables.names import counted


@click.group("cache")
def command() -> None:
    """Show, fill and clear the folders of compiled kernels and solved tables.

    All of it can be made again. The folder is the one that the environment variable FEWBIT_CACHE names, or the user's
    cache folder.

    Example: fewbit cache info
    """


@command.command()
def info() -> None:
    """Show where the cache is, and how many files of which size are in it.

    Example: fewbit cache info
    """
    sizes = [path.stat().st_size for path in cached_files()]
    click.echo(f"{cache_folder()}: {counted(len(sizes), 'file')}, {sum(sizes) / 2**20:.1f} MiB")


@command.command()
def warm() -> None:
    """Compile now what the first solve and the first training on the CPU would compile.

    Numba keeps the machine code where the environment variable NUMBA_CACHE_DIR says, else beside the installed package
    or, if that folder is read-only, in the user's cache. It is compiled again for another processor, another version of
    Numba, or changed source.

    Example: fewbit cache warm
    """
    start = time.perf_counter()
    _warm_compiler()
    if find_spec("torch"):
        _warm_training()
    click.echo(f"compiled, or found compiled, in {time.perf_counter() - start:.1f} s", err=True)


def _warm_compiler() -> None:
    from ..fewbit_gen import solve

    for kind in ("shared", "interval"):
        solve("gelu", levels=4, kind=kind)


def _warm_training() -> None:
    import torch

    from ..runtime.activations.modules import GELU

    for bits in (1, 2, 3, 4):
        x = torch.zeros(2048, requires_grad=True)
        GELU(bits=bits)(x).sum().backward()


@command.command()
def clear() -> None:
    """Delete what fewbit put into the cache.

    Example: fewbit cache clear
    """
    files = cached_files()
    try:
        for path in files:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FewbitError(f"cannot clear {cache_folder()}: {reason(error)}") from None
    click.echo(f"{cache_folder()}: {counted(len(files), 'file')} deleted", err=True)
