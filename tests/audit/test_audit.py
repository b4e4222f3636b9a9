"""`nsa_flex.audit`: each planted offender is named with its line; clean code has no finding."""

from __future__ import annotations

import inspect
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from audit.quick_audit import quick
from nsa_flex import audit
from nsa_flex.auditing import measuring, read_baseline, write_baseline
from nsa_flex.auditing.batches import batches_of
from nsa_flex.auditing.lint import lint
from nsa_flex.auditing.measuring import MOST_CALLS
from nsa_flex.auditing.report import AuditFinding
from nsa_flex.auditing.sources import excerpt, is_allowed, place_of

pytestmark = pytest.mark.usefixtures("forget_shapes")
HERE = Path(__file__).name


def lengths(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.linspace(0.5, 3.0, 2 * size).view(2, size),) for size in sizes]


def branch_on_tensor(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


def branch_on_shape(x):
    return x + 1 if x.shape[1] > 16 else x - 1


def unrolled(x):
    for column in range(x.shape[1]):
        x = x + column
    return x


def printing(x):
    print(x)
    return x * 2


# name: (function, inputs, kind of a finding, text in its message)
OFFENDERS: dict[str, tuple[Callable, list, str, str]] = {
    "item": (lambda x: x * x.max().item(), lengths(8), "host-sync", "Tensor.item()"),
    "tolist": (lambda x: x * x.tolist()[0][0], lengths(8), "host-sync", "Tensor.tolist()"),
    "if tensor": (branch_on_tensor, lengths(8), "graph-break", "data-dependent branching"),
    "boolean index": (lambda x: x[x > 1], lengths(8), "data-dependent", "aten.index.Tensor"),
    "nonzero": (lambda x: x.nonzero(), lengths(8), "data-dependent", "aten.nonzero"),
    "unique": (lambda x: x.unique(), lengths(8), "data-dependent", "aten._unique2"),
    "shape branch": (branch_on_shape, lengths(8, 9, 32), "recompile", "16"),
    "recompile per length": (unrolled, lengths(8, 9, 10), "recompile", "size mismatch at index 1"),
    "recompile by dtype": (
        lambda x: x * 2,
        [(torch.ones(4, dtype=dtype),) for dtype in (torch.float32, torch.float64)],
        "recompile",
        "dtype mismatch",
    ),
    "cpu": (lambda x: x.cpu() * 2, lengths(8), "host-sync", "Tensor.cpu()"),
    "print": (printing, lengths(8), "host-sync", "printing a tensor"),
    "max().item() of cu_seqlens": (
        lambda x, cu_seqlens: x[:, : cu_seqlens.diff().max().item()],
        [{"x": torch.ones(2, 9), "cu_seqlens": torch.tensor([0, 4, 9])}],
        "host-sync",
        "Tensor.item()",
    ),
}


def closure_driven() -> tuple[Callable, list]:
    """A Python value that the function closes over is another one for every batch."""
    mode = "start"

    def next_batch():
        nonlocal mode
        mode += "!"
        return (torch.ones(4),)

    def scaled(x):
        return x * len(mode)

    return scaled, [next_batch] * 3


@pytest.mark.parametrize("name", OFFENDERS)
def test_offender(name: str, capsys: pytest.CaptureFixture) -> None:
    fn, inputs, kind, text = OFFENDERS[name]
    report = quick(fn, inputs, train=False)
    assert not report.ok
    found = [f for f in report.findings if f.kind == kind and text in f.message]
    assert found, report
    source, first = inspect.getsourcelines(fn)
    file, line, _ = place_of(found[0].location)
    assert Path(file).name == HERE
    assert first <= line < first + len(source)
    assert found[0].mend


def test_offender_closure_driven_recompile() -> None:
    fn, inputs = closure_driven()
    report = quick(fn, inputs)
    (finding,) = report.findings
    assert finding.kind == "recompile"
    assert "mode" in finding.message
    assert "tensor" in finding.mend


@pytest.mark.parametrize("name", ["item", "if tensor", "boolean index", "cpu", "tolist"])
def test_offender_in_training(name: str) -> None:
    fn = OFFENDERS[name][0]
    weight = nn.Parameter(torch.ones(()))

    def step(x):
        return fn(x * weight).sum() * weight

    report = quick(step, lengths(8))
    assert {phase.name for phase in report.phases} == {"inference", "training"}
    assert any("training" in finding.phases for finding in report.findings)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.max().item()


def test_offender_in_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    report = quick(InBackward.apply, x)
    (finding,) = [f for f in report.findings if f.kind == "host-sync"]
    assert finding.phases == ("training",)
    assert finding.location.endswith("in backward")


def test_offender_in_decode() -> None:
    def step(x, cache):
        return x + cache.sum() if cache.shape[1] < 30 else x * cache.max().item()

    report = quick(
        step,
        (torch.ones(2, 1), torch.ones(2, 8)),
        decode=[lambda n=n: (torch.ones(2, 1), torch.ones(2, n)) for n in (28, 29, 30)],
    )
    assert {f.kind for f in report.findings} >= {"host-sync", "recompile"}
    assert all(f.phases == ("decode",) for f in report.findings if f.kind != "lint")


layer = nn.Linear(8, 8)


def unbranched(x, weight):
    return torch.where(x > 0, x @ weight, 0.0)


CLEAN: dict[str, tuple[Callable, list]] = {
    "module": (layer, [(torch.ones(3, n, 8),) for n in (16, 9, 20)]),
    "function that names a module": (
        lambda x: layer(x).relu(),
        [{"x": torch.ones(b, n, 8)} for b in (2, 3) for n in (16, 9, 1)],
    ),
    "function": (unbranched, [(torch.randn(n, 8), torch.randn(8, 8)) for n in (4, 5, 6)]),
    "attention": (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(),
        [(torch.randn(2, n, 8),) for n in (5, 6, 9)],
    ),
    "compiled": (
        torch.compile(unbranched, backend="eager"),
        [(torch.randn(4, 8), torch.randn(8, 8))],
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_code_has_no_finding(name: str) -> None:
    fn, inputs = CLEAN[name]
    report = quick(fn, inputs)
    assert report.ok, report
    assert all(phase.breaks == 0 for phase in report.phases)


def test_lengths_and_sizes_of_one_are_notes() -> None:
    report = quick(lambda x: x.sin(), lengths(8, 9, 1, 10))
    assert report.ok
    assert report.graphs == {"inference": 3}
    assert [r.cause for r in report.phases[0].recompiles] == ["length", "size-one"]
    assert "torch._dynamo.mark_dynamic(x, 1)" in report.notes[0]
    assert report.phases[0].runs == ((0,), (1,), (2,), (1,))


def test_more_graphs_than_allowed() -> None:
    report = quick(lambda x: x.sin(), lengths(8, 9), max_graphs=1)
    (finding,) = report.findings
    assert finding.kind == "too-many-graphs"
    assert quick(lambda x: x.sin(), lengths(8, 9), max_graphs=1, dynamic=True).ok


def test_graph_breaks_cut_a_batch_into_graphs() -> None:
    def cut(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    report = quick(cut, lengths(8))
    (phase,) = report.phases
    assert phase.breaks == 1
    assert phase.runs == ((0, 1),)
    assert [f.kind for f in report.findings] == ["graph-break"]


def test_whole_function_that_torch_skips() -> None:
    @torch._dynamo.disable
    def skipped(x):
        return x + 1

    report = quick(lambda x: skipped(x), lengths(8))
    (finding,) = report.findings
    assert finding.kind == "graph-break"
    assert report.graphs == {"inference": 0}


def eager_check(x):
    if not torch.compiler.is_compiling() and x.sum() > 1e6:
        raise ValueError("too large")
    return x * 2


def test_what_only_eager_code_does_is_a_note() -> None:
    report = quick(eager_check, lengths(8))
    assert report.ok
    assert any("in eager mode only, bool(tensor)" in note for note in report.notes)


def allowed(x):
    # audit: allow (the number is printed once an epoch)
    return x * x.max().item()


def test_allow_comment_sets_findings_aside() -> None:
    report = quick(allowed, lengths(8))
    assert report.ok
    assert {f.kind for f in report.allowed} >= {"host-sync", "graph-break"}
    assert is_allowed(report.allowed[0].location)


def test_parameters_keep_values_and_gradients() -> None:
    module = nn.Linear(4, 4)
    before = module.weight.detach().clone()
    module.weight.grad = gradient = torch.ones(4, 4)
    quick(module, torch.ones(2, 4))
    assert module.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))
    assert torch.equal(module.weight, before)
    assert module.bias.grad is None


def test_baseline_leaves_only_new_findings(tmp_path: Path) -> None:
    def one(x):
        return x * x.max().item()

    file = tmp_path / "baseline.json"
    first = quick(one, lengths(8))
    write_baseline(first, file)
    again = quick(one, lengths(8), baseline=file)
    assert again.ok
    assert Counter(f.fingerprint for f in again.known) == read_baseline(file)
    other = quick(lambda x: x.nonzero(), lengths(8), baseline=file)
    assert not other.ok


class Twice(nn.Module):
    def forward(self, x):
        return x * x.max().item()


class Thrice(Twice):
    def forward(self, x):
        return super().forward(x) * x.min().item()


class Again(nn.Module):
    def forward(self, x):
        return x * x.max().item()


def test_a_baseline_knows_as_many_findings_as_it_lists(tmp_path: Path) -> None:
    """Methods share their names, and lines their text."""
    file = tmp_path / "baseline.json"
    write_baseline(quick(Twice(), lengths(8)), file)
    assert quick(Twice(), lengths(8), baseline=file).ok
    assert quick(Again(), lengths(8), baseline=file).ok
    for more in (Thrice(), nn.Sequential(Twice(), Again())):
        report = quick(more, lengths(8), baseline=file)
        assert not report.ok
        assert report.known
    known = [f.fingerprint for f in quick(Twice(), lengths(8)).findings]
    assert quick(Twice(), lengths(8), baseline=frozenset(known)).ok


def test_a_read_in_a_later_batch_is_found() -> None:
    def late(x):
        return x[:, [0, 1, 2]] if x.shape[1] > 20 else x

    for sizes in ((16, 24), (24, 16)):
        report = quick(late, [torch.ones(2, size) for size in sizes])
        assert {f.kind for f in report.findings} == {"device-copy"}


def test_a_float_that_changes_is_no_read() -> None:
    assert quick(lambda x, s: x * s, [(torch.ones(3), s) for s in (0.5, 0.7, 0.9)]).ok


def test_what_the_standard_library_does_is_found_where_it_is_called() -> None:
    def middle(x):
        return x * statistics.median([x.sum(), x.max(), x.min()])

    line = f"{__file__}:{inspect.getsourcelines(middle)[1] + 1} in middle"
    report = quick(middle, lengths(8))
    assert {f.location for f in report.findings} == {line}


def test_fingerprint_survives_moved_lines() -> None:
    first = AuditFinding("recompile", "x.size()[1] == 8", "/a/model.py:7 in forward")
    moved = AuditFinding("recompile", "x.size()[1] == 9", "/b/model.py:70 in forward")
    other = AuditFinding("recompile", "x.size()[1] == 9", "/b/model.py:70 in step")
    assert first.fingerprint == moved.fingerprint != other.fingerprint


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"version": 1, "findings": []}'])
def test_bad_baseline(text: str, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="baseline"):
        read_baseline(file)


class Linted(nn.Module):
    def forward(self, x):
        if x.shape[0] > 1000:
            return self.rare(x)
        return x

    def rare(self, x):
        return helper(x) * x.unique().shape[0]

    def unused(self, x):
        return x.item()


def helper(x):
    print("constant text is fine")
    print(x)
    return torch.where(x > 0)


def test_lint_reads_what_is_reachable_and_not_run() -> None:
    messages = {finding.message for finding in lint(Linted())}
    assert messages == {
        ".unique(), whose output shape depends on values",
        "print, which reads a tensor that it is given",
        "torch.where of one argument (nonzero)",
    }
    report = quick(Linted(), torch.ones(2))
    assert {f.kind for f in report.findings} == {"lint"}
    assert quick(Linted(), torch.ones(2), lint_scope="none").ok


def test_lint_of_branches_and_lambdas() -> None:
    def branch(x):
        assert x.isfinite().all()
        return x if any([x.dim() > 1]) else x.to("cpu")

    messages = [finding.message for finding in lint(branch)]
    assert messages == ["a branch on .all(): bool(tensor)", ".to('cpu') (as .cpu())"]
    assert [f.message for f in lint(lambda x: x.item())] == [".item()"]


def test_measured_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """With generated code: what costs how much.

    That the first call compiles with an empty cache and the last from a full one is asked of
    torch's own counters: which of two short times is longer depends on what else is running.
    """
    seen: list[tuple[int, int]] = []

    def counted(call: Callable[[], Any]) -> float:
        before = counters["inductor"].copy()
        took = seconds(call)
        hits, misses = (
            counters["inductor"][key] - before[key]
            for key in ("fxgraph_cache_hit", "fxgraph_cache_miss")
        )
        seen.append((hits, misses))
        return took

    seconds = measuring._seconds
    monkeypatch.setattr(measuring, "_seconds", counted)
    module = nn.Linear(16, 16)
    (phase,) = audit(module, torch.ones(64, 16), train=False).phases
    assert (seen[0], seen[-1]) == ((0, 1), (1, 0))
    assert set(seen[1:-1]) == {(0, 0)}
    for kind in ("cold", "warm"):
        assert phase.measured[f"compile_seconds_{kind}"] > 0
    assert phase.measured["peak_bytes_eager"] == 64 * 16 * 4
    assert phase.kernels
    assert phase.cudagraphs is None


@pytest.mark.exhaustive
def test_no_batch_is_called_more_often_than_a_cache_has_room_for() -> None:
    used: list[torch.Tensor] = []

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        used.append(torch.zeros(()))
        return torch.ones(4), used[-1]

    def append(x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        length.add_(1)
        return x * length

    assert audit(append, step, train=False).phases[0].measured["step_seconds"] > 0
    assert 3 < max(length.item() for length in used) <= MOST_CALLS


def test_branches_of_nsa_are_named() -> None:
    from nsa_flex import NSAAttention

    report = quick(NSAAttention(16, 2, 1), torch.randn(1, 80, 16), train=False)
    assert [branch.branch for branch in report.branches] == ["compressed", "selected", "sliding"]
    assert {branch.backend for branch in report.branches} == {"dense"}
    assert all("on cpu" in branch.reason for branch in report.branches)
    assert all(branch.kernels for branch in report.branches)


def test_json_and_text() -> None:
    report = quick(branch_on_shape, lengths(8, 9, 32))
    plain = json.loads(report.to_json())
    assert plain["ok"] is False
    assert plain["findings"][0]["fingerprint"] == report.findings[0].fingerprint
    assert plain["phases"][0]["recompiles"]
    text = str(report)
    assert "branch_on_shape: 1 finding" in text
    assert "mark_dynamic(x, 1)" in text


def test_page_holds_everything_it_shows() -> None:
    page = quick(branch_on_shape, lengths(8, 9, 32)).to_html()
    assert page.count("<svg") == 1
    assert "return x + 1 if x.shape[1] &gt; 16" in page  # the source, escaped
    assert "caused by the code" in page
    for outside in ("http://", "https://", "<link", "src="):
        assert outside not in page


@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        (torch.ones(2, 3), ["[2, 3]"]),
        ((torch.ones(2), torch.ones(())), ["[2], []"]),
        ({"x": torch.ones(2)}, ["x [2]"]),
        ([(torch.ones(2),), {"x": torch.ones(3)}], ["[2]", "x [3]"]),
        (lambda: (torch.ones(2),), ["[2]"]),
        ((1, "text"), ["no tensors"]),
    ],
)
def test_batches(inputs: Any, labels: list[str]) -> None:
    assert [batch.label for batch in batches_of(inputs)] == labels


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ([], ValueError, "inputs holds no batch"),
        (3, TypeError, "inputs must be a batch or a list of batches, got int"),
        ([3], TypeError, "a batch must be a tuple of positional arguments"),
    ],
)
def test_bad_inputs(inputs: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        batches_of(inputs)


def test_excerpt() -> None:
    line = inspect.getsourcelines(branch_on_tensor)[1]
    found = excerpt(f"{__file__}:{line + 1} in branch_on_tensor", around=1)
    assert found == [
        (line, "def branch_on_tensor(x):"),
        (line + 1, "    if x.sum() > 0:"),
        (line + 2, "        return x + 1"),
    ]
    assert excerpt("<no user frame>") == []


def test_docs_show_the_committed_audit_of_ten_families() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "bench" / "results" / "audit_families.json").read_text())["rows"]
    text = (root / "docs" / "guide" / "audit.md").read_text()
    assert len(rows) == 10
    for row in rows:
        cells = [row["family"], len(row["findings"]), *row["graphs"].values()]
        assert f"| {' | '.join(map(str, cells))} |" in text
        assert len(row["lint"]) == 1
        assert "find_packed_sequence_indices" in row["lint"][0]


def test_committed_page_is_what_the_example_gives() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "audit_example.html").read_text()
    assert "docs.audit_example:faulty" in page
    for text in (
        "Tensor.item()",
        "bool(tensor)",
        "self.calls == 9",
        "2 &lt;= x.size()[1] &lt;= 50",
    ):
        assert text in page


@pytest.mark.parametrize("name", ["function", "layer", "model"])
def test_committed_audits_of_an_h200_are_clean_and_in_the_docs(name: str) -> None:
    root = Path(__file__).parents[2]
    report = json.loads((root / "bench" / "results" / f"audit_{name}_h200.json").read_text())
    assert report["ok"]
    text = " ".join((root / "docs" / "guide" / "audit.md").read_text().split())
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert not any(phase["breaks"] or phase["cudagraphs"] for phase in phases.values())
    cold, trained = (
        f"{phases[each]['measured']['compile_seconds_cold']:.1f} s"
        for each in ("inference", "training")
    )
    assert f"{cold} ({trained})" in text or f"{cold} (training: {trained})" in text
    longest = float(re.search(r"with the cache in at most (\S+) s", text)[1])
    assert all(round(p["measured"]["compile_seconds_warm"], 2) <= longest for p in phases.values())
