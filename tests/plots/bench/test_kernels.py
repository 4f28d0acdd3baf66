import json

import pytest
from fewbit.plots.bench import kernels
from fewbit.runtime.backends.cuda.codegen.compiler import Usage


@pytest.fixture
def compiled(monkeypatch):
    """Tasks that were compiled; the compiler is a stand-in, whose multiply spills for sm_80."""
    tasks = []

    def compile_task(task):
        tasks.append(task)
        usages = [Usage("encode", 32, 0, 0, 1000), Usage("multiply", 40, 8 * (task.arch == "sm_80"), 0, 2000)]
        table = task.table
        search = "sum"
        return kernels.Compiled(
            table.activation, table.kind, table.bits, task.dtype, task.arch, search, 120.0, 9, usages
        )

    monkeypatch.setattr(kernels, "compile_task", compile_task)
    return tasks


def test_what_the_kernels_take_is_shown(run, compiled, tmp_path):
    options = ["--bits", "1,2", "--dtype", "bfloat16", "--arch", "sm_90", "--jobs", "1", "-o", tmp_path / "k.json"]
    outcome = run("bench", "kernels", "gelu", "relu", *options)
    assert outcome.status == 0
    assert outcome.err == f"wrote {tmp_path / 'k.json'}\n"
    assert len(compiled) == 6  # GELU's four tables, and ReLU's of one bit, which serve for two
    rows = [line.split() for line in outcome.out.splitlines()]
    assert rows[1] == ["sm_90", "bfloat16", "encode", "6", "32-32", "1000", "0", "120"]
    assert rows[2] == ["sm_90", "bfloat16", "multiply", "6", "40-40", "2000", "0", "120"]
    assert outcome.out.splitlines()[-1] == "12 kernels, of which spill: 0"
    assert len(json.loads((tmp_path / "k.json").read_text())["kernels"]) == 6


def test_a_spill_is_a_failure(run, compiled):
    outcome = run("bench", "kernels", "relu", "--bits", "1", "--dtype", "float32", "--jobs", "1")
    assert outcome.status == 1
    assert outcome.out.splitlines()[-1] == "12 kernels, of which spill: 2"


def test_all_are_compiled_if_none_is_named(run, compiled):
    assert run("bench", "kernels", "--bits", "1", "--arch", "sm_90", "--jobs", "1").status == 0
    assert {task.dtype for task in compiled} == set(kernels.NUMBERS)
    assert {task.table.kind for task in compiled} == {"shared", "interval"}
    assert len({task.table.activation for task in compiled}) == len(kernels.ACTIVATIONS)
