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
from cli.test_report_command import write_run

from nsa_flex.auditing.html import page as audit_page
from nsa_flex.training.report import report

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (360, 800, 1400)


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
    """Files by name: a run, two runs, a run that goes on, and two audits."""
    from audit.test_page import REPORT

    folder = tmp_path_factory.mktemp("pages")
    runs = [folder / "one", folder / "with-a-name-that-is-much-longer-than-a-phone-is-wide"]
    for run in runs:
        write_run(run, probe=True)
    write_run(runs[0], probe=True, first_step=2)
    (runs[0] / "config.yaml").write_text("training: {learning_rate: 0.1}\n")
    written = {
        "run": report(runs[0], refresh=60),
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
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.loaded.append(request.url))
        self.page.goto(address)
        self.page.wait_for_load_state("networkidle")

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *error: object) -> None:
        self.page.close()

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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "runs", "audit"])
def test_reports(name: str, width: int, scheme: str, browser: Any, pages: dict[str, Path]) -> None:
    with Look(browser, pages[name].as_uri(), width, scheme) as look:
        assert look.said == []
        assert look.loaded == [pages[name].as_uri()]
        assert not look.is_too_wide()
        assert look.faults() == []


DRAWN = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


def test_every_plot_of_a_run_is_drawn_and_told(browser: Any, pages: dict[str, Path]) -> None:
    with Look(browser, pages["run"].as_uri(), 1400) as look:
        titles = look.page.locator("figure:visible h3").all_text_contents()
        assert {"Loss", "grad norm", "perplexity", "memory", "distance"} <= set(titles)
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
        assert told.text_content().startswith("tokens 2")
        look.page.reload()
        assert look.page.get_by_label("tokens", exact=True).is_checked()
        loss.get_by_label("log").check()
        assert look.said == []


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


def test_the_picture_of_masks_follows_its_sliders(browser: Any, site: str) -> None:
    with Look(browser, f"{site}/index.html", 800) as look:
        told = look.page.locator(".nsa-told")
        assert "2,047 keys and values; dense attention reads 8,192, 4.0 times" in told.inner_text()
        selected = look.page.locator("canvas").nth(1)
        before = selected.evaluate("canvas => canvas.toDataURL()")
        look.page.get_by_label("selected blocks").fill("4")
        assert "1,279 keys" in told.inner_text()
        assert selected.evaluate("canvas => canvas.toDataURL()") != before


def test_the_search_finds_a_page(browser: Any, site: str) -> None:
    with Look(browser, f"{site}/index.html", 1400) as look:
        look.page.get_by_placeholder("Search").fill("continuous batching")
        found = look.page.locator(".md-search-result__link").first
        found.wait_for()
        assert found.get_attribute("href")
        assert "atching" in look.page.locator(".md-search-result__list").inner_text()
