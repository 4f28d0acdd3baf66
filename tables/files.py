"""Atomic file writes: a reader sees the old content or the new, never a part of it."""

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import FewbitError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_PREFIX, _SUFFIX = ".fewbit-", ".tmp"
_LONGEST_WRITE = 24 * 3600  # seconds


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `FewbitError` if a file could not be written at `path`; writes nothing."""
    target = Path(path)
    try:
        obstacle = _obstacle(target.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # circular links; a name that no file can have
        obstacle = reason(error)
    if obstacle:
        raise FewbitError(f"cannot write {target}: {obstacle}")


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create the folder `path` and missing parents; raises `FewbitError` if that fails."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise FewbitError(f"cannot make the folder {os.fspath(path)}: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Return the cause of a file error, without the number and the path that Python's message repeats."""
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
def atomic_write(path: str | os.PathLike[str], *, follow: bool = True) -> Iterator[BinaryIO]:
    """Open `path` for binary writing; the new content replaces the old one only if the block succeeds.

    The bytes go to a temporary file in the same folder, which is renamed at the end. A pipe or a device
    (`/dev/stdout`) cannot be a rename target and is written directly. Temporary files left by killed writers are
    removed.

    Args:
        path: the file.
        follow: whether a link at `path` means the file behind it, as for a path that a user gives. Not for a cache:
            the names of its files can be guessed, and a planted link would overwrite what it points to.

    Raises:
        FewbitError: the file cannot be written.
    """
    target = Path(path)
    check_writable(target if follow else target.parent / f"{_PREFIX}new")
    try:
        if follow and _is_device(target):
            with open(target, "wb") as stream:
                yield stream
            return
        if follow:
            target = target.resolve()  # replace the file behind the link, not the link itself
        elif target.is_symlink():
            target.unlink()
        if target.exists():
            mode = stat.S_IMODE(target.stat().st_mode)
        else:
            mask = os.umask(0)  # it can only be read by setting it
            os.umask(mask)
            mode = 0o666 & ~mask
        remove_orphans(target.parent)
        handle, temporary = _locked_temporary(target.parent)
        # Closing the stream releases no lock held by another handle, so the lock lasts until the rename.
        lock = os.dup(handle) if fcntl is not None else None
        try:
            with os.fdopen(handle, "wb") as stream:
                yield stream
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            if lock is not None:
                os.close(lock)
    except OSError as error:
        raise FewbitError(f"cannot write {target}: {reason(error)}") from error


def remove_orphans(folder: Path) -> None:
    """Remove the temporary files in `folder` whose writers are dead.

    A writer locks its file, and the system releases the locks of a process however it ends. Where files cannot be
    locked, a file that has not been written for a day counts as orphaned.
    """
    with contextlib.suppress(OSError):
        names = [entry.name for entry in os.scandir(folder) if entry.name.startswith(_PREFIX)]
        for name in names:
            if name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):  # owned by another user, or removed meanwhile
                    _remove_if_orphan(folder / name)


def _remove_if_orphan(path: Path) -> None:
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return
        dead = _locks(handle)
        if dead is None:
            dead = time.time() - status.st_mtime > _LONGEST_WRITE
        if dead and _is_at(path, status):
            os.unlink(path)
    finally:
        os.close(handle)


def _locked_temporary(folder: Path) -> tuple[int, str]:
    """Create a temporary file, locked where the system supports it; return its handle and path."""
    while True:
        handle, path = tempfile.mkstemp(dir=folder, prefix=_PREFIX, suffix=_SUFFIX)
        # Between creation and locking another writer may have removed it as an orphan.
        if _locks(handle) is not False and _is_at(Path(path), os.fstat(handle)):
            return handle, path
        os.close(handle)


def _locks(handle: int) -> bool | None:
    """Lock an open file; return whether that succeeded, None where files cannot be locked."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Return whether `path` still is the file with this status."""
    try:
        return os.path.samestat(os.lstat(path), status)
    except OSError:
        return False
