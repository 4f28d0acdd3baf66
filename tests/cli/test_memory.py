import json
import sys

import pytest

CODE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

def tensor():
    return model(), torch.zeros(16, 32)

def wide():
    layers = nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)
    return nn.Sequential(*layers), torch.randn(64, 128)

def several(batch=4, sequence=2):
    return nn.Bilinear(8, 8, 4), (torch.zeros(batch, sequence, 8), torch.zeros(batch, sequence, 8))

def keywords(batch=16):
    return model(), {"input": torch.zeros(batch, 32)}

def huge():
    return nn.Linear(1 << 20, 1 << 20), torch.zeros(1 << 20, 1 << 20)

class Called(nn.Module):
    def forward(self, x):
        return nn.functional.gelu(x)

def called():
    return Called(), torch.zeros(64, requires_grad=True)

def with_loss():
    return *tensor(), torch.sum

def one():
    return model()

def broken():
    return model(), torch.zeros(16, 33)
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """The way to name a function of a file of a user's."""
    path = tmp_path / "user_memory.py"
    path.write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return lambda name: f"{path}:{name}"


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_before_and_after_are_printed_with_what_is_saved(run, target):
    outcome = run("memory", target("tensor"), "--bits", 3, "--by", "module,op", "--sort", "order")
    assert (outcome.status, outcome.err) == (0, "")
    first, _, *table, _, kept, peak = outcome.out.splitlines()
    assert first.endswith(":tensor: 2,632 parameters, a batch of 16")
    assert rows("\n".join(table)) == [
        *(["module", "op", "exact", "3", "bits", "saved"], ["0", "addmm", "2,048", "2,048", "0.0%"]),
        *(["1", "gelu", "4,096", "0", "100.0%"], ["2", "addmm", "4,096", "4,096", "0.0%"]),
        *(["1", "fewbit_activation", "0", "384"], ["total", "10,240", "6,528", "36.2%"]),
    ]
    assert kept == (
        "kept for backward: 10.0 KiB with exact activations, 6.4 KiB with 3-bit ones: 3.6 KiB (36.2%) saved"
    )
    assert peak.startswith("peak of a step:    13.0 KiB with exact activations, ") and peak.endswith(" saved")


def test_without_a_method_common_ones_stand_below(run, target):
    table = run("memory", target("wide")).out.split("\n\n")[-1]
    head, exact, *methods = [[cell.strip() for cell in line.split("  ") if cell] for line in table.splitlines()]
    assert head == ["method", "kept", "of exact", "peak", "of exact"]
    assert (exact[0], exact[2], exact[4]) == ("exact", "100.0%", "100.0%")
    assert [row[0] for row in methods] == ["3 bits", "level L2", "hooks 4 bits", "level L2, hooks 4 bits"]
    listed = json.loads(run("memory", target("wide"), "--no-peak", "--json").out)["methods"]
    kept = [float(row[2].rstrip("%")) for row in methods]
    assert [100 * row["kept"] / listed[0]["kept"] for row in listed[1:]] == pytest.approx(kept, abs=0.05)
    assert [row["peak"] for row in listed] == [None] * 5


def test_a_method_that_the_model_does_not_bear_costs_a_line(run, target, monkeypatch):
    from fewbit.runtime.plan import comparison

    measure = comparison.compare_methods

    def refuse_hooks(*arguments, methods, **keywords):
        for method in methods:
            if method[1] is not None:
                raise RuntimeError("no hooks\nat all")
            yield from measure(*arguments, methods=[method], **keywords)

    monkeypatch.setattr(comparison, "compare_methods", refuse_hooks)
    outcome = run("memory", target("wide"))
    assert (outcome.status, outcome.err.count("\n")) == (0, 1)
    assert "no more methods were measured: RuntimeError: no hooks" in outcome.err
    assert outcome.out.splitlines()[-1].startswith("level L2 ")


@pytest.mark.parametrize(
    ("arguments", "total"),
    [
        *((["keywords"], 10_240), (["with_loss"], 10_240), (["keywords", "--batch", 32], 20_480)),
        *((["several"], 2 * 4 * 2 * 8 * 4), (["several", "--batch", 2, "--sequence", 5], 2 * 2 * 5 * 8 * 4)),
        (["huge", "--meta"], 1 << 42),
    ],
)
def test_the_function_is_given_what_it_asks_for_and_returns_any_inputs(run, target, arguments, total):
    name, *options = arguments
    outcome = run("memory", target(name), *options, "--json")
    assert json.loads(outcome.out)["exact"]["bytes"] == total


def test_json_holds_every_row_and_no_text(run, target):
    outcome = run("memory", target("tensor"), "--bits", 2, "--gpu-memory", "1MB", "--copies", 2, "--json")
    report = json.loads(outcome.out)
    assert (report["parameter_bytes"], report["bits"]) == (4 * 2632, 2)
    assert report["few_bit"]["bytes"] == 2048 + 4096 + 256
    assert report["few_bit"]["rows"][1] == {
        "module": "1", "kind": "GELU", "op": "fewbit_activation", "dtype": "uint8", "bytes": 256
    }  # fmt: skip
    assert (report["replaced"], report["left"]) == (["1"], {})
    batches = report["largest_batch"]
    assert (batches["memory"], batches["copies"]) == (1_000_000, 2)
    assert [row["bits"] for row in batches["rows"]] == [None, 1, 2, 3, 4]
    # The peak: 13,312 bytes, which the one batch that there is shares out to its samples.
    assert batches["rows"][0] == {
        "bits": None, "bytes_per_sample": 640, "bytes_fixed": 0, "batch": (1_000_000 - 2 * 4 * 2632) // 640,
        "peak_per_sample": 832, "peak_fixed": 0, "batch_by_peak": (1_000_000 - 2 * 4 * 2632) // 832,
    }  # fmt: skip


def test_the_largest_batch_is_printed_for_exact_and_1_to_4_bits_or_a_method(run, target):
    lines = run("memory", target("keywords"), "--gpu-memory", "1 MiB").out.splitlines()[-6:]
    kept = ["activations", "kept", "per", "sample", "largest", "batch", "more"]
    assert lines[0].split() == [*kept, "peak", "per", "sample", "largest", "by", "peak", "more"]
    assert [line.split()[0] for line in lines[1:]] == ["exact", "1", "2", "3", "4"]
    exact = ((1 << 20) - 4 * 4 * 2632) // 640
    assert rows(lines[1])[0][:4] == ["exact", "640", "B", str(exact)]
    assert int(rows(lines[1])[0][6]) < exact
    outcome = run("memory", target("keywords"), "--level", "L2", "--gpu-memory", "1MiB", "--no-peak")
    lines = outcome.out.splitlines()[-3:]
    assert lines[0].split() == ["activations", "kept", "per", "sample", "largest", "batch", "more"]
    assert [line[:8].strip() for line in lines[1:]] == ["exact", "level L2"]


@pytest.mark.parametrize(
    ("options", "method", "kept"),
    [
        (["--level", "L2"], "level L2", 16 * 32 // 2 + 4 + 16 * 64 // 2 + 64 + 16 * 64 // 2 + 64),
        (["--hooks", 4], "hooks 4 bits", None),
        (["--level", "L3", "--bits", 1.5], "level L3, 1.5 bits", None),
        (["--outliers", 0.02, "--bits", 2], "outliers 0.02, 2 bits", None),
        (["--include", "1", "--bits", 1], "1 bit", 2048 + 4096 + 128),
        (["--exclude", "1"], "3 bits", 10_240),
    ],
)
def test_any_method_is_measured_with_its_peak(run, target, options, method, kept):
    report = json.loads(run("memory", target("tensor"), *options, "--json").out)
    assert report["method"] == method
    assert report["exact"]["peak"] == 13_312
    # Three tensors of 4,096 bytes make this peak, as in exact training; codes that are written beside them come on top.
    writes_codes = options[0] in ("--hooks", "--level")
    codes = (
        16 * 64 * 5 // 8 + 16 * 4
    )  # of the activation, in one bit more than 4, and the scale and zero point of each row
    assert 0 < report["few_bit"]["peak"] <= 13_312 + (codes if writes_codes else 0)
    assert report["exact"]["peak_with_gradients"] > 13_312
    assert report["few_bit"]["bytes"] < 10_240 or options[0] == "--exclude"
    if kept is not None and options[0] != "--level":
        assert report["few_bit"]["bytes"] == kept


def test_functions_are_counted_when_asked_for(run, target):
    plain, caught = (
        json.loads(run("memory", target("called"), "--json", *options).out)["few_bit"]["bytes"]
        for options in ([], ["--functions"])
    )
    assert (plain, caught) == (256, 24)


@pytest.mark.deep
def test_a_built_in_model_takes_no_memory_and_is_counted_as_on_a_gpu(run):
    pytest.importorskip("transformers")
    outcome = run(
        "memory", "Roberta_Base", "--bits", 3, "--batch", 2, "--sequence", 128, "--dtype", "bfloat16", "--json"
    )
    report = json.loads(outcome.out)
    by_op = {row["op"]: row for row in report["exact"]["rows"]}
    assert by_op["native_dropout"]["dtype"] == "bool"
    assert "scaled_dot_product_flash_attention_for_cpu" in by_op
    assert by_op["gelu"]["bytes"] == 2 * 128 * 3072 * 2
    assert len(report["replaced"]) == 12


def test_models_lists_what_there_is_and_the_help_names_the_page(run):
    lines = run("memory", "models").out.splitlines()
    assert lines[0].split() == ["model", "class", "takes", "size"]
    assert {"gpt2", "resnet50", "llama-7b"} <= {line.split()[0] for line in lines}
    assert "-o memory.html" in run("memory", "--help").out


def test_paper_prints_its_rows_beside_the_measured_and_writes_them(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from fewbit.plots.studies import appendix_b

    monkeypatch.setattr(appendix_b, "PAPER", {"resnet18": appendix_b.PAPER["resnet18"]})
    path = tmp_path / "paper.json"
    outcome = run("memory", "paper", "-o", path)
    assert outcome.err == f"wrote {path}\n"
    theirs, ours = rows(outcome.out)[1:]
    assert theirs[:6] == ["resnet18", "paper", "44.6", "40.0", "11.5", "813"]
    assert ours[:4] == ["measured", "44.6", "39.0", "11.5"]
    (row,) = json.loads(path.read_text())["rows"]
    assert row["paper"]["batches"] == [813, 1127, 1113, 1100, 1086]
    assert row["measured"]["activations"] == pytest.approx(39.0, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["gpt3"], 2, "no built-in model 'gpt3'; nearest: gpt2"),
        (["model.py"], 2, "'model.py' names no function; a TARGET is package.module:function or file.py:function"),
        (["no_such.py:make"], 2, "there is no file no_such.py"),
        (["gpt2", "--bits", "9"], 2, "9.0 is not in the range 1<=x<=8"),
        (["gpt2", "--level", "L9"], 2, "level is one of L0, L1"),
        (["gpt2", "--level", "L2", "--outliers", "0.1"], 2, "level and outliers exclude each other"),
        (["gpt2", "--levle", "L2"], 2, "No such option"),
        (["gpt2", "--hooks", "9"], 2, "bits must be a whole number from 1 to 8"),
        (["gpt2", "--tables", "gelu"], 2, "--tables takes NAME=FILE"),
        (["gpt2", "--gpu-memory", "much"], 2, "'much' is not a size such as 16GiB or 80GB"),
        (["gpt2", "--gpu-memory", "0GiB"], 2, "is not a size"),
        (["TARGET:one"], 2, "must return (model, inputs) or (model, inputs, loss), and returns a Sequential"),
        (["TARGET:broken"], 1, "broken failed at "),
        (["TARGET:tensor", "--by", "size"], 2, "no field 'size'; there are module, kind, op, dtype"),
        (["TARGET:tensor", "--sort", "age"], 2, "'age' is not one of"),
        *((["TARGET:wide", "--compiled", *way], 2, "--compiled") for way in (["--level", "L2"], ["--hooks", "4"])),
        *((["TARGET:wide", "--compiled", way], 2, "--compiled") for way in ("--functions", "--meta")),
        ([], 2, "Usage: fewbit memory"),
    ],
)
def test_bad_use_is_told(run, target, arguments, status, said):
    if arguments and arguments[0].startswith("TARGET:"):
        arguments = [target(arguments[0].removeprefix("TARGET:")), *arguments[1:]]
    outcome = run("memory", *arguments)
    assert (outcome.status, outcome.out) == (status, "")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1 or not arguments


def test_compiled_shows_what_the_backend_saves(run, target):
    outcome = run("memory", target("wide"), "--compiled", "--bits", "4")
    assert (outcome.status, outcome.err) == (0, "")
    head, *table, total = outcome.out.splitlines()
    assert head.split() == ["line", "tensor", "role", "bits", "exact", "saved"]
    assert any("64×256" in line and " 4 " in line for line in table)
    assert max(map(len, table)) <= 100
    report = json.loads(run("memory", target("wide"), "--compiled", "--bits", "4", "--json").out)
    assert total.startswith(f"{report['bytes']:,} bytes saved")
    assert report["bytes"] == sum(t["nbytes"] for g in report["graphs"] for t in g["tensors"])
    assert report["bytes"] < 0.2 * report["torch_compile_bytes"]


def test_options_may_stand_before_the_target(run, target):
    assert run("memory", "--bits", 2, target("tensor")).out == run("memory", "of", target("tensor"), "--bits", 2).out


def test_a_page_is_written_beside_the_table_of_one_method_too(run, target, tmp_path):
    path = tmp_path / "memory.html"
    outcome = run("memory", target("wide"), "-o", path)
    assert (outcome.status, outcome.err) == (0, f"wrote {path}\n")
    page = path.read_text()
    for method in ("exact", "3 bits", "level L2", "hooks 4 bits", "level L2, hooks 4 bits"):
        assert f'"name":"{method}"' in page
    assert "glu parts" not in page  # the model has no gated MLP
    assert outcome.out == run("memory", target("wide")).out
    assert run("memory", target("wide"), "--level", "L2", "-o", path).status == 0
    assert path.read_text().count('"name":"') == 2


def test_a_page_of_a_compiled_model(run, target, tmp_path):
    path = tmp_path / "memory.html"
    outcome = run("memory", target("wide"), "--compiled", "--bits", "4", "-o", path)
    assert (outcome.status, outcome.err) == (0, f"wrote {path}\n")
    assert "bytes saved; torch.compile alone: " in outcome.out
    page = path.read_text()
    assert '"name":"compiled, 4 bits"' in page and "torch.compile alone saves" in page


@pytest.mark.parametrize("name", ["missing/memory.html", "memory.txt", "memory"])
def test_a_page_that_cannot_be_written_is_one_line(run, target, tmp_path, name):
    outcome = run("memory", target("wide"), "-o", tmp_path / name)
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert not (tmp_path / name).exists()
