import contextlib
import os
import resource
import stat
import subprocess
import sys
import time

import pytest
from fewbit.tables import FewbitError
from fewbit.tables import files as writing
from fewbit.tables.files import atomic_write, check_writable


def write(path, content=b"new"):
    with atomic_write(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def full_device(room):
    """No file grows beyond `room` bytes: to a writer that is a device that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b"old")
    return path


def files(folder):
    return sorted(path.name for path in folder.iterdir())


class TestAtomicWrite:
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
    def test_keeps_the_old_content_when_the_block_fails(self, target, error):
        with pytest.raises(error), atomic_write(target) as stream:
            stream.write(b"half")
            raise error
        assert target.read_bytes() == b"old"
        assert files(target.parent) == ["t.json"]

    def test_leaves_nothing_when_the_first_write_fails(self, tmp_path):
        with pytest.raises(RuntimeError), atomic_write(tmp_path / "t.json") as stream:
            stream.write(b"half")
            raise RuntimeError
        assert files(tmp_path) == []

    def test_replaces_the_old_content_and_shows_no_half_to_a_reader(self, target):
        with atomic_write(target) as stream:
            stream.write(b"ne")
            stream.flush()
            assert target.read_bytes() == b"old"
            stream.write(b"w")
        assert target.read_bytes() == b"new"
        assert files(target.parent) == ["t.json"]

    @pytest.mark.parametrize("size", [200, 200_000])  # fails on close, fails in write
    def test_keeps_the_old_content_on_a_full_device(self, target, size):
        with full_device(100), pytest.raises(FewbitError, match=r"cannot write .*t\.json: File too large"):
            write(target, b"x" * size)
        assert target.read_bytes() == b"old"
        assert files(target.parent) == ["t.json"]

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    def test_tells_when_a_device_is_full(self):
        with pytest.raises(FewbitError, match="cannot write /dev/full: No space left on device"):
            write("/dev/full")

    def test_writes_into_a_device_and_does_not_replace_it(self):
        write(os.devnull)
        assert stat.S_ISCHR(os.stat(os.devnull).st_mode)

    @pytest.mark.parametrize("name", ["t.json", "later.json"], ids=["to a file", "to none yet"])
    def test_follows_a_link(self, target, name):
        link = target.parent / "link.json"
        link.symlink_to(name)
        write(link)
        assert link.is_symlink()
        assert (target.parent / name).read_bytes() == b"new"

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
    def test_keeps_the_mode_of_the_old_file(self, target, mode):
        target.chmod(mode)
        write(target)
        assert stat.S_IMODE(target.stat().st_mode) == mode

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
    def test_gives_a_new_file_the_mode_that_open_would(self, tmp_path, umask, mode):
        before = os.umask(umask)
        try:
            write(tmp_path / "t.json")
            assert os.umask(umask) == umask  # and leaves the mask as it was
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "t.json").stat().st_mode) == mode

    def test_takes_the_longest_name_that_a_file_can_have(self, tmp_path):
        write(tmp_path / ("n" * 255))
        assert files(tmp_path) == ["n" * 255]

    def test_takes_a_relative_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write("t.json")
        assert files(tmp_path) == ["t.json"]


def leftovers(folder):
    return sorted(path.name for path in folder.glob(".fewbit-*"))


WRITER = """
import os, signal, sys
from fewbit.tables.files import atomic_write
with atomic_write(sys.argv[1]) as stream:
    stream.write(b"half")
    stream.flush()
    print("writing", flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


@contextlib.contextmanager
def writer(path, then):
    """Another process that writes to `path`; it dies, or goes on when its input ends."""
    command = [sys.executable, "-c", WRITER, str(path), then]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


class TestOrphans:
    def test_what_a_killed_writer_left_is_removed_by_the_next(self, tmp_path):
        with writer(tmp_path / "a", "dies") as process:
            process.wait()
        assert len(leftovers(tmp_path)) == 1
        write(tmp_path / "b")
        assert os.listdir(tmp_path) == ["b"]

    def test_what_another_writes_stays(self, tmp_path):
        with writer(tmp_path / "a", "goes on") as process:
            write(tmp_path / "b")
            assert len(leftovers(tmp_path)) == 1
            process.communicate("")
        assert (tmp_path / "a").read_bytes() == b"half"
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]

    def test_writers_inside_writers_stay(self, tmp_path):
        with atomic_write(tmp_path / "a") as outer:
            outer.write(b"outer")
            with atomic_write(tmp_path / "b") as inner:
                inner.write(b"inner")
                write(tmp_path / "c")
        assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"outer", b"inner", b"new"]
        assert not leftovers(tmp_path)

    def test_where_files_cannot_be_locked_the_old_ones_are_removed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(writing, "fcntl", None)
        for name, age in (("old", 2 * 24 * 3600), ("new", 60)):
            path = tmp_path / f".fewbit-{name}.tmp"
            path.write_bytes(b"half")
            os.utime(path, (time.time() - age,) * 2)
        write(tmp_path / "a")
        assert leftovers(tmp_path) == [".fewbit-new.tmp"]

    def test_links_folders_and_other_files_stay(self, tmp_path):
        kept = tmp_path / "kept"
        kept.write_bytes(b"kept")
        (tmp_path / ".fewbit-link.tmp").symlink_to(kept)
        (tmp_path / ".fewbit-folder.tmp").mkdir()
        os.mkfifo(tmp_path / ".fewbit-pipe.tmp")
        (tmp_path / ".fewbit-notes.txt").write_bytes(b"mine")
        write(tmp_path / "a")
        assert leftovers(tmp_path) == [f".fewbit-{n}" for n in ("folder.tmp", "link.tmp", "notes.txt", "pipe.tmp")]
        assert kept.read_bytes() == b"kept"


@pytest.mark.parametrize("attempt", [check_writable, write])
class TestRefusal:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("", "it is a folder; name a file"),
            ("no/t.json", "there is no folder"),
            ("t.json/t.json", "there is no folder"),
            ("n" * 300, "File name too long"),
            ("n\0", "null byte"),
        ],
    )
    def test_says_what_stands_in_the_way(self, target, attempt, name, message):
        with pytest.raises(FewbitError, match=f"cannot write .*{message}"):
            attempt(f"{target.parent}/{name}")
        assert files(target.parent) == ["t.json"]

    @pytest.mark.parametrize("locked", ["folder", "file"])
    def test_names_a_lack_of_permission(self, target, attempt, locked, monkeypatch):
        path = target if locked == "file" else target.parent
        # os.access is asked, not chmod used: whoever runs the tests as root may write anywhere.
        monkeypatch.setattr(os, "access", lambda p, mode: os.fspath(p) != os.fspath(path.resolve()))
        with pytest.raises(FewbitError, match=r"cannot write .*t\.json: permission denied"):
            attempt(target)


def test_check_writable_writes_nothing(tmp_path):
    check_writable(tmp_path / "t.json")
    assert files(tmp_path) == []
