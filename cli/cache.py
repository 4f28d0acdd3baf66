"""`fewbit cache`: what fewbit keeps on disk because it can make it again."""

import click

from ..tables import FewbitError
from ..tables.cache import cache_folder, cached_files
from ..tables.files import reason
from ..tables.names import counted


@click.group("cache")
def command() -> None:
    """Show and clear the folder of compiled kernels and solved tables.

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
