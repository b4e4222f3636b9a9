"""The pages that people look at, in Chromium: width, console, axe, and what moves."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.test_report_command import write_run, write_whole_run
from test_docs import REFERENCE

from nsa_flex.auditing.html import page as audit_page
from nsa_flex.training.report import report

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (360, 800, 1400)
REFRESH = 60.0  # seconds, of the run that goes on


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"]  # CI runs as root
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or "", args=options
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files by name: a run that goes on, two runs, and two audits."""
    from audit.test_page import REPORT

    folder = tmp_path_factory.mktemp("pages")
    runs = [folder / "one", folder / "with-a-name-that-is-much-longer-than-a-phone-is-wide"]
    write_whole_run(runs[0])
    write_run(runs[1], probe=True)
    written = {
        "run": report(runs[0], refresh=REFRESH),
        "runs": report(*runs),
        "audit": audit_page(REPORT, REPORT),
    }
    for name, text in written.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in written}


class Look:
    """A page at one width and in one colour scheme; `said` is what its console holds."""

    def __init__(self, browser: Any, address: str, width: int, scheme: str = "light") -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.said: list[str] = []
        self.loaded: list[str] = []
        self.page.on("console", self.hear)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.loaded.append(request.url))
        self.page.goto(address)
        self.page.wait_for_load_state("networkidle")

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *error: object) -> None:
        self.page.close()

    def hear(self, message: Any) -> None:
        """Chromium asks servers for an icon that pages in one file do not have."""
        if not message.location["url"].endswith("/favicon.ico"):
            self.said.append(message.text)

    def faults(self) -> list[str]:
        """What axe calls serious or critical."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {each['nodes'][0]['html'][:200]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]

    def is_too_wide(self) -> bool:
        return self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )

    def full_tiles(self) -> list[str]:
        """Tiles whose number or name runs over their edge."""
        return self.page.locator(".tile").evaluate_all(
            "tiles => tiles.filter(t => t.scrollWidth > t.clientWidth).map(t => t.innerText)"
        )


@pytest.mark.kept(lambda width, scheme: (width == min(WIDTHS)) == (scheme == "dark"))
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "runs", "audit"])
def test_reports(name: str, width: int, scheme: str, browser: Any, pages: dict[str, Path]) -> None:
    with Look(browser, pages[name].as_uri(), width, scheme) as look:
        assert look.said == []
        assert look.loaded == [pages[name].as_uri()]
        assert not look.is_too_wide()
        assert look.full_tiles() == []
        assert look.faults() == []


def test_the_report_that_is_looked_at_has_every_section(
    browser: Any, pages: dict[str, Path]
) -> None:
    with Look(browser, pages["run"].as_uri(), 1400) as look:
        titles = look.page.locator("h2:visible, summary").all_text_contents()
        assert titles == [
            *("Training", "Layers", "Samples", "Changed on the way", "Backends", "Sessions"),
            *("Data", "Config"),
        ]
        assert look.page.locator(".tile").count() == 9
        assert "2,000,000,000" in look.page.locator(".tiles").inner_text()


DRAWN = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


def test_every_plot_of_a_run_is_drawn_and_told(browser: Any, pages: dict[str, Path]) -> None:
    with Look(browser, pages["run"].as_uri(), 1400) as look:
        titles = look.page.locator("figure:visible h3").all_text_contents()
        drawn = {"Loss", "grad norm", "perplexity", "bits per byte", "memory", "distance"}
        assert drawn <= set(titles)
        canvases = look.page.locator("figure:visible canvas").all()
        assert len(canvases) == len(titles)
        for canvas in canvases:
            label = canvas.get_attribute("aria-label")
            assert any(digit in label for digit in "0123456789"), label
            assert canvas.evaluate(DRAWN) > 3, label


def test_the_axes_of_a_run_follow_the_form(browser: Any, pages: dict[str, Path]) -> None:
    with Look(browser, pages["run"].as_uri(), 1400) as look:
        loss = look.page.locator("figure", has_text="Nats a token")
        told = loss.locator(".read")
        assert told.text_content() == "loss 1.5 · held out 1.25"
        look.page.get_by_label("tokens", exact=True).check()
        loss.locator(".u-over").hover()
        assert told.text_content().startswith("tokens 1.2e9")  # the third of five rows
        look.page.reload()
        assert look.page.get_by_label("tokens", exact=True).is_checked()
        canvas = loss.locator("canvas")
        before = canvas.evaluate("canvas => canvas.toDataURL()")
        assert loss.evaluate(LOGARITHMIC) == [False, False]
        loss.get_by_label("log").check()
        assert loss.evaluate(LOGARITHMIC) == [False, True]
        assert canvas.evaluate("canvas => canvas.toDataURL()") != before
        look.page.get_by_label("log x").check()
        assert loss.evaluate(LOGARITHMIC) == [True, True]
        assert look.said == []


LOGARITHMIC = "({plot}) => [plot.scales.x, plot.scales.y].map((scale) => scale.distr === 3)"


def test_lines_break_where_no_heartbeat_came(browser: Any, pages: dict[str, Path]) -> None:
    """Of one run and in a comparison, there of the run that stopped alone."""
    stopped = """({plot}) => plot.series.slice(1)
        .filter((line) => !line.spanGaps && line.gaps(plot, 0, 0, 0, []).length)
        .map((line) => line.label)"""
    for name, label in (("run", "host, peak"), ("runs", "one, host, peak")):
        with Look(browser, pages[name].as_uri(), 1400) as look:
            memory = look.page.locator("figure", has_text="GiB.")
            assert memory.evaluate(stopped) == [label]


def test_a_run_that_goes_on_is_loaded_again_until_told_not_to(
    browser: Any, pages: dict[str, Path]
) -> None:
    page = browser.new_page()
    page.clock.install()
    page.goto(pages["run"].as_uri())
    with page.expect_navigation():
        page.clock.run_for(1000 * REFRESH)
    page.get_by_label("reload every").uncheck()
    page.evaluate("window.isStillHere = true")
    page.clock.run_for(3000 * REFRESH)
    page.wait_for_timeout(200)  # a reload would have begun
    assert page.evaluate("window.isStillHere")
    page.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the pages of docs/ as mkdocs builds them."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and logs nothing."""

    def log_message(self, *args: object) -> None:
        """Nothing."""


SITE = [
    "index.html",
    "reference.html",
    "guide/runs.html",
    "guide/bench.html",
    "design/kernels.html",
]


def address_of(page: Path) -> str:
    """Of a page of docs/ in the site."""
    name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
    return name.replace("README.html", "index.html")


DOCS = ROOT / "docs"
EVERY_PAGE = sorted(map(address_of, [*DOCS.rglob("*.md"), *DOCS.glob("*.html")]))


PARTS = 8  # not a test a page: each process would build the site for its own


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_page_of_the_site_on_a_phone(
    part: int, scheme: str, browser: Any, site: str
) -> None:
    wrong = {}
    for page in EVERY_PAGE[part::PARTS]:
        with Look(browser, f"{site}/{page}", WIDTHS[0], scheme) as look:
            found = [*look.said, *look.faults(), *["too wide"] * look.is_too_wide()]
        if found:
            wrong[page] = found
    assert wrong == {}


@pytest.mark.kept(lambda page: page in ("index.html", "guide/runs.html"))
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", SITE)
def test_the_site(page: str, scheme: str, browser: Any, site: str) -> None:
    with Look(browser, f"{site}/{page}", WIDTHS[0], scheme) as look:
        assert look.said == []
        assert all(url.startswith((site, "data:")) for url in look.loaded)
        assert look.faults() == []
        for width in WIDTHS:
            look.page.set_viewport_size({"width": width, "height": 900})
            assert not look.is_too_wide(), width


def test_the_reference_has_an_entry_for_each_name(browser: Any, site: str) -> None:
    with Look(browser, f"{site}/reference.html", WIDTHS[-1]) as look:
        ids = look.page.locator("article [id]").evaluate_all("all => all.map((each) => each.id)")
        assert len(ids) == len(set(ids))
        shown = look.page.locator("h3.doc-heading").all_inner_texts()
        names = [text.split()[0] for text in shown]
        assert len(names) == len(REFERENCE)
        assert {"nsa_flex.tensor_parallel", "nsa_flex.masks.show", "nsa_flex.NSACache"} <= set(
            names
        )
        assert (
            "nsa_attention(q, k, v" in look.page.locator("article pre").all_inner_texts()[1]
        )  # an example, its lines apart
        assert look.page.locator("article blockquote").count() == 0


def test_the_picture_of_masks_follows_its_sliders(browser: Any, site: str) -> None:
    with Look(browser, f"{site}/index.html", 800) as look:
        told = look.page.locator(".nsa-told")
        assert "2,047 keys and values; dense attention reads 8,192, 4.0 times" in told.inner_text()
        selected = look.page.locator("canvas").nth(1)
        before = selected.evaluate("canvas => canvas.toDataURL()")
        look.page.get_by_label("selected blocks").fill("4")
        assert "1,279 keys" in told.inner_text()
        assert selected.evaluate("canvas => canvas.toDataURL()") != before


def test_the_search_leads_to_a_page(browser: Any, site: str) -> None:
    with Look(browser, f"{site}/index.html", 1400) as look:
        field = look.page.get_by_placeholder("Search")
        field.click()
        # Key by key, as people do: the theme forgets what is there before its index is.
        field.press_sequentially("continuous batching", delay=50)
        found = look.page.locator(".md-search-result__link").first
        found.wait_for()
        assert "atching" in look.page.locator(".md-search-result__list").inner_text()
        with look.page.expect_navigation():
            found.click()
        assert "index.html" not in look.page.url
        assert "continuous batching" in look.page.locator("article").inner_text().lower()
