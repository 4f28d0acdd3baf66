import logging
import subprocess
import sys
import threading

import pytest
from fewbit.tables import compiling
from fewbit.tables.compiling import (
    LINE,
    NotCompiledError,
    announced_compilation,
    compiled_once,
    refused_compilation,
    silent_compilation,
)
from in_threads import in_threads
from numba import njit
from numba.core import event

BEGINS = ("fewbit: compiling 1 of 2: add", "fewbit: another process compiles add: waiting for it")


def compile_something():
    """What Numba's compiler tells its listeners for each of its passes."""
    for _ in range(3):
        event.broadcast(event.Event("numba:run_pass", event.EventStatus.START))
        event.broadcast(event.Event("numba:run_pass", event.EventStatus.END))


@pytest.fixture(autouse=True)
def not_announced():
    compiling._announce_once.cache_clear()


def test_numba_tells_of_functions_and_callbacks_that_it_compiles():
    for make in ("njit(lambda x: x + 1)(1)", "cfunc('int64(int64)')(lambda x: x + 1)"):
        code = (
            "from numba import cfunc, njit\nfrom fewbit.tables.compiling import refused_compilation, NotCompiledError\n"
            f"try:\n    with refused_compilation(): {make}\nexcept NotCompiledError: print('refused')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout == "refused\n", done.stderr


def test_a_line_once_in_a_process(caplog):
    for _ in range(2):
        with announced_compilation():
            compile_something()
    assert [record.getMessage() for record in caplog.records] == [LINE]
    assert caplog.records[0].name.startswith("fewbit") and caplog.records[0].levelno == logging.WARNING


def test_no_line_where_nothing_is_compiled(caplog):
    @njit
    def add(x):
        return x + 1

    add(1)
    with announced_compilation():
        add(2)
    compile_something()  # of somebody else
    assert not caplog.records


def test_silence_inside_and_no_longer_afterwards(caplog):
    with silent_compilation(), announced_compilation():
        compile_something()
    assert not caplog.records
    with announced_compilation():
        compile_something()
    assert len(caplog.records) == 1


def test_refusing_compiles_nothing_and_leaves_no_trace():
    @njit
    def add(x):
        return x + 1

    with pytest.raises(NotCompiledError), refused_compilation():
        add(1)
    assert add(1) == 2


def test_without_a_configuration_of_logging_the_line_is_on_standard_error():
    code = (
        "from numba import njit\nfrom fewbit.tables.compiling import announced_compilation\n"
        "with announced_compilation(): njit(lambda x: x + 1)(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", LINE + "\n")


def test_of_those_that_miss_a_function_at_the_same_time_one_compiles_it(tmp_path):
    """Locks are those of open files, so that threads stand for processes here."""
    compilations, both_missed = [], threading.Barrier(2, timeout=60)

    def make():
        if not compilations:
            compile_something()
            compilations.append(threading.get_ident())
        return "code"

    def first_misses():
        try:
            return make()
        except Exception:
            both_missed.wait()
            raise

    def use(_):
        calls = iter((first_misses, make))
        return compiled_once(lambda: next(calls)(), tmp_path / "folder" / "lock", "add", lambda: "1 of 2")

    assert in_threads(use, range(2)) == ["code", "code"] and len(compilations) == 1


def test_who_compiles_and_who_waits_say_so_and_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(compiling, "EVERY", 0.01)
    log, lines, compiled = logging.getLogger("fewbit.compiling"), [], []
    both_missed, said = threading.Barrier(2, timeout=60), threading.Event()

    def hear(record):
        lines.append(record.getMessage())
        if all(sum(line.startswith(begin) for line in lines) > 1 for begin in BEGINS):
            said.set()  # each line twice
        return True

    def use(_):
        calls = iter((first, second))
        return compiled_once(lambda: next(calls)(), tmp_path / "lock", "add", lambda: "1 of 2")

    def first():
        try:
            compile_something()
        finally:
            both_missed.wait()

    def second():
        if not compiled:
            compile_something()
            compiled.append(said.wait(60))
        return "code"

    log.addFilter(hear)
    try:
        assert in_threads(use, range(2)) == ["code", "code"] and compiled == [True]
    finally:
        log.removeFilter(hear)
    assert {line for line in lines if not line.endswith(" s")} == {LINE, *BEGINS}


def test_where_no_lock_can_be_a_function_is_compiled_all_the_same(tmp_path, caplog):
    (tmp_path / "file").write_text("")

    def make():
        compile_something()
        return "code"

    assert compiled_once(make, tmp_path / "file" / "lock", "add", lambda: "1 of 2") == "code"
    assert caplog.records[-1].getMessage() == BEGINS[0]


def test_what_another_thread_compiles_is_neither_refused_nor_announced(caplog):
    def elsewhere():
        thread = threading.Thread(target=compile_something)
        thread.start()
        thread.join()

    with refused_compilation():
        elsewhere()
    with announced_compilation():
        elsewhere()
    assert not caplog.records
