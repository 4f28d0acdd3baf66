import json
import sys
from importlib.metadata import version

import fewbit
import pytest
from fewbit.cli import doctor
from fewbit.runtime import self_test
from fewbit.runtime.self_test import Check, Outcome


@pytest.fixture
def two_kernels(monkeypatch):
    """Let two kernels be all there are; returns the outcome of each check of the second, which tests set."""
    import torch

    second = [Outcome("ok"), Outcome("ok")]
    checks = [Check("activation", "encode", torch.float32, 3, lambda *_: [])]
    checks += [Check("glu", "backward", torch.bfloat16, bits, lambda *_: []) for bits in (1, 2)]

    def outcome(check, backend, *, compiles):
        assert not compiles
        return Outcome("ok", seconds=1.0) if check.family == "activation" else second[check.bits - 1]

    monkeypatch.setattr(self_test, "checks", lambda backend: iter(checks))
    monkeypatch.setattr(self_test, "outcome", outcome)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return second


def test_says_what_is_installed_and_what_works(run, two_kernels):
    result = run("doctor")
    assert (result.status, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0][:2] == ["fewbit", f"{fewbit.__version__},"]
    assert ["torch", version("torch"), "training"] in lines
    assert ["reference", "yes", "plain", "torch,", "on", "any", "device"] in lines
    assert ["cpu", "glu", "backward", "ok", "2", "of", "2", "0.00", "s"] in lines
    assert result.out.endswith("\nall 2 kernels give the numbers of plain torch\n")


def test_a_failed_kernel_is_named_and_the_status_is_1(run, two_kernels):
    two_kernels[1] = Outcome("failed", "1 of 8 numbers of result 0 differ: 1, not 2")
    result = run("doctor")
    assert result.status == 1
    assert "cpu glu backward, bfloat16, 2 bits: 1 of 8 numbers of result 0 differ: 1, not 2\n" in result.out
    assert result.out.endswith("\n1 kernel of 2 failed: please report this output\n")


def test_a_kernel_not_compiled_is_named_and_the_status_is_0(run, two_kernels):
    two_kernels[0] = Outcome("not compiled")
    result = run("doctor")
    assert result.status == 0
    assert "1 of 2" in result.out and "`fewbit doctor --warm`" in result.out


def test_json(run, two_kernels):
    two_kernels[0] = Outcome("failed", "wrong")
    result = run("doctor", "--json")
    report = json.loads(result.out)
    assert result.status == 1 and report["failed"] == 1
    assert report["fewbit"] == fewbit.__version__
    assert [backend["name"] for backend in report["backends"]] == ["reference", "cpu", "cuda", "compile"]
    first, second = report["kernels"]
    assert (first["kernel"], first["state"], first["seconds"]) == ("activation encode", "ok", 1.0)
    assert (second["passed"], second["tested"], second["problems"]) == (1, 2, ["bfloat16, 1 bit: wrong"])


def test_warm_compiles_all_before_the_test(run, two_kernels, monkeypatch):
    done = []
    monkeypatch.setattr(doctor, "compile_ahead", lambda everything: done.append(everything))
    assert run("doctor", "--warm").status == 0
    assert done == [True]


def test_what_is_missing_comes_with_how_to_get_it(run, two_kernels, monkeypatch):
    def absent(name):
        if name in ("python-flint", "numba"):
            raise doctor.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", absent)
    lines = run("doctor").out.splitlines()
    assert [line for line in lines if line.endswith("pip install python-flint")]
    assert [line for line in lines if line.endswith("pip install numba")]


def test_without_torch_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    result = run("doctor")
    assert result.status == 0
    assert result.out.count("torch is not installed: pip install torch") == 4


def test_without_a_folder_for_the_cache_it_still_reports(run, two_kernels, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "file"))
    result = run("doctor")
    assert result.status == 0 and "set FEWBIT_CACHE" in result.out


@pytest.mark.deep
def test_in_a_process_of_its_own_every_kernel_is_compiled_or_named(run_process, tmp_path):
    import os

    result = run_process("doctor", "--json", env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)})
    assert result.status == 0, result.err
    kernels = json.loads(result.out)["kernels"]
    assert {kernel["state"] for kernel in kernels if kernel["backend"] == "cpu"} == {"not compiled"}


@pytest.mark.parametrize(("cuda", "release"), [("12.4", "cu12"), ("13.0", "cu13"), (None, "cu13")])
def test_the_compiler_of_cuda_kernels_is_that_of_torch(run, two_kernels, monkeypatch, cuda, release):
    missing = doctor.version

    def found(name):
        if name == "cuda-core":
            raise doctor.PackageNotFoundError
        return missing(name)

    monkeypatch.setattr(doctor, "version", found)
    monkeypatch.setattr("torch.version.cuda", cuda)
    assert f"pip install 'cuda-core[{release}]'" in run("doctor").out


@pytest.mark.parametrize(
    ("nvrtc", "cuda", "advice"),
    [
        ("13.0", "13.0", ""),
        ("13.5", "13.0", "pip install 'nvidia-cuda-nvrtc==13.0.*'"),
        ("12.9", "12.8.1", "pip install 'nvidia-cuda-nvrtc-cu12==12.8.*'"),
    ],
)
def test_a_compiler_of_another_release_than_torch_is_told(run, two_kernels, monkeypatch, nvrtc, cuda, advice):
    """Their erf differs: 16-bit forward passes are torch's bit for bit under one release."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("fewbit.runtime.backends.cuda.codegen.compiler.has_compiler", lambda: True)
    monkeypatch.setattr("fewbit.runtime.backends.cuda.codegen.compiler.compiler_version", lambda: nvrtc)
    (line,) = [line for line in run("doctor").out.splitlines() if f"a GPU, kernels compiled by NVRTC {nvrtc}" in line]
    assert line.endswith(advice) and ("f(x) may differ" in line) == bool(advice)


@pytest.mark.parametrize(("cxx", "works"), [(sys.executable, "yes"), ("no-compiler-here", "no")])
def test_torch_compile_needs_a_compiler_of_what_inductor_writes(run, two_kernels, cxx, works):
    from torch._inductor import config, cpp_builder

    # Inductor asks no more of a compiler than its version, which Python has too, and remembers the answer.
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (cxx,)}):
        lines = [line.split() for line in run("doctor").out.splitlines()]
    cpp_builder.cpp_compiler_search.cache_clear()
    (line,) = [line for line in lines if line[:1] == ["compile"]]
    assert line[1] == works
    assert ("C++ compiler" in " ".join(line)) == (works == "no")


@pytest.mark.parametrize(
    ("drivers", "built_for", "is_installed", "words"),
    [
        ((False, False), "13.0", True, "the one for the CPU, 2 GB smaller: there is no GPU here"),
        ((False, False), None, True, "the installed one is right: there is no GPU here"),
        ((True, False), None, True, "the one for CUDA: there is a driver of a GPU, and torch has another build"),
        ((True, False), "13.0", True, "torch is built for CUDA 13.0 and sees no GPU: its driver may be older"),
        ((False, True), None, True, "the one for ROCm: "),
        ((False, False), None, False, "the one for the CPU, by the command that torch's page Get Started shows; "),
    ],
)
def test_the_build_of_torch_that_is_right(run, two_kernels, monkeypatch, drivers, built_for, is_installed, words):
    monkeypatch.setattr(doctor, "gpu_drivers", lambda: drivers)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setattr("torch.version.cuda", built_for)
    if not is_installed:
        monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.torch_build().startswith(words)
    if is_installed:
        said = run("doctor").out.partition("torch's build for this machine: ")[2]
        assert " ".join(said.split()).startswith(words)
        assert len(said.partition("\n")[0]) <= 100 - len("torch's build for this machine: ")
