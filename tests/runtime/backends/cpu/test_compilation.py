"""A kernel's first use says which one is compiled, and only one process compiles it."""

import re
from pathlib import Path

import numba
import pytest
from fewbit.runtime.backends import cpu
from fewbit.runtime.backends.cpu import compilation
from fewbit.runtime.backends.cpu.compilation import KERNELS, compile_kernel
from fewbit.tables import compiling


@pytest.fixture(autouse=True)
def nothing_compiled_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "_numbers", {})
    compiling._announce_once.cache_clear()


def idle(job):
    pass


def rest(job):
    pass


def test_a_line_for_each_kernel_that_is_not_in_the_cache(caplog):
    for body in (idle, rest, idle):
        compile_kernel(body)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        compiling.LINE,
        f"fewbit: compiling 1 of {KERNELS}: test_compilation idle",
        f"fewbit: compiling 2 of {KERNELS}: test_compilation rest",
    ]


def test_all_kernels_are_counted():
    sources = [path.read_text() for path in Path(cpu.__file__).parent.glob("*.py")]
    calls = sum(len(re.findall(r"^    return (?:build|compile_kernel)\((?!body)", source, re.M)) for source in sources)
    assert calls == KERNELS
