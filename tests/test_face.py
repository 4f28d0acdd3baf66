import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import fewbit
import pytest

# Puts a finder first in line that knows nothing but that torch is not there.
NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

sys.meta_path.insert(0, NoTorch())
"""
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
# What lives in `runtime` and so needs torch.
RUNTIME = [*(name for name, home in fewbit._HOMES.items() if home.startswith(".runtime")), *fewbit._SUBMODULES]


def run(code):
    """What `code` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("code", "takes", "but_not"),
    [
        ("", "fewbit", "torch numba scipy numpy matplotlib click fewbit.tables fewbit.fewbit_gen"),
        ("fewbit.load_table('gelu')", "numpy", "torch numba scipy matplotlib click"),
        ("fewbit.solve('gelu', bits=1)", "numba", "torch matplotlib click"),
        ("dir(fewbit); fewbit.functional; repr(fewbit.memory)", "fewbit", "torch numpy"),
    ],
    ids=["import", "a table", "the compiler", "looking at the face"],
)
def test_nothing_is_loaded_that_a_name_does_not_ask_for(code, takes, but_not):
    loaded = run(f"import fewbit, sys; {code}\nprint(*sys.modules)")
    assert takes in loaded
    assert not set(but_not.split()) & set(loaded)


class TestWithoutTorch:
    def test_the_compiler_works(self):
        assert run(NO_TORCH + "import fewbit; print(round(fewbit.solve('gelu', bits=3).error, 6))") == ["0.008094"]

    @pytest.mark.parametrize("name", ["GELU", "functional.gelu", "memory.profile"])
    def test_the_runtime_says_what_to_install(self, name):
        code = f"""
import fewbit
try:
    fewbit.{name}
except ModuleNotFoundError as error:
    print(error.name, error.__cause__, "\\n" in str(error), error)
"""
        module, cause, lines, *message = run(NO_TORCH + code)
        assert (module, cause, lines) == ("torch", "None", "False")
        wanted = name.removesuffix(".gelu").removesuffix(".profile")
        assert " ".join(message).startswith(f"fewbit.{wanted} needs PyTorch, which is not installed: ")
        assert " ".join(message).endswith("pip install torch (build: fewbit doctor)")

    def test_another_missing_module_is_told_as_it_is(self):
        code = (
            NO_TORCH.replace('"torch"', '"scipy"')
            + """
import fewbit
try:
    fewbit.solve
except ModuleNotFoundError as error:
    print(error)
"""
        )
        assert run(code)[:4] == ["No", "module", "named", "'scipy'"]


def test_no_hint_installs_fewbit_from_an_index():
    """It is on none: a hint names the package that is missing, or an extra in a clone."""
    root = Path(fewbit.__file__).parent
    folders = [*(init.parent for init in root.glob("*/__init__.py")), root / "docs"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".html", ".js")]
    assert len(files) > 300
    for path in [*files, *root.glob("*.md"), root / "__init__.py", root / "Makefile"]:
        assert not re.search(r"pip install [\"']?fewbit", path.read_text()), path


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [*sorted(set(fewbit.__all__) - set(RUNTIME)), *(pytest.param(name, marks=needs_torch) for name in RUNTIME)],
    )
    def test_every_public_name_is_there(self, name):
        assert getattr(fewbit, name) is getattr(fewbit, name)

    def test_all_is_sorted_and_without_repeats_and_dir_lists_it(self):
        names = [name for name in fewbit.__all__ if not name.startswith("_")]
        assert names == sorted(set(names))
        assert len(fewbit.__all__) == len(set(fewbit.__all__))
        assert set(fewbit.__all__) <= set(dir(fewbit))

    @pytest.mark.parametrize("name", ["gelu", "Gelu", "convrt", "_nothing", "__nothing__"])
    def test_an_unknown_one_is_an_attribute_error(self, name):
        with pytest.raises(AttributeError, match=f"module 'fewbit' has no attribute '{name}'"):
            getattr(fewbit, name)

    def test_a_name_is_what_its_home_defines(self):
        assert fewbit.solve is importlib.import_module("fewbit.fewbit_gen").solve
        assert fewbit.Table is importlib.import_module("fewbit.tables").Table
        assert issubclass(fewbit.FewbitError, ValueError)

    def test_version_is_the_distributions(self):
        from importlib.metadata import version

        assert fewbit.__version__ == version("fewbit")

    def test_from_import(self):
        assert run("from fewbit import solve, Table; print(Table.__name__, solve.__name__)") == ["Table", "solve"]


@needs_torch
class TestSubmodules:
    """They live in `runtime`; users find them one floor up."""

    @pytest.mark.parametrize("name", fewbit._SUBMODULES)
    def test_shows_what_its_home_has_and_is_imported_like_any_module(self, name):
        home = importlib.import_module(f"fewbit{fewbit._SUBMODULES[name]}")
        public = [key for key in vars(home) if not key.startswith("_")]
        assert public
        assert set(public) <= set(dir(getattr(fewbit, name)))
        for key in public:
            assert getattr(getattr(fewbit, name), key) is getattr(home, key)
        assert importlib.import_module(f"fewbit.{name}") is getattr(fewbit, name)

    def test_its_names_are_imported_like_any(self):
        home = importlib.import_module("fewbit.runtime.activations.functional")
        code = "from fewbit.functional import gelu as one; from fewbit.functional import *; print(one is gelu, *dir())"
        same, *names = run(code)
        assert same == "True"
        assert set(home.__all__) <= set(names)

    def test_an_unknown_name_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="gelou"):
            _ = fewbit.functional.gelou


def exported(module):
    """The names in `__all__` of a module, as its text has them."""
    tree = ast.parse((Path(fewbit.__file__).parent / f"{module}.py").read_text())
    (names,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return ast.literal_eval(names)


def test_the_stub_has_the_public_names_and_their_homes():
    """What an editor reads is what is loaded."""
    tree = ast.parse((Path(fewbit.__file__).parent / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {
        name: f".{node.module}"
        for node in imports
        for alias in node.names
        for name in ([alias.asname] if alias.name != "*" else exported(node.module.replace(".", "/")))
    }
    assert {name: names[name] for name in fewbit._HOMES} == fewbit._HOMES
    submodules = {alias.asname: f".{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert {name: submodules[name] for name in fewbit._SUBMODULES} == fewbit._SUBMODULES
    assert set(names) == {*fewbit._HOMES, *fewbit._SUBMODULES}
