"""`fewbit cache`: files that fewbit keeps on disk and can recompute."""

import time
from importlib.util import find_spec

import click

from ..tables import KINDS, FewbitError, load_table
from ..tables.cache import cache_folder, cached_files
from ..tables.files import reason
from ..tables.names import counted


@click.group("cache")
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
    "--all", "everything", is_flag=True, help="Also compile the kernels that torch.compile calls; takes a minute more."
)
def warm(everything: bool) -> None:
    """Compile in advance the code that the first solve and the first CPU training would compile.

    Numba stores the machine code in the folder that the environment variable NUMBA_CACHE_DIR names; otherwise beside
    the installed package or, if that folder is read-only, in the user's cache folder. Another processor, another
    version of Numba or changed source makes it compile again.

    Example: fewbit cache warm
    """
    start = time.perf_counter()
    _warm_solver()
    if find_spec("torch"):
        _warm_training()
        if everything:
            _warm_compiled_training()
    click.echo(f"compiled, or found compiled, in {time.perf_counter() - start:.1f} s", err=True)


def _warm_solver() -> None:
    from ..fewbit_gen import solve

    for kind in KINDS:
        solve("gelu", levels=4, kind=kind)


def _warm_training() -> None:
    import torch

    from ..runtime.activations.modules import GELU

    x = torch.zeros(2048, requires_grad=True)
    for bits in (1, 2, 3, 4):
        GELU(bits=bits)(x).sum().backward()
    GELU(table=load_table("gelu", 2, "stochastic"))(x).sum().backward()


def _warm_compiled_training() -> None:
    import torch

    from ..fewbit_gen import solve
    from ..runtime import ops

    solve("gelu", bits=4, certify=False)  # of levels enough for the fast programme
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(64, 128, dtype=dtype)
        buffers = ops.per_group_quantize_buffers([x], [4], [64], torch.zeros(1, dtype=torch.int64), [True])
        ops.per_group_dequantize_buffers(buffers, [4], [64], dtype)


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
