import struct
import subprocess
import sys

import numpy as np
import pytest
from fewbit.tables.exporters.python_module import python_module
from hypothesis import given, settings
from lookups import TABLES, points
from strategies import anything, tables

# Reads doubles, writes q(x) of each and then its code: nothing but the module's text and the standard library.
PROGRAM = """
import runpy, struct, sys
module = runpy.run_path(sys.argv[1])
raw = sys.stdin.buffer.read()
x = struct.unpack(f"<{len(raw) // 8}d", raw)
sys.stdout.buffer.write(struct.pack(f"<{len(x)}d", *map(module["q"], x)) + bytes(map(module["encode"], x)))
"""


@pytest.mark.parametrize("name", TABLES)
def test_a_bare_interpreter_gives_what_the_table_gives(tmp_path, name):
    table = TABLES[name]
    (tmp_path / "table.py").write_text(python_module(table), encoding="ascii")
    x = points(table)
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, tmp_path / "table.py"]
    done = subprocess.run(command, input=x.astype("<f8").tobytes(), capture_output=True, check=False, timeout=60)
    assert done.stderr == b""
    assert done.stdout[: 8 * x.size] == table(x).astype("<f8").tobytes()
    assert done.stdout[8 * x.size :] == table.encode(x).tobytes()


@settings(max_examples=50)
@given(tables(), anything)
def test_every_table_is_a_module_of_the_same_bits(table, x):
    module = {}
    exec(python_module(table), module)
    for name, field in (("BOUNDARIES", "boundaries"), ("LEVELS", "levels"), ("CODES", "codes")):
        expected = getattr(table, field)
        assert np.array(module[name], expected.dtype).tobytes() == expected.tobytes()
    assert struct.pack("d", module["q"](x)) == table(x).tobytes()
    assert module["encode"](x) == table.encode(x)


def test_lines_stay_short():
    assert max(map(len, python_module(TABLES["many"]).splitlines())) <= 100
