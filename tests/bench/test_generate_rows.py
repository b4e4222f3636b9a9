"""The benchmark of `generate` runs, its rows say what they are, and it notices wrong steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from nsa_flex.bench.cases import generate, generate_steps
from nsa_flex.bench.cases.generate import columns_of, main, ratios
from nsa_flex.bench.cases.generate_case import GenerateCase, prompts_of
from nsa_flex.bench.cases.generate_models import TINY, Pair, make_pair, quantized
from nsa_flex.bench.report.rows import read_rows

CPU = torch.device("cpu")
CASE = GenerateCase("dynamic", 1, 40, 4)


def run(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    out = tmp_path / "rows.json"
    main(["--device", "cpu", "--tiny", "--steps-per-row", "4", "--out", str(out), *options])
    return read_rows(out)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(TINY, 80, CPU)


def test_rows_of_both_models_and_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tmp_path, "--cases", "static:2x40", "dynamic:1x33", "--dense", "sdpa")
    assert [(row["implementation"], row["cache"], row["batch"]) for row in rows] == [
        (who, *case) for case in (("static", 2), ("dynamic", 1)) for who in ("nsa", "dense")
    ]
    assert [row["attention"] for row in rows] == ["nsa_flex", "sdpa"] * 2
    for row in rows:
        assert row["status"] == "ok"
        assert row["steps"] == 4
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["prefill_ms"] > 0
        assert row["logits_error"] < 1e-5  # float32
        assert {"sources", "torch", "transformers", "device", "date"} <= set(row)
    assert "static 2x40 : dense (sdpa) / NSA" in capsys.readouterr().out


def test_both_models_share_their_weights(pair: Pair) -> None:
    ours = dict(pair.nsa.named_parameters())
    assert all(x is ours[name] for name, x in pair.dense.named_parameters())
    assert len(ours) > len(dict(pair.dense.named_parameters()))


def test_wrong_steps_fail(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompts_of(CASE, pair.size.vocab_size, CPU)
    forward = type(pair.dense.model.layers[0].mlp).forward

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + (x.shape[1] == 1)  # of single tokens

    monkeypatch.setattr(type(pair.dense.model.layers[0].mlp), "forward", wrong)
    with pytest.raises(RuntimeError, match="the last logits of each row are off by"):
        columns_of(pair.dense, ids, CASE, 60)


def test_a_row_that_takes_too_long_fails(pair: Pair) -> None:
    ids = prompts_of(CASE, pair.size.vocab_size, CPU)
    with pytest.raises(RuntimeError, match="tokens of 21 when the time for the row ended"):
        columns_of(pair.nsa, ids, CASE, 0.0)


def test_a_failure_is_a_row(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(generate, "columns_of", fail)
    row = generate.row_of(pair, "nsa", CASE, None, 1)
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: out of memory")
    assert ratios([row]) == []


def test_no_row_starts_after_the_budget(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    main(["--device", "cpu", "--tiny", "--budget", "0", "--out", str(out)])
    assert not out.exists()


def test_quantized_rows(tmp_path: Path, pair: Pair) -> None:
    pytest.importorskip("torchao")
    rows = run(tmp_path, "--cases", "static:1x40", "--quantize", "int8wo")
    assert [(row["implementation"], row["quantized"]) for row in rows] == [
        ("nsa", None),
        ("dense", None),
        ("nsa", "int8wo"),
        ("dense", "int8wo"),
    ]
    assert {row["status"] for row in rows} == {"ok"}
    with pytest.raises(ValueError, match="quantize='int3': expected one of int8wo"):
        quantized(pair, "int3")


@pytest.mark.parametrize("text", ["static", "static:8", "sliding:1x8", "static:1x", "static:ax8"])
def test_cases_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected CACHE:BATCHxTOKENS, static or dynamic"):
        GenerateCase.parse(text, 64)


def test_many_steps_are_a_row(tmp_path: Path) -> None:
    (row,) = run(tmp_path, "--steps", "3")
    assert (row["status"], row["steps"], row["graphs_before"]) == ("ok", 3, 1)


def test_what_grows_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{"allocated": 1}, {"allocated": 2}])
    monkeypatch.setattr(generate_steps, "_state", lambda device: next(found))
    with pytest.raises(RuntimeError, match=r"became \{'allocated': 2\}"):
        run(tmp_path, "--steps", "1")


def test_profile_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cpu", "--tiny", "--steps-per-row", "2", "--profile", "dynamic:1x40"])
    told = capsys.readouterr().out
    assert "== nsa dynamic 1x40" in told
    assert "== dense dynamic 1x40" in told
    assert "nsa_flex::choose_blocks" in told
    assert "masked_attention" in told  # a Python function
