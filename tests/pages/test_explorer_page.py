"""The explorer in a real browser: from disk, as on a site without a solver, and served with one."""

import threading

import fewbit
import pytest
from fewbit.pages import explorer_data, explorer_site
from fewbit.pages.explorer_site import write_site
from fewbit.pages.server import ExplorerServer
from fewbit.pages.solver_process import SolverProcess
from fewbit.tables.shipped import shipped_activations

pytestmark = pytest.mark.deep  # starts a browser

DISTINCT = ("gelu", "relu", "sin")  # smooth, exact, with the most intervals


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of a site on disk, with a few activations."""
    folder = tmp_path_factory.mktemp("explorer")
    with pytest.MonkeyPatch.context() as patch:
        for module in (explorer_data, explorer_site):
            patch.setattr(module, "shipped_activations", lambda: DISTINCT)
        write_site(folder)
    return (folder / "index.html").as_uri()


@pytest.fixture(scope="module")
def served():
    """The address of the server of `fewbit explore`."""
    with SolverProcess() as solver, ExplorerServer(0, solver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def at(url, **choice):
    return url + "#" + "&".join(f"{name}={value}" for name, value in choice.items())


def shows(page, title):
    page.locator("#title", has_text=title).wait_for()
    return page


def rows(page):
    return [line.split("\t") for line in page.locator("#rows tr").all_inner_texts()]


def number(text):
    return float(text.replace("−", "-").replace("∞", "inf"))


def test_it_begins_with_gelu(visit, site):
    page = shows(visit(site), "gelu: 3 bits, kind shared")
    table = fewbit.load_table("gelu")
    shown = rows(page)
    assert [int(row[2]) for row in shown] == table.codes.tolist()
    assert [number(row[1]) for row in shown[:-1]] == pytest.approx(table.boundaries, rel=1e-5, abs=1e-12)
    assert [number(row[3]) for row in shown] == pytest.approx(table.levels[table.codes], rel=1e-5)
    assert sum(number(row[4].removesuffix(" %")) for row in shown) == pytest.approx(100, abs=0.5)
    facts = page.locator("#facts").inner_text()
    assert f"{table.error:.6g}" in facts and "in 10 intervals" in facts
    assert page.locator("#chart .tile, #chart rect").count() > len(shown)


def test_a_page_from_disk_offers_no_solver(visit, site):
    page = shows(visit(site), "gelu")
    assert not page.locator("#solve").is_visible()
    assert page.locator("#solver-text").is_visible()


def test_a_link_shows_what_it_names(visit, site):
    page = shows(
        visit(at(site, activation="sin", kind="interval", weight="normal:0,1", bits=2)), "sin: 2 bits, kind interval"
    )
    assert len(rows(page)) == 4
    assert page.locator("#command").inner_text() == 'fewbit solve sin --bits 2 --kind interval --weight "normal:0,1"'


@pytest.mark.parametrize("link", ["bits=9", "kind=best", "bits=<script>", "x", "%"])
def test_a_broken_link_shows_the_first_table(visit, site, link):
    shows(visit(f"{site}#{link}"), "gelu: 3 bits, kind shared")


def test_an_unknown_activation_is_one_line(visit, site):
    page = visit(at(site, activation="<img src=x onerror=alert(1)>"))
    page.locator("#status.bad", has_text="no shipped table").wait_for()


def test_everything_is_reached_by_the_keyboard(visit, site):
    page = shows(visit(site), "gelu")
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert reached[:11] == [
        *("skip", "activation", "weight", "bits-3", "kind-shared", "cursor", "whole", "scroll", "language-python"),
        *("copy", "source"),
    ]
    page.locator("#bits-3").focus()
    page.keyboard.press("ArrowRight")
    shows(page, "gelu: 4 bits")
    page.locator("#kind-shared").focus()
    page.keyboard.press("ArrowRight")
    shows(page, "gelu: 4 bits, kind stochastic")
    assert "bits=4" in page.url and "kind=stochastic" in page.url


def test_the_slider_reads_the_table(visit, site):
    page = shows(visit(site), "gelu")
    page.locator("#cursor").focus()
    page.keyboard.press("Home")
    table = fewbit.load_table("gelu")
    spoken = page.locator("#cursor").get_attribute("aria-valuetext")
    x = number(page.locator("#reading span").first.inner_text().removeprefix("x = "))
    assert f"code {table.encode(x)}" in spoken
    assert page.locator("#rows tr.here").count() == 1
    page.keyboard.press("End")
    assert page.locator("#rows tr").last.get_attribute("class") == "here"


def test_the_whole_of_the_inputs_can_be_shown(visit, site):
    page = shows(visit(site), "gelu")
    ticks = lambda: page.locator("#chart .tick").all_text_contents()  # noqa: E731
    assert "10" not in ticks()
    page.locator("#whole").check()
    assert {"−10", "10"} <= set(ticks())


@pytest.mark.parametrize("name", DISTINCT)
def test_source_code_is_that_of_the_exporters(visit, site, name):
    page = shows(visit(at(site, activation=name, bits=4)), name)
    expected = explorer_data.sources(fewbit.load_table(name, 4))
    for language, text in expected.items():
        page.locator(f"label[for=language-{language}]").click()
        page.wait_for_function("text => document.getElementById('source').textContent === text", arg=text)


def test_source_code_is_copied(visit, served):
    page = shows(visit(served), "gelu")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("label[for=language-c]").click()
    page.locator("#source", has_text="#ifndef").wait_for()
    page.locator("#copy").click()
    page.locator("#copied", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == explorer_data.sources(fewbit.load_table("gelu"))["c"]


def test_a_stochastic_table_has_json_alone(visit, site):
    page = shows(visit(at(site, kind="stochastic")), "kind stochastic")
    page.locator("#source", has_text="no one value").wait_for()
    assert page.locator("#copy").is_disabled()
    page.locator("label[for=language-json]").click()
    page.locator("#source", has_text='"stochastic"').wait_for()
    assert page.locator("#heads").inner_text().split("\t")[4] == "or level"


def test_an_expression_is_solved(visit, served):
    page = shows(visit(served, width=390), "gelu")
    page.locator("#expression").fill("x * sigmoid(1.702*x)")
    page.locator("#inputs").fill("normal:0,2.0")
    page.locator("#expression").press("Enter")
    shows(page, "x*sigmoid(1.702*x): 3 bits")
    page.wait_for_function("document.getElementById('chart').getBoundingClientRect().top < innerHeight / 2")
    assert "x * sigmoid(1.702*x)" not in page.locator("#activation option").all_inner_texts()  # one spelling alone
    table = fewbit.solve("x*sigmoid(1.702*x)", weight="normal:0,2")
    assert page.locator("#weight").input_value() == "normal:0,2"
    assert f"{table.error:.6g}" in page.locator("#facts").inner_text()
    page.locator("#source", has_text="normal:0,2").wait_for()
    page.locator("label[for=bits-2]").click()  # and solved again
    shows(page, "x*sigmoid(1.702*x): 2 bits")


@pytest.mark.parametrize(("expression", "line"), [("import os", "unknown"), ("x.real", "cannot take"), ("y+1", "is x")])
def test_what_cannot_be_solved_is_one_line_and_the_table_stays(visit, served, expression, line):
    page = shows(visit(served, allowed="400 (Bad Request)"), "gelu")
    page.locator("#expression").fill(expression)
    page.locator("#solve-button").click()
    page.locator("#status.bad", has_text=line).wait_for()
    assert page.locator("#title").inner_text() == "gelu: 3 bits, kind shared"
    assert page.locator("#activation").input_value() == "gelu"
    assert expression not in page.locator("#activation option").all_inner_texts()


def test_every_shipped_activation_is_drawn(visit, served):
    page = shows(visit(served), "gelu")
    for name in shipped_activations():
        page.locator("#activation").select_option(name)
        shows(page, f"{name}: ")
        assert page.locator("#chart path.curve").get_attribute("d").startswith("M")


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_cut_off(visit, site, width):
    page = shows(visit(site, width), "gelu")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    controls = "[...document.querySelectorAll('select, button, .segments label')].filter(e => e.offsetParent)"
    assert page.evaluate(f"Math.min(...{controls}.map(e => e.offsetHeight))") >= 44  # to be hit by a finger


def test_it_is_dark_where_the_reader_wants_that(visit, site):
    paper = "getComputedStyle(document.body).backgroundColor"
    assert visit(site).evaluate(paper) != visit(site, dark=True).evaluate(paper)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(visit, served, accessible, width, dark):
    page = shows(visit(served, width, dark, allowed="400 (Bad Request)"), "gelu")
    page.locator("#source", has_text="bisect").wait_for()
    assert accessible(page) == []
    page.locator("#expression").fill("y")
    page.locator("#solve-button").click()
    page.locator("#status.bad", has_text="expression").wait_for()
    assert accessible(page) == []
