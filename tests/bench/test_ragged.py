"""The benchmark of documents of different lengths: lengths, rows, and wrong results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_flex.bench.cases import ragged

OPTIONS = ["--heads", "4/2", "--documents", "3", "--tokens", "500", "--milliseconds", "1"]


def test_lengths_differ_and_come_to_the_tokens() -> None:
    lengths = ragged.lengths_of(16, 65536, seed=0)
    assert sum(lengths) == 65536
    assert len(set(lengths)) == 16
    assert min(lengths) > 65536 / 16 / 8
    assert lengths != ragged.lengths_of(16, 65536, seed=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows(device: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    compiler = "eager" if device == "cpu" else "inductor"
    command = [*OPTIONS, "--device", device, "--compiler", compiler, "--out", str(out)]
    assert ragged.main(command) == 0
    rows = json.loads(out.read_text())
    assert [row["told"] for row in rows] == [False, True]
    for row in rows:
        assert row["slots"] > row["tokens"] == 500
        assert row["error"] < ragged.MAX_ERROR
        ratio = row["forward_ms"] / row["forward_batch_rows_ms"]
        assert row["forward_over_batch_rows"] == pytest.approx(ratio, abs=1e-3)
        assert min(row["forward_backward_ms"], row["forward_ms"]) > 0


def test_a_wrong_result_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that see one another."""
    align = ragged.align_packed
    monkeypatch.setattr(
        ragged,
        "align_packed",
        lambda cu, *rest: align(cu, *rest)._replace(start=None, max_document_length=None),
    )
    out = tmp_path / "rows.json"
    command = [*OPTIONS, "--device", "cpu", "--compiler", "eager", "--out", str(out)]
    assert ragged.main(command) == 1
    assert {row["status"] for row in json.loads(out.read_text())} == {"failed"}
