"""The page of a report: what it shows, what it escapes, and what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from nsa_flex.auditing.html import alike, page
from nsa_flex.auditing.report import AuditFinding, AuditReport, BranchRun, Graph, Phase, Recompile
from nsa_flex.auditing.sources import place_of

GUARDS = [Recompile(i, "code", f"x.size()[1] == {i}", "model.py:3 in f", "pad") for i in (1, 2)]
PHASE = Phase(
    "inference",
    ("x [2, 8]", "x [2, 9]", "x <wide>"),
    graphs=(Graph(0, 4, "forward:3", 0), Graph(1, 5, "", 1), Graph(2, 5, "", 2)),
    runs=((0,), (1,), (2, 0)),
    recompiles=(*GUARDS, Recompile(2, "length", "y.size()[0] == 3", "model.py:4 in f", "mark")),
    breaks=1,
    measured={"step_seconds": 0.002, "peak_bytes_eager": 3 * 2**20},
    kernels=({"name": "gemm<float>", "calls": 4, "microseconds": 30.0},) * 2,
    cudagraphs=2,
)
MEND = "torch.where(a < b, a, b), or torch.cond"
FINDING = AuditFinding("host-sync", "x < 3 & y", f"{__file__}:7 in <lambda>", MEND, ("training",))
REPORT = AuditReport(
    "a<b>",
    findings=(FINDING,),
    known=(replace(FINDING, message="known one"),),
    notes=("see torch.compile and <here>",),
    phases=(PHASE, replace(PHASE, name="training", graphs=(), runs=(), recompiles=())),
    branches=(BranchRun("selected", "triton", "it takes <all>", ("kernel_a", "kernel_b")),),
    environment={"torch": "2", "device": "cpu"},
)


class Balanced(HTMLParser):
    """Checks that tags close in order, and gathers the text."""

    VOID = ("meta", "br", "link", "line", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return parser


@pytest.mark.parametrize("reports", [(REPORT,), (REPORT, AuditReport("empty"))])
def test_page_is_whole_and_escaped(reports: tuple[AuditReport, ...]) -> None:
    html = page(*reports)
    text = " ".join(parsed(html).text.split())
    for shown in (
        "a<b> 1 finding",
        "x < 3 & y",
        "known one",
        "see torch.compile and <here>",
        "it takes <all>",
        "step2.00 ms",
        "CUDA graphs2 skipped",
        "torch compiled nothing",
        "first change of a size",
        "gemm<float>",
    ):
        assert shown in text
    assert html.startswith("<!doctype html>")
    assert "{{" not in html
    assert "{%" not in html
    for outside in ("http://", "https://", "<link", "src="):
        assert outside not in html


def test_findings_come_first() -> None:
    """Then what each phase compiled, and last what somebody allowed."""
    text = parsed(page(REPORT)).text
    order = ["1 finding", "Findings", FINDING.message, "inference", "Known, from the baseline"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_names_of_torch_are_code() -> None:
    html = page(REPORT)
    assert "<code>torch.where(a &lt; b, a, b)</code>, or <code>torch.cond</code>" in html
    assert "<code>torch.compile</code> and &lt;here&gt;" in html


def test_source_of_a_finding_is_shown_with_its_line() -> None:
    line = place_of(FINDING.location)[1]
    assert f'<span class="hit"><i>{line}</i>' in page(REPORT)


def test_sweep_shows_graphs_rings_and_breaks() -> None:
    html = page(REPORT)
    assert html.count("<svg") == 1
    assert html.count('class="lane"') == 3
    assert html.count('class="ring bad"') == 2  # the two batches that the code recompiled
    assert html.count('class="ring"') == 1  # the first
    assert html.count('class="none"') == 1  # the last batch ran the first graph again
    assert html.count('class="cut"') == 1
    assert "x &lt;wide&gt;" in html


def test_guards_that_differ_in_numbers_are_one_row() -> None:
    assert [len(group) for group in alike(PHASE.recompiles)] == [2, 1]
    assert "caused by the code 2 times" in " ".join(parsed(page(REPORT)).text.split())


def test_kernels_have_bars_as_long_as_their_share() -> None:
    html = page(REPORT)
    assert html.count('style="width:50.0%"') == 4  # two kernels in each of two phases
    assert "7.5 µs" in html


WITHOUT_JINJA2 = """
    import sys
    sys.modules["jinja2"] = None
    from nsa_flex import AuditReport
    print(AuditReport("f"))
    try:
        AuditReport("f").to_html()
    except ModuleNotFoundError as error:
        print(error)
    from nsa_flex.cli import main
    sys.argv = ["nsa-flex", "audit", "nsa_attention", "--html", "page.html"]
    main()
"""


def test_without_jinja2_the_page_names_the_extra() -> None:
    code = textwrap.dedent(WITHOUT_JINJA2)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "300"},
    )
    text = "needs jinja2, which is not installed; install it with: pip install 'nsa-flex[audit]'"
    assert done.stdout.startswith("f: clean")
    assert text in done.stdout
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
