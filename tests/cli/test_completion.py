import os

import pytest


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_prints_a_script_that_asks_fewbit(run, shell):
    result = run("completion", shell)
    assert result.status == 0
    assert "_FEWBIT_COMPLETE" in result.out


def test_another_shell_is_one_line_and_status_2(run):
    result = run("completion", "powershell")
    assert result.status == 2
    assert result.err.count("\n") == 1 and "fish" in result.err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("fewbit do", {"doctor"}),
        ("fewbit bench glu", {"glu", "glu-bits"}),
        ("fewbit doctor --wa", {"--warm"}),
        ("fewbit solve gel", {"gelu", "gelu_tanh"}),
        ("fewbit solve gelu --kind s", {"shared", "stochastic"}),
    ],
)
def test_what_is_completed(run_process, typed, expected):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_FEWBIT_COMPLETE": "bash_complete"}
    result = run_process(env={**os.environ, **words})
    assert {line.removeprefix("plain,") for line in result.out.splitlines()} == expected


def test_a_script_works_in_bash(run_process, command, tmp_path):
    """As typed on a terminal: the script is read, and its function called."""
    import shutil
    import subprocess

    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    fewbit = tmp_path / "fewbit"
    fewbit.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in command) + ' "$@"\n')
    fewbit.chmod(0o755)
    script = run_process("completion", "bash").out
    asked = f"{script}\nCOMP_WORDS=(fewbit doc) COMP_CWORD=1\n_fewbit_completion {fewbit}\necho ${{COMPREPLY[@]}}\n"
    done = subprocess.run([bash, "-c", asked], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "doctor\n", done.stderr
