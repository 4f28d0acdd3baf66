"""The header is compiled as C99 and as C++, all warnings errors, and run; where there is no compiler, skipped."""

import dataclasses
import shutil
import subprocess

import numpy as np
import pytest
from fewbit.fewbit_gen import solve
from fewbit.fewbit_gen.activations import FAMILIES
from fewbit.tables import Table
from fewbit.tables.exporters.c_header import c_header, c_name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lookups import TABLES, awkward, points
from strategies import tables

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-O2"]
COMPILERS = {
    "C99": ["gcc", "-std=c99", "-x", "c"],
    "C++": ["g++", "-std=c++11", "-x", "c++"],
}
# For every table: reads all its doubles, writes codes and values; then the floats likewise.
PROGRAM = """
#include <stdio.h>
{includes}
#define RUN(real, encode, q, n) do {{ \\
    for (long i = 0; i < (n); i++) {{ \\
        real x, y; unsigned char code; \\
        if (fread(&x, sizeof x, 1, stdin) != 1) return 1; \\
        code = encode(x); y = q(x); \\
        fwrite(&code, 1, 1, stdout); fwrite(&y, sizeof y, 1, stdout); \\
    }} }} while (0)
int main(void)
{{
{runs}
    return 0;
}}
"""


def compiler(language):
    command = COMPILERS[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    return command


def build(folder, language, headers, runs, *options):
    """Compile a program that includes `headers`, name -> text, and return its path."""
    for name, text in headers.items():
        (folder / name).write_text(text, encoding="ascii")
    includes = "\n".join(f'#include "{name}"\n#include "{name}"' for name in headers)  # twice: the guard holds
    (folder / "main.c").write_text(PROGRAM.format(includes=includes, runs=runs))
    command = [*compiler(language), *WARNINGS, *options, "main.c", "-o", "main"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    return folder / "main"


def check(folder, language, tables):
    """Compile the headers of `tables`, no two of one name, into one program and compare what it answers."""
    headers = {f"{c_name(table)}.h": c_header(table) for table in tables}
    assert len(headers) == len(tables)
    feed, runs, expected = [], [], []
    with np.errstate(over="ignore", under="ignore"):
        for real, dtype, suffix in (("double", np.float64, ""), ("float", np.float32, "f")):
            for table in tables:
                x = points(table).astype(dtype)
                name = c_name(table)
                runs.append(f"    RUN({real}, {name}_encode{suffix}, {name}_q{suffix}, {x.size});")
                feed.append(x.tobytes())
                rows = np.empty(x.size, [("code", np.uint8), ("value", dtype)])
                rows["code"], rows["value"] = table.encode(x), table(x)
                expected.append((name, x, rows))
    program = build(folder, language, headers, "\n".join(runs))
    out = subprocess.run([program], input=b"".join(feed), capture_output=True, check=True, timeout=60).stdout
    for name, x, rows in expected:
        result, out = np.frombuffer(out, rows.dtype, x.size), out[rows.nbytes :]
        wrong = result["code"] != rows["code"]
        assert not wrong.any(), f"{name}: {x[wrong][0]!r}"
        assert result["value"].tobytes() == rows["value"].tobytes(), name
    assert out == b""


@pytest.mark.parametrize("language", COMPILERS)
def test_gives_what_the_table_gives(tmp_path, language):
    check(tmp_path, language, list({c_name(table): table for table in TABLES.values()}.values()))


@pytest.mark.deep
def test_every_activation_at_8_bits_gives_what_its_table_gives(tmp_path):
    """The largest tables there are: 256 levels, shared by up to 1,600 intervals (sin)."""
    names = [name if name != "threshold" else "threshold(threshold=1,value=0)" for name in FAMILIES]
    solved = [solve(name, bits=8, certify=False) for name in names]
    assert max(table.codes.size for table in solved) > 1000
    check(tmp_path, "C99", solved)


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(st.lists(tables(), min_size=10, max_size=20))
def test_gives_what_any_table_gives(tmp_path_factory, drawn):
    named = [dataclasses.replace(table, activation=f"f{i}") for i, table in enumerate(drawn)]
    check(tmp_path_factory.mktemp("drawn"), "C99", named)


@pytest.mark.parametrize("name", TABLES)
def test_every_header_compiles_alone(tmp_path, name):
    """Under the strictest warnings that a user's own build may have."""
    strict = ["-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wundef", "-Wdouble-promotion", "-Wcast-qual"]
    build(tmp_path, "C99", {"table.h": c_header(TABLES[name])}, "", *strict)


def test_two_tables_of_one_name_do_not_pass_for_each_other(tmp_path):
    one, two = awkward([0.0], seed=0), awkward([0.0], seed=1)
    assert c_name(one) == c_name(two)
    with pytest.raises(AssertionError, match="redefinition"):
        build(tmp_path, "C99", {"one.h": c_header(one), "two.h": c_header(two)}, "")


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("gelu", "fewbit_gelu_shared_16"),
        ("softplus(beta=2)", "fewbit_softplus_beta_2_shared_16"),
        ("x*sigmoid(1.702*x)", "fewbit_x_sigmoid_1_702_x_shared_16"),
        ("§", "fewbit_shared_16"),
        ("__X__", "fewbit_x_shared_16"),
    ],
)
def test_names_are_identifiers(activation, name):
    assert c_name(awkward([0.0], activation=activation)) == name


def test_says_where_the_table_comes_from():
    text = c_header(Table("gelu", "shared", "normal:0,1", [0.0], [0, 1], [0.0, 1.0], 0.5, 0.25))
    for fact in ("gelu", "shared", "normal:0,1", "0.5", "0.25", "fewbit 0.1.0"):
        assert f" {fact}\n" in text
