import errno
import importlib
import os
import shlex
import subprocess
import sys

import click
import pytest
from fewbit import __version__
from fewbit.cli import main as main_module
from fewbit.cli import memory, plot
from fewbit.cli.main import fewbit, main

# What is typed, and what the line says is accepted.
BAD_USE = {
    "sovle gelu": "no command 'sovle'; did you mean solve?",
    "train": "no command 'train'; there are solve, emit, tables, plot",
    "solve gelu --nosuchoption": "fewbit solve --help",
    "solve gelu --bits 9": "1 to 8",
    "solve gelu --kind other": "shared",
    "solve gelu --weight norml:0,1": "did you mean normal:0,1?",
    "solve gelu --weight gauss": "uniform:A,B",
    "solve gleu": "gelu",
    "solve sigmid": "sigmoid",
    "solve y*2": "the variable of an expression is x",
    "solve x.__class__": "cannot take 'x.__class__' in an expression",
    "solve gelu -o table.txt": ".json",
    "solve gelu --plot plot.gif": ".png, .svg, .pdf",
    "emit gleu": "unknown activation 'gleu'; nearest: gelu",
    "tables show gleu": "gelu",
    "plot error --bits x -o plot.png": "1,2,3",
}
# What is refused likewise.
LIKEWISE = [
    *("nosuchcommand", "--nosuchoption", "solve", "solve gelu extra", "solve gelu --bits three", "solve gelu --bits 0"),
    *("solve gelu --bits 3 --levels 8", "solve gelu --levels 1", "solve gelu --levels 257", "solve gelu --weight ''"),
    *("solve gelu --weight triangular:0,1", "solve gelu --weight uniform:1,-1", "solve gelu --weight uniform:nan,1"),
    *(
        "solve gelu --kinks a",
        "solve gelu --kinks 1,",
        "solve gelu --kinks '1;2'",
        "solve gelu --kinks nan",
        "solve ''",
    ),
    *("solve 'gelu\nsilu'", "solve 'softplus(beta=)'", "solve 'softplus(beta=0)'", "solve 'gelu(gamma=1)'"),
    *("solve gelu -o table", "solve gelu -o missing/table.json", "solve gelu --plot missing/plot.png"),
    *("solve gelu --plot plot", "tables nosuchcommand", "tables show gelu --bits 9", "tables verify --input missing"),
    *("tables show gelu --weight uniform:-1,1", "plot approximation -o plot.png", "plot approximation gelu"),
    *("plot approximation gelu -o plot.bmp", "plot approximation gelu gleu -o plot.png"),
    *("plot approximation gelu --bits 1,,2 -o plot.png", "plot approximation gelu --bits 1,9 -o plot.png"),
    "plot error --kind neither -o plot.png",
]


@pytest.mark.parametrize("command", [*BAD_USE, *LIKEWISE])
def test_bad_use_gets_one_line_that_says_what_is_accepted_and_status_2(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    outcome = run(*shlex.split(command))
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("fewbit: ") and outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1 and BAD_USE.get(command, "") in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_bad_use_of_the_real_process(run_process):
    outcome = run_process("solve", "gleu")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == "fewbit: unknown activation 'gleu'; nearest: gelu, elu, gelu_tanh\n"


def test_version(run):
    assert run("--version").out == f"fewbit {__version__}\n"


def _commands(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        yield (*path, name), found
        if isinstance(found, click.Group):
            yield from _commands(found, (*path, name))


COMMANDS = list(_commands(fewbit))


@pytest.mark.sample(39)
@pytest.mark.parametrize("path", [path for path, _ in COMMANDS], ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_with_an_example(run, path, flag):
    outcome = run(*path, flag)
    assert (outcome.status, outcome.err) == (0, "")
    assert f"Example: fewbit {path[0]}" in outcome.out
    assert outcome.out.isascii()


def test_the_lines_of_the_help_page_are_those_of_the_commands():
    for name, line in fewbit.lazy.items():
        found = fewbit.get_command(click.Context(fewbit), name)
        assert found is not None and found.help is not None
        assert found.help.splitlines()[0] == line


@pytest.mark.parametrize("studies", [memory.STUDIES, plot.STUDIES], ids=["memory", "plot"])
def test_a_wheel_knows_the_names_of_a_clones_studies(studies):
    for module, names in studies.items():
        found = importlib.import_module(f"fewbit.plots.commands.{module}").COMMANDS
        assert tuple(command.name for command in found) == names


@pytest.mark.parametrize("group", [[], ["tables"], ["plot"], ["bench"]], ids=str)
def test_a_group_alone_shows_its_help(run, group):
    outcome = run(*group)
    assert outcome.status in (0, 2)  # click before 8.2: 0
    assert "Commands:" in outcome.out + outcome.err


def _imported(arguments):
    code = (
        "import sys; from fewbit.cli.main import main\n"
        f"status = main({arguments!r}); print(*sorted(sys.modules), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"numpy", "torch", "matplotlib", "numba", "scipy"}),
        (["--version"], {"numpy", "torch", "matplotlib", "numba", "scipy"}),
        (["tables", "list"], {"torch", "matplotlib", "numba", "scipy"}),
        (["tables", "show", "gelu"], {"torch", "matplotlib", "numba", "scipy"}),
        (["bench", "--help"], {"torch", "matplotlib", "numba", "scipy"}),
        (["bench", "solve", "--help"], {"torch", "matplotlib"}),
        (["solve", "gelu"], {"torch", "matplotlib"}),
        (["tables", "verify"], {"torch", "matplotlib"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_only_what_it_needs(arguments, absent):
    assert absent.isdisjoint(_imported(arguments))


@pytest.mark.deep
def test_plots_import_neither_torch_nor_pyplot(tmp_path):
    modules = _imported(["solve", "relu", "--plot", str(tmp_path / "relu.png")])
    assert {"torch", "matplotlib.pyplot"}.isdisjoint(modules)


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", [["tables", "list"], ["tables", "list", "--json"], ["--help"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(command, arguments):
    reader, writer = os.pipe()
    os.close(reader)  # nobody reads: the very first write finds a broken pipe
    try:
        done = subprocess.run(
            [*command, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.deep
def test_a_file_is_written_though_the_reader_left(command, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    path = tmp_path / "relu.json"
    try:
        subprocess.run([*command, "solve", "relu", "-o", path], stdout=writer, timeout=300, check=False)
    finally:
        os.close(writer)
    assert path.stat().st_size > 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_in_one_line(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "tables", "list"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    assert done.returncode == 1
    assert done.stderr == f"fewbit: cannot write the output: {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_no_standard_output_at_all(command):
    shell = " ".join(["exec", *command, "tables", "list", ">&-"])
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.deep
def test_output_in_a_terminal_that_knows_only_ascii(run_process):
    outcome = run_process("solve", "gelu", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (outcome.status, outcome.err) == (0, "")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, click.Abort])
def test_an_interrupt_says_one_word_and_status_130(capsys, monkeypatch, stop):
    def interrupted(*_, **__):
        raise stop

    monkeypatch.setattr(main_module.fewbit, "invoke", interrupted)
    assert main(["tables", "list"]) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


def test_a_bug_is_not_dressed_up_as_bad_use(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(main_module.fewbit, "invoke", broken)
    with pytest.raises(ZeroDivisionError):
        main(["tables", "list"])
