"""The documentation site, built as `make docs` builds it."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import fewbit
import pytest

pytestmark = pytest.mark.deep  # starts a browser

ROOT = Path(fewbit.__file__).resolve().parent

if importlib.util.find_spec("mkdocs") is None:
    pytest.skip("needs mkdocs: pip install '.[docs]' in a clone", allow_module_level=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site without a broken link, reference or page that the navigation lacks."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_is_that_of_the_package(site):
    # Without what else lies in the root: a virtual environment.
    read = {path.name for path in (ROOT / "build" / "reference" / "fewbit").iterdir()}
    assert read == {"__init__.py", "__init__.pyi", *(init.parent.name for init in ROOT.glob("*/__init__.py"))}
    assert 'id="fewbit.convert"' in (site / "api" / "convert.html").read_text()


def public_names():
    """Each public name, with its places in the reference: of the face, of its home, or where it is defined."""
    for name, home in fewbit._HOMES.items():
        yield f"fewbit.{name}", {f"fewbit.{name}", f"fewbit{home}.{name}"}
    for submodule, home in fewbit._SUBMODULES.items():
        module = importlib.import_module(f"fewbit{home}")
        for name in module.__all__:
            defined = getattr(getattr(module, name), "__module__", None)
            places = {f"fewbit.{submodule}.{name}", f"{module.__name__}.{name}", f"{defined}.{name}"}
            yield f"fewbit.{submodule}.{name}", places


def test_every_public_name_has_its_place_in_the_reference(site):
    pytest.importorskip("torch")
    pages = [page.read_text() for page in (site / "api").glob("*.html")]
    anchors = {anchor for page in pages for anchor in re.findall(r' id="(fewbit\.[\w.]+)"', page)}
    named = dict(public_names())
    assert len(named) > 150
    assert [name for name, places in named.items() if not places & anchors] == []


def test_the_explorer_leads_back_to_the_site(visit, site):
    page = visit((site / "explorer" / "index.html").as_uri(), home=site.as_uri())
    page.locator("nav a").click()
    page.locator("h1", has_text="Start in five minutes").wait_for()


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not any(f'{attribute}="http' in text for attribute in ("src", 'rel="stylesheet" href')), page


def test_every_page_of_results_is_in_the_navigation(site):
    index = (site / "results" / "index.html").read_text()
    linked = re.findall(r'<a href="([\w-]+)\.html" class="md-nav__link"', index)
    assert set(linked) == {page.stem for page in (ROOT / "plots" / "results").glob("*.md")} - {"README"}


@pytest.mark.parametrize("start", ["index.html", "methods/actnn.html"])
def test_the_site_is_searched_without_a_server(visit, site, start):
    page = visit((site / start).as_uri(), home=site.as_uri())
    page.keyboard.press("f")
    page.keyboard.type("what is peak")
    page.locator(".md-search-result__link", has_text="What is peak").first.wait_for()


@pytest.mark.parametrize("name", ["index.html", "guide.html", "results/index.html", "api/convert.html"])
@pytest.mark.parametrize("dark", [False, True])
def test_text_and_links_are_legible(visit, site, accessible, name, dark):
    found = accessible(visit((site / name).as_uri(), dark=dark, home=site.as_uri()))
    assert not [line for line in found if line.startswith(("color-contrast:", "link-in-text-block:", "image-alt:"))]
