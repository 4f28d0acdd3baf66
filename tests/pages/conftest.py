"""A headless Chromium for the tests of the pages; they skip where there is none."""

import os
import shutil

import pytest

INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def chromium():
    """A running Chromium: playwright's own, or the system's."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]' in a clone")
    # Chromium's own sandbox does not start for root, as which containers run.
    root = ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    with api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, INSTALLED)), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=root)
        except api.Error as error:
            pytest.skip(f"no Chromium starts here: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open a page: visit(url, width=…, dark=…). The test fails if it logs an error or calls another host."""
    opened, problems = [], []

    def visit(url, width=1280, dark=False, allowed="", home=None):
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if _is_bad(message, allowed) else None)
        home = home or url.split("#")[0].rsplit("/", 1)[0]
        page.on(
            "request",
            lambda asked: asked.url.startswith((home, "data:", "blob:")) or problems.append(f"asked for {asked.url}"),
        )
        page.goto(url)
        return page

    yield visit
    for context in opened:
        context.close()
    assert problems == []


def _is_bad(message, allowed):
    return message.type == "error" and not (allowed and allowed in message.text)


@pytest.fixture
def accessible():
    """Check a page by axe, which needs no network."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()

    def accessible(page):
        found = axe.run(page, options={"preload": False}).response["violations"]
        return [f"{v['id']}: {n['target']} {n['failureSummary']}" for v in found for n in v["nodes"]]

    return accessible
