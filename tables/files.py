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
    folder = target.resolve().parent
    if target.is_dir():
        raise FewbitError(f"cannot write {target}: it is a folder; name a file")
    if not folder.is_dir():
        raise FewbitError(f"cannot write {target}: there is no folder {folder}")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise FewbitError(f"cannot write {target}: permission denied")


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
        if target.exists() and not target.is_file():
            with open(target, "wb") as stream:
                yield stream
            return
        target = target.resolve()  # through a link: replace the file it names, not the link
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
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
        raise FewbitError(f"cannot write {target}: {error.strerror or error}") from error


def _umask() -> int:
    # os.umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
