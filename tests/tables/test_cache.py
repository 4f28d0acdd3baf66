import platformdirs
import pytest
from fewbit.tables import FewbitError
from fewbit.tables.cache import cache_folder


def test_the_variable_names_the_folder_and_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b"
    assert cache_folder("kernels") == tmp_path / "a" / "b" / "kernels"
    assert (tmp_path / "a" / "b" / "kernels").is_dir()


@pytest.mark.parametrize("unset", [True, False], ids=["unset", "empty"])
def test_else_it_is_the_user_s(tmp_path, monkeypatch, unset):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, appauthor: str(tmp_path / name))
    monkeypatch.delenv("FEWBIT_CACHE", raising=False) if unset else monkeypatch.setenv("FEWBIT_CACHE", "")
    assert cache_folder() == tmp_path / "fewbit"


def test_a_folder_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(FewbitError, match="cannot make the folder"):
        cache_folder("kernels")


def test_a_home_that_does_not_exist_is_told(monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", "~nosuchuser/x")
    with pytest.raises(FewbitError, match="cannot make the folder ~nosuchuser/x"):
        cache_folder()
