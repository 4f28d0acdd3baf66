"""Writing files so that a reader sees the old content or the new, never a half."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import FewbitError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `FewbitError` if a file could not be written at `path`; writes nothing."""
    target = Path(path)
    try:
        obstacle = _obstacle(target.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a name that no file can have
        obstacle = reason(error)
    if obstacle:
        raise FewbitError(f"cannot write {target}: {obstacle}")


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make the folder `path` and those above it where they are not there yet; raises `FewbitError` if it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise FewbitError(f"cannot make the folder {os.fspath(path)}: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Return what went wrong with a file, without the number and the path that Python's own text repeats."""
    return getattr(error, "strerror", None) or str(error)


def _obstacle(target: Path) -> str | None:
    if target.is_dir():
        return "it is a folder; name a file"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent}"
    touched = [target] if _is_device(target) else [target.parent, target]
    if not all(os.access(path, os.W_OK) for path in touched if path.exists()):
        return "permission denied"
    return None


def _is_device(target: Path) -> bool:
    return target.exists() and not target.is_file()


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open `path` for binary writing; the new content replaces the old one only if the block succeeds.

    The bytes go to a temporary file in the same folder, which is renamed at the end. A pipe or a device
    (`/dev/stdout`) cannot be renamed onto and is written directly.

    Raises:
        FewbitError: the file cannot be written.
    """
    target = Path(path)
    check_writable(target)
    try:
        if _is_device(target):
            with open(target, "wb") as stream:
                yield stream
            return
        target = target.resolve()  # through a link: replace the file it names, not the link
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".fewbit-", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as stream:
                yield stream
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise FewbitError(f"cannot write {target}: {reason(error)}") from error


def _umask() -> int:
    # os.umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
