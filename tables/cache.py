"""The folder where fewbit keeps what it can make again: compiled kernels and solved tables."""

import os
from pathlib import Path

from .files import make_folder

VARIABLE = "FEWBIT_CACHE"


def cache_folder(*names: str) -> Path:
    """Return the cache folder, or the one called `names` inside it, made if it was not there.

    It is what the environment variable FEWBIT_CACHE names, else the user's cache folder on this system.

    Raises:
        FewbitError: the folder cannot be made.
    """
    chosen = os.environ.get(VARIABLE)
    root = Path(chosen).expanduser() if chosen else _user_folder()
    folder = root.joinpath(*names)
    make_folder(folder)
    return folder


def _user_folder() -> Path:
    import platformdirs  # not asked where the user says which folder

    return Path(platformdirs.user_cache_dir("fewbit", appauthor=False))


def cached_files() -> list[Path]:
    """Return the files in the cache that fewbit wrote, and none that someone else keeps in the same folder."""
    folder = cache_folder()
    return sorted(path for part, pattern in _PARTS for path in (folder / part).glob(pattern) if path.is_file())


_PARTS = (("kernels", "*.cubin"), ("tables", "*.json"))
