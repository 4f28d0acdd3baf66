"""The page of `fewbit memory -o`: its data, and the page in a real browser, from disk."""

import json

import fewbit
import numpy as np
import pytest
import torch
from fewbit.pages.memory_page import common_marks, compiled_page, memory_page, outline
from fewbit.quantizers import PerGroup
from fewbit.runtime.compile.report import CompileReport, GraphReport, SavedTensor
from fewbit.runtime.plan import memory
from torch import nn

pytestmark = pytest.mark.deep  # starts a browser


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def network():
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(Block(), Block(), Block()), nn.Linear(64, 4))


@pytest.fixture(scope="module")
def comparisons():
    model, x = network(), torch.zeros(8, 5, 16)
    return [
        memory.compare(model, x, timeline=True),
        memory.compare(model, x, level="L2", timeline=True),
        memory.compare(model, x, saved=PerGroup(bits=4), timeline=True),
    ]


def page_of(comparisons, target="a model"):
    return memory_page(target, {"parameters": 10, "parameter_bytes": 40, "batch": 8}, comparisons)


def data_of(page):
    start = page.rindex("receiveMemory(") + len("receiveMemory(")
    return json.loads(page[start : page.rindex(");\n</script>")])


def test_states_are_those_of_the_comparisons(comparisons):
    states = data_of(page_of(comparisons))["states"]
    assert [state["name"] for state in states] == ["exact", "3 bits", "level L2", "hooks 4 bits"]
    assert states[0]["bytes"] == comparisons[0].before.total == sum(row[4] for row in states[0]["rows"])
    for state, each in zip(states[1:], comparisons, strict=True):
        assert (state["bytes"], state["peak"]) == (each.after.total, each.peak_after.bytes)
        assert sum(row[4] for row in state["rows"]) == each.after.total
        assert len(state["left"]) == len(each.report.left)


def test_a_timeline_keeps_the_peak(comparisons):
    data = data_of(page_of(comparisons))
    for state in data["states"]:
        assert max(state["timeline"]["most"]) == state["peak"]
        assert len(state["timeline"]["at"]) == len(data["marks"])
    assert ["1.2.act", "backward"] in data["marks"]


def test_common_marks_are_in_order_in_each():
    def timeline(*marks):
        named = tuple(memory.Mark(moment, module, "enter") for moment, module in marks)
        return memory.Timeline(np.zeros(20, np.int64), named, 10, memory.Peak(0, 0))

    keys, moments = common_marks(
        [timeline((0, "a"), (2, "b"), (3, "c"), (4, "a")), timeline((1, "b"), (5, "a"), (6, "c"))]
    )
    assert [key[0] for key in keys] == ["a", "c"]  # "b" comes before "a" in the second
    assert moments == [[0, 3], [5, 6]]


def test_an_outline_has_the_most_between_its_moments():
    timeline = memory.Timeline(np.array([5, 9, 2, 7, 1]), (), 2, memory.Peak(9, 9))
    assert outline(timeline, [0, 1, 3]) == {"at": [0, 5, 2], "most": [5, 9, 7]}


def test_without_peaks_there_is_no_timeline(comparisons):
    data = data_of(page_of([memory.compare(network(), torch.zeros(8, 5, 16), peak=False)]))
    assert "marks" not in data and data["states"][0]["peak"] is None


def test_it_is_one_file(comparisons):
    page = page_of(comparisons)
    assert "src=" not in page and 'rel="stylesheet"' not in page
    assert "default-src 'none'" in page


def report_of_compiled():
    """Of a compiled network, as the backend describes it: two tensors in few bits, one exact, and a parameter."""

    def tensor(module, role, bits, exact_bytes, nbytes, reason=""):
        about = (module, "/code/net.py:3", (8, 64), "float32", role, bits, exact_bytes, nbytes, reason)
        return SavedTensor(module, *about)

    tensors = tensor("0", "linear", 4, 4096, 512), tensor("1", "factor", 3, 4096, 384)
    exact = tensor("1", "statistic", None, 32, 32, "a statistic"), tensor("0", "parameter", None, 100, 0)
    return CompileReport((GraphReport((*tensors, *exact), 9000),))


def test_the_page_of_a_compiled_model_has_the_bytes_of_its_report():
    report = report_of_compiled()
    page = compiled_page("a model", {"parameters": 10, "parameter_bytes": 40, "batch": 8}, "compiled, 4 bits", report)
    exact, few = data_of(page)["states"]
    assert (exact["bytes"], few["bytes"]) == (4096 + 4096 + 32, report.nbytes)
    assert few["rows"][1] == ["1", "code/net.py:3", "factor", "3 bits", 384]
    assert few["rows"][2][3] == "exact: a statistic"
    assert "torch.compile alone saves 9,000 bytes" in few["notes"][0]


def test_no_comparison_is_an_error():
    with pytest.raises(fewbit.FewbitError, match="needs a method"):
        page_of([])


# ---- in the browser --------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path, comparisons):
    path = tmp_path / "memory.html"
    path.write_text(page_of(comparisons))
    return path.as_uri()


def shows(page):
    page.locator("#map-exact svg").wait_for()
    return page


def test_the_page_of_a_compiled_model_shows_parts_and_no_timeline(visit, tmp_path, accessible):
    facts = {"parameters": 10, "parameter_bytes": 40, "batch": 8}
    (tmp_path / "compiled.html").write_text(compiled_page("a model", facts, "compiled", report_of_compiled()))
    page = shows(visit((tmp_path / "compiled.html").as_uri()))
    assert page.locator("#map-exact g[role=button]").count() == 2
    assert not page.locator("#timeline-section").is_visible()
    assert accessible(page) == []


def test_the_page_begins_with_the_blocks_and_the_method_that_keeps_least(visit, url, comparisons):
    page = shows(visit(url))
    least = min(comparisons, key=lambda each: each.after.total)
    assert page.locator("#methods tr.chosen").inner_text().startswith(least.method)
    assert page.locator("#path").inner_text().split() == ["all", "1"]
    assert page.locator("#map-exact g[role=button]").count() == 3
    inside = sum(s.bytes for s in comparisons[0].before.saved if s.module.startswith("1"))
    assert f"{inside / 1024:.1f} KiB" in page.locator("#caption-exact").inner_text()


def test_areas_have_one_scale(visit, url):
    page = shows(visit(url))
    areas = (
        "id => [...document.querySelectorAll(`#${id} .part-edge`)].map(e => e.getBBox()).map(b => b.width * b.height)"
    )
    exact, method = (sum(page.evaluate(areas, name)) for name in ("map-exact", "map-method"))
    all_parts = page.locator("#parts tr").last.inner_text().split("\t")[1:3]
    before, after = (float(text.split()[0]) for text in all_parts)
    assert method / exact == pytest.approx(after / before, rel=0.02)


def test_bars_have_one_left_edge_and_tiles_the_names_of_their_ops(visit, url):
    page = shows(visit(url))
    left = "bars => new Set(bars.map(bar => Math.round(bar.getBoundingClientRect().x))).size"
    for column in (3, 5):
        assert page.locator(f"#methods td:nth-child({column}) svg").evaluate_all(left) == 1
    assert "addmm" in page.locator("#map-exact text.of-op").all_text_contents()


def test_a_table_wider_than_the_screen_says_at_which_side_it_goes_on(visit, url):
    page = shows(visit(url, width=320))
    frame = page.locator(".scroll", has=page.locator("#methods"))
    assert frame.get_attribute("class").split() == ["scroll", "more-right"]
    frame.evaluate("e => e.scrollTo(e.scrollWidth, 0)")
    page.wait_for_function("document.querySelector('.scroll').className === 'scroll more-left'")


def test_parts_open_by_the_keyboard_and_close_again(visit, url):
    page = shows(visit(url))
    page.locator("#map-exact g[role=button]").first.focus()
    page.keyboard.press("Enter")
    assert len(page.locator("#path").inner_text().split()) == 3
    assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    page.locator("#path button").first.click()
    assert page.locator("#path").inner_text().split() == ["all"]
    page.locator("label[for=group-op]").click()
    assert page.locator("#part-heads th").first.inner_text() == "Op"
    assert "gelu" in page.locator("#parts").inner_text()


def test_another_method_is_chosen(visit, url):
    page = shows(visit(url))
    page.locator("#method-1").check()
    assert page.locator("#caption-method").inner_text().startswith("3 bits")
    assert page.locator("#legend-method").inner_text() == "3 bits"


def test_a_moment_is_read(visit, url, comparisons):
    page = shows(visit(url))
    page.locator("#moment").focus()
    page.keyboard.press("Home")
    assert "forward pass of the model begins" in page.locator("#moment").get_attribute("aria-valuetext")
    page.keyboard.press("End")
    assert "backward pass of" in page.locator("#reading").inner_text()


def test_names_are_text_and_not_markup(visit, tmp_path, comparisons):
    path = tmp_path / "hostile.html"
    path.write_text(page_of(comparisons, "</script><img src=x onerror=alert(1)>"))
    page = shows(visit(path.as_uri()))
    assert "</script><img" in page.locator("#title").inner_text()
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_and_nothing_is_cut_off(visit, url, accessible, width, dark):
    page = shows(visit(url, width, dark))
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert accessible(page) == []
    page.locator("#method-2").check()
    page.locator("#left-details summary").click() if page.locator("#left-details").is_visible() else None
    assert accessible(page) == []
