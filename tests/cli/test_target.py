import sys

import pytest
from fewbit.cli.target import load_target
from fewbit.tables import FewbitError

CODE = """
from dataclasses import dataclass
import beside

@dataclass
class Made:
    width: int = beside.WIDTH

    @staticmethod
    def build():
        return Made()

def make(width=3):
    return Made(width)

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a user's file, a module beside it and a package, and the interpreter as it was afterwards."""
    (tmp_path / "user-model.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("WIDTH = 7")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "needy.py").write_text("import no_such_dependency")
    (tmp_path / "package_of_user").mkdir()
    (tmp_path / "package_of_user" / "__init__.py").touch()
    (tmp_path / "package_of_user" / "models.py").write_text("def make():\n    return 'made'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_of_a_file(folder, monkeypatch):
    monkeypatch.chdir("/")
    made = load_target(f"{folder / 'user-model.py'}:make")(5)
    assert made.width == 5


@pytest.mark.parametrize(
    ("text", "arguments", "result"),
    [
        ("user-model.py:Made.build", (), "Made(width=7)"),
        ("package_of_user.models:make", (), "'made'"),
        ("os.path:join", ("a", "b"), "'a/b'"),
    ],
    ids=["a relative file sees what lies beside it", "a module in the current folder", "an installed module"],
)
def test_a_function_of(text, arguments, result):
    assert repr(load_target(text)(*arguments)) == result


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gelu", "'gelu' is not of the form package.module:function or file.py:function"),
        (":make", "is not of the form"),
        ("user-model.py:", "is not of the form"),
        ("user-model.py:make()", "is not of the form"),
        ("user-model:make", "'user-model' is not the name of a module"),
        ("no_such.py:make", "there is no file no_such.py"),
        ("no_such_module.models:make", "there is no module 'no_such_module'"),
        ("package_of_user.no_such:make", "there is no module 'package_of_user.no_such'"),
        ("user-model.py:mak", "user-model.py has no 'mak'; nearest: make"),
        ("user-model.py:number", "is not a function but of type int"),
        ("broken.py:make", "broken.py failed when it was run: ZeroDivisionError: division by zero"),
        ("broken:make", "broken failed when it was imported: ZeroDivisionError"),
        ("needy:make", "needy failed when it was imported: ModuleNotFoundError: No module named 'no_such_dependency'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(text, said):
    with pytest.raises(FewbitError) as refusal:
        load_target(text)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
