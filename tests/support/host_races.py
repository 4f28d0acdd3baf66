"""The CUDA kernels on the CPU with every access to memory watched: what two threads may do in either order is an error.

The checker is host_races.cpp: what races is found whatever the order in which threads ran.
"""

import ctypes
import functools
import subprocess

import backends
import host_kernels
from host_kernels import built

_KINDS = ("a load", "a store", "an atomic access", "a barrier", "a barrier that not all threads reach")
_DIVERGENT = 3


class RaceError(AssertionError):
    """What races in a launch, a line each."""


class _Race(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("kind", "other_kind")]
    _fields_ += [(name, ctypes.c_uint64) for name in ("place", "other_place")]
    _fields_ += [(name, ctypes.c_uint) for name in ("block", "thread")]


class Watched:
    """A library whose every launch raises `RaceError` where something races."""

    def __init__(self, library, source):
        self._library, self._source = library, source

    def __getattr__(self, name):
        def run(*arguments):
            getattr(self._library, name)(*arguments)
            races = (_Race * 16)()
            if count := self._library.take_races(races):
                raise RaceError("\n".join(self._text(race) for race in races[:count]))

        return run

    def _text(self, race):
        ends = ((race.kind, race.place), (race.other_kind, race.other_place))
        lines = [place if race.kind >= _DIVERGENT else self._line_of(place) for _, place in ends]
        texts = [f"{_KINDS[kind]}: {self._text_of(line)}" for (kind, _), line in zip(ends, lines, strict=True)]
        return f"block {race.block}, thread {race.thread}: " + " | ".join(texts[: None if lines[1] else 1])

    def _text_of(self, line):
        return self._source.splitlines()[line - 1].strip() if line else ""

    def _line_of(self, place):
        """The line of the source that is behind an address: of what was inlined the innermost."""
        command = ["addr2line", "-e", self._library._name, hex(place - 1)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rsplit(":", 1)[1]
        return int(found.split()[0])


def watched(source):
    """The library of a source, watched."""
    return Watched(built(source, watched=True), source)


def build_kernels_by(build, monkeypatch):
    """Let all kernels that run on the CPU be the libraries that `build` returns, while `monkeypatch` lasts."""
    monkeypatch.setattr(host_kernels, "built", build)
    for module in (host_kernels, backends):
        for name, function in vars(module).copy().items():
            if name.endswith("_library"):
                monkeypatch.setattr(module, name, functools.cache(function.__wrapped__))
