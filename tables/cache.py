"""The folder for what fewbit can compute again: compiled kernels and solved tables."""

import os
from pathlib import Path

from .errors import FewbitError
from .files import make_folder

VARIABLE = "FEWBIT_CACHE"


def cache_folder(*names: str) -> Path:
    """Return the cache folder, or its subfolder `names`; create it if it does not exist.

    The folder is that of the environment variable FEWBIT_CACHE, else the user's cache folder on this system.

    Raises:
        FewbitError: the folder cannot be created.
    """
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        import platformdirs  # not where FEWBIT_CACHE names the folder

        chosen = platformdirs.user_cache_dir("fewbit", appauthor=False)
    try:
        folder = Path(chosen).expanduser().joinpath(*names)
    except RuntimeError as error:  # ~someone, who has no home here
        raise FewbitError(f"cannot make the folder {chosen}: {error}") from None
    make_folder(folder)
    return folder


def cached_files() -> list[Path]:
    """Return the cache files that fewbit wrote; other files in the same folder are left out."""
    folder = cache_folder()
    return sorted(path for part, pattern in _PARTS for path in (folder / part).glob(pattern) if path.is_file())


_PARTS = (("kernels", "*.cubin"), ("tables", "*.json"), ("compiled", "*.json"))
