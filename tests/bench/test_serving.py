"""The benchmark of continuous batching runs; its tokens are `generate`'s, wrong ones fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

from nsa_flex.bench.cases import serving, serving_engine
from nsa_flex.bench.cases.pairs import TINY, Pair, make_pair
from nsa_flex.bench.cases.serving_engine import check_tokens, engine, random_prompts, serve
from nsa_flex.bench.report.generation import serving as table
from nsa_flex.bench.report.rows import read_rows

SMALL = ["--device", "cpu", "--tiny", "--requests", "4", "--min-prompt", "20"]
SMALL += ["--max-prompt", "300", "--new-tokens", "4", "--batch-tokens", "128", "--checked", "2"]
SMALL += ["--prefix", "512", "--own-tokens", "40", "--repeats", "1"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(TINY, 400, torch.device("cpu"))


@pytest.mark.exhaustive
def test_rows_of_both_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    serving.main([*SMALL, "--out", str(out)])
    nsa, prefix, dense, dense_prefix = read_rows(out)
    assert [row["status"] for row in (nsa, prefix, dense, dense_prefix)] == ["ok"] * 4
    assert {prefix["implementation"], dense_prefix["implementation"]} == {"nsa", "dense"}
    assert (nsa["attention"], dense["attention"]) == ("nsa_flex_flash", "sdpa")
    for row in (nsa, dense):  # float32: no token lies between two
        assert row["requests_equal_to_generate"] == row["requests_checked"] == 2
        assert row["tokens_best"] == row["tokens_checked"] == 8
        assert row["new_tokens"] == 16
        assert row["new_tokens_per_s"] == pytest.approx(16 / row["seconds"], rel=0.05)
    assert nsa["prompt_tokens"] == dense["prompt_tokens"]
    later, own, ratio = (prefix[name] for name in ("later_ms", "own_ms", "later_over_own"))
    # `own` is a difference, and may be small.
    rounding = 0.006 * (1 + abs(ratio)) + 0.0006 * abs(own)
    assert ratio * own == pytest.approx(later, rel=0, abs=rounding)
    assert {"sources", "torch", "transformers", "device", "date"} <= set(prefix)
    assert "dense / NSA:" in capsys.readouterr().out


def test_lengths_are_log_uniform_and_the_same_each_time() -> None:
    prompts = random_prompts(400, 2048, 65536, 50, seed=3)
    lengths = [len(prompt) for prompt in prompts]
    assert 2048 <= min(lengths) < 2300
    assert 58000 < max(lengths) <= 65536
    below = sum(length < 11585 for length in lengths)  # the geometric mean
    assert 160 < below < 240
    assert prompts[7] == random_prompts(400, 2048, 65536, 50, seed=3)[7]


def test_tokens_that_are_not_the_models_fail(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = random_prompts(1, 50, 50, pair.size.vocab_size, 0)
    ids = torch.tensor([prompt])
    right = pair.nsa.generate(ids, max_new_tokens=6, do_sample=False)[0, 50:].tolist()
    found = check_tokens(pair.nsa, [prompt], [right])
    assert (found["requests_equal_to_generate"], found["worst_gap"]) == (1, 0)
    logits = pair.nsa(ids).logits[0, -1]
    worst, second = int(logits.argmin()), int(logits.topk(2).indices[1])
    with pytest.raises(RuntimeError, match="standard deviations below the best one"):
        check_tokens(pair.nsa, [prompt], [[worst, *right[1:]]])
    other = [second, *right[1:]]
    monkeypatch.setattr(serving_engine, "MAX_GAP", 9.0)
    assert check_tokens(pair.nsa, [prompt], [other])["requests_equal_to_generate"] == 0
    assert check_tokens(pair.nsa, [prompt], [right], exact=True)["requests_equal_to_generate"] == 1
    with pytest.raises(RuntimeError, match="0 of 1 requests have the tokens of generate"):
        check_tokens(pair.nsa, [prompt], [other], exact=True)
    assert check_tokens(pair.nsa, [], [])["tokens_checked"] == 0  # --checked 0


def test_time_that_is_over_is_told(pair: Pair) -> None:
    prompts = random_prompts(2, 50, 60, pair.size.vocab_size, 0)
    with (
        engine(pair.nsa, [70, 70], 8, 64, requests=2) as manager,
        pytest.raises(RuntimeError, match=r"time was over: [01] of 2 requests"),
    ):
        serve(manager, prompts, 8, max_seconds=-1)


@pytest.mark.exhaustive
def test_dense_attention_that_is_not_done_gives_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    serving.main([*SMALL, "--what", "serve", "--dense-seconds", "0.001", "--out", str(out)])
    nsa, dense = read_rows(out)
    assert (nsa["status"], dense["status"]) == ("ok", "not done")
    assert re.match(r"time was over: [0-3] of 4 requests in \d+ s", dense["reason"])
    assert (dense["new_tokens"], dense["prompt_tokens"]) == (16, nsa["prompt_tokens"])
    assert dense["seconds_more_than"] == 0.001
    assert dense["new_tokens_per_s_less_than"] == 16000
    assert "dense / NSA: more than 0.0" in capsys.readouterr().out
    line = table([nsa, dense | {"seconds_more_than": 60.0}]).iloc[0]
    least = 60 / max(nsa["seconds"], nsa["first_run_seconds"])
    assert line["seconds, dense"] == "> 60.00"
    assert line["seconds, dense ÷ NSA"] == f"> {least:.2f}"
    assert line["dense on"] == "sdpa"


def test_a_failure_is_a_row(pair: Pair) -> None:
    def fail() -> dict[str, Any]:
        raise MemoryError("too much")

    row = serving.row_of("serve", pair, "dense", "2 x 3", fail)
    assert (row["status"], row["reason"]) == ("failed", "MemoryError: too much")
    assert serving.ratio([row]) is None


def test_an_older_transformers_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(serving_engine.transformers, "__version__", "5.17.0")
    with pytest.raises(SystemExit):
        serving.main([*SMALL, "--out", str(tmp_path / "rows.json")])
    assert "transformers 5.17.0: the continuous batching" in capsys.readouterr().err
