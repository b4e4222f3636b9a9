"""An audit on two ranks that share sequences: one that attends its own tokens alone is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed.problem import CONFIG, new_model, whole_batch
from distributed.ranks import on_ranks
from torch import Tensor
from typer.testing import CliRunner

import nsa_flex
from nsa_flex.auditing import AuditReport
from nsa_flex.auditing.ranks import of_all_ranks
from nsa_flex.auditing.report import AuditFinding
from nsa_flex.cli.app import app
from nsa_flex.parallel import SequenceShards
from patching.tiny_models import tiny_model

APART = "rank 1 does not see those of rank 0"


def test_a_rank_that_attends_alone_is_a_finding(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, audits)


def audit(model: Any, inputs: Any) -> AuditReport:
    options: dict[str, Any] = {"train": False, "measured": False, "lint_scope": "none"}
    return nsa_flex.audit(model, inputs, mesh=dist.group.WORLD, **options)


def audits(device: torch.device) -> None:
    ids, group = whole_batch(device)[:, :64], dist.group.WORLD
    own = nsa_flex.shard_batch(ids, group, CONFIG["cpu"])
    shared = nsa_flex.context_parallel(new_model(device), group)
    assert audit(shared, [{**own, "use_cache": False}]).ok
    # Without NSA; ids by place, and any model.
    dense = tiny_model()

    def logits(input_ids: Tensor) -> Tensor:
        return dense(input_ids=input_ids, use_cache=False).logits

    for model, inputs in ((dense, own), (logits, (own["input_ids"],))):
        (found,) = [f for f in audit(model, inputs).findings if f.kind == "ranks-apart"]
        assert (found.message, found.location, found.phases) == (APART, "2 ranks", ("ranks",))
        assert "nsa_flex.context_parallel(model, mesh)" in found.mend
    report = audit(fails_on_rank_1, own["input_ids"])
    assert [f.kind for f in report.findings] == ["error"]
    assert ("no memory" if dist.get_rank() else "rank 1 raised") in report.findings[0].message
    report = audit(torch.sin, torch.ones(2, 8))
    assert report.ok
    assert report.notes[-1].startswith("ranks: a batch without token ids, integers (B, T), does")


def test_one_rank_has_all_tokens() -> None:
    ids = torch.ones(1, 8, dtype=torch.int64)
    alone = SequenceShards("", 0, 1)
    report = nsa_flex.audit(torch.abs, ids, mesh=alone, measured=False, lint_scope="none")
    assert report.ok
    assert report.notes[-1] == "ranks: the mesh has one rank, which has all tokens"


def fails_on_rank_1(input_ids: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise MemoryError("no memory")
    return input_ids.double()


def waits_on_rank_1() -> tuple[Any, Tensor]:
    def call(x: Tensor) -> Tensor:
        return x * x.max().item() if dist.get_rank() == 1 else x

    return call, torch.ones(3)


def test_findings_of_other_ranks() -> None:
    """What rank 0 has too is told once; the others are named, at each place."""
    both = AuditFinding("lint", "float(tensor)", "model.py:3 in f", phases=("sources",))
    sync = AuditFinding("host-sync", "item", "model.py:7 in f", phases=("training",))
    elsewhere = replace(sync, location="model.py:9 in f")
    reports = [
        AuditReport("f", findings=(both,), notes=("of rank 0",)),
        AuditReport("f", findings=(both, sync, elsewhere), known=(sync,)),
        AuditReport("f", findings=(sync,)),
    ]
    joined = of_all_ranks(reports)
    assert joined.findings == (
        both,
        replace(sync, phases=("training", "rank 1", "rank 2")),
        replace(elsewhere, phases=("training", "rank 1")),
    )
    assert joined.known == (replace(sync, phases=("training", "rank 1")),)
    assert joined.notes == ("of rank 0",)
    assert joined.findings[1].fingerprint == sync.fingerprint
    assert of_all_ranks(reports[:1]) == reports[0]


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, commands, tmp_path)
    found = json.loads((tmp_path / "alone").read_text())["findings"]
    assert [(f["kind"], f["message"]) for f in found] == [("ranks-apart", APART)]
    assert json.loads((tmp_path / "patched").read_text())["ok"]
    assert f"ranks-apart (ranks): {APART}\n  at 2 ranks\n" in (tmp_path / "text").read_text()
    assert "NSAAttention is audited in one process" in (tmp_path / "layer").read_text()
    found = json.loads((tmp_path / "rank 1").read_text())["findings"]
    assert {f["kind"] for f in found} == {"host-sync", "graph-break"}
    assert all(f["phases"] == ["inference", "rank 1"] for f in found)
    known = json.loads((tmp_path / "rank 1, known").read_text())
    assert known["known"] == found


def commands(_device: torch.device, folder: Path) -> None:
    """Rank 0 tells what both found; the other is silent, and both exit alike."""
    quick = ["--no-measure", "--no-train", "--lint", "none", "--device", "cpu"]
    quick += ["--lengths", "64", "--batch-sizes", "1"]
    one = ["audit.test_ranks:waits_on_rank_1", *quick[:-4]]
    saved = str(folder / "saved")
    calls = {
        "rank 1": ([*one, "--json"], 1),
        "rank 1, saved": ([*one, "--write-baseline", saved], 0),
        "rank 1, known": ([*one, "--baseline", saved, "--json"], 0),
        "alone": (["llama", *quick, "--json"], 1),
        "patched": (["llama", "--patch", *quick, "--json"], 0),
        "text": (["llama", *quick], 1),
        "layer": (["NSAAttention", *quick], 2),
        "baseline": (["llama", *quick, "--write-baseline", str(folder / "known")], 0),
    }
    for name, (call, code) in calls.items():
        result = CliRunner().invoke(app, ["audit", *call], env={"COLUMNS": "200"})
        is_first = dist.get_rank() == 0
        assert result.exit_code == code, result.output
        if is_first:
            (folder / name).write_text(result.stdout if code < 2 else result.stderr)
        else:
            assert not result.stdout
