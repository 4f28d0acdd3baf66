"""Which files of results were measured by code that has changed since, in a repository of its own."""

import subprocess

import pytest
from fewbit.plots.numbers import pages, stale
from fewbit.plots.studies import __main__ as studies

if not pages.RESULTS.is_dir():
    pytest.skip("not the repository", allow_module_level=True)


def test_every_file_has_a_module_that_measures_it():
    made = stale.makers()
    assert sorted(made) == sorted(path.name for path in pages.RESULTS.glob("*.json"))
    assert [module for module in made.values() if not (pages.ROOT / module).is_file()] == []


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A study that imports a module that imports a helper, and its file of results, committed."""

    def commit(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_json", ".json").replace("_py", ".py").replace(
                "_md", ".md"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        by = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        for arguments in (["add", "-A"], [*by, "commit", "-q", "-m", "x"]):
            subprocess.run(["git", *arguments], cwd=tmp_path, check=True)

    for module in (pages, stale):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "RESULTS", tmp_path / "plots/results")
    caches = (pages.commit_of, stale.reached, stale._imports, stale._moved, stale._blobs, stale._code_of)
    for cached in caches:
        cached.cache_clear()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(
        plots__studies__a_py="def a():\n    from .. import near\n",
        plots__help_py='def f():\n    """Old."""\n    return 1\n',
        plots__near_py="from .help import f\n",
        plots__other_py="x = 1\n",
        plots__results__a_json="{}",
    )
    yield commit
    for cached in caches:
        cached.cache_clear()


def test_code_that_changed_is_named_and_a_docstring_is_not(repository, capsys):
    repository(plots__help_py='def f():\n    """New."""\n    return 1  # one\n', plots__other_py="x = 2\n")
    assert [*stale.stale()] == []
    for cached in (stale._blobs, stale._moved, stale._code_of):
        cached.cache_clear()
    repository(plots__help_py="def f():\n    return 2\n")
    (found,) = stale.stale()
    assert (found.name, found.changed) == ("a.json", ("plots/help.py",))
    studies.main(["--stale"])
    assert capsys.readouterr().out.split() == ["a.json", found.commit, "plots/help.py"]
