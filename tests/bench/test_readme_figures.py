"""What the README and the page about Bench say of speed is what the committed rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_flex.bench.report.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README = " ".join((ROOT / "README.md").read_text().split())
BENCH = " ".join((ROOT / "docs" / "guide" / "bench.md").read_text().split())


def test_8k_tokens() -> None:
    """About as fast as dense for groups, slower for one query head a KV head."""
    median = {
        (row["implementation"], row["heads"]): row["median_ms"]
        for row in read_rows(RESULTS / "headline_h200.json")
        if row["seq_len"] == 8192 and row["pass"] == "forward"
    }
    times = {heads: median["sdpa-cudnn", heads] / median["nsa", heads] for _, heads in median}
    assert times["64/4"] == pytest.approx(1, abs=0.2)
    assert times["32/8"] == pytest.approx(1, abs=0.2)
    assert times["16/16"] < 0.8


def test_peaks_at_64k_tokens() -> None:
    peak = {
        (row["pass"], row["implementation"], row["heads"]): row["peak_bytes"]
        for row in read_rows(RESULTS / "headline_h200.json")
        if row["seq_len"] == 65536
    }
    forward, both = (
        [peak[each, "nsa", heads] / peak[each, "sdpa-cudnn", heads] for heads in ("64/4", "16/16")]
        for each in ("forward", "forward_backward")
    )
    assert "peaks where dense attention's does with 64/4 heads, and at twice as much" in README
    assert both == pytest.approx([1, 2], rel=0.1)
    assert "of a forward alone at three to seven times as much" in README
    assert forward == pytest.approx([3, 7], rel=0.05)


def test_short_forwards() -> None:
    """At 4k tokens, of all heads that were measured."""
    rows = read_rows(RESULTS / "families_h200.json")
    nsa, dense = (
        [
            row["median_ms"]
            for row in rows
            if (row["implementation"], row["seq_len"], row["pass"]) == (name, 4096, "forward")
        ]
        for name in ("nsa", "sdpa-cudnn")
    )
    times = [ours / theirs for ours, theirs in zip(nsa, dense, strict=True)]
    assert len(times) == 5
    assert f"a forward takes NSA {min(times):.1f} to {max(times):.1f} times as long" in README


def speeds(implementation: str, model: str) -> dict[tuple[int, int], float]:
    """Tokens a second by batch and length."""
    return {
        (row["batch"], row["seq_len"]): row["tokens_per_s"]
        for row in read_rows(RESULTS / "models_h200.json")
        if row["implementation"] == implementation and row["model"].startswith(model)
    }


def test_training_of_long_contexts() -> None:
    nsa, dense = speeds("nsa", "llama-3.1-8b"), speeds("dense", "llama-3.1-8b")
    assert nsa[1, 8192] / dense[1, 8192] == pytest.approx(1, abs=0.02)
    times = nsa[1, 65536] / dense[1, 65536]
    assert f"as fast as dense ones at 8k tokens and {times:.1f} times as fast at 64k" in README


@pytest.mark.parametrize(
    ("kind", "text"),
    [("-graph", "with dense attention as one CUDA graph"), ("", "without (`bench")],
)
def test_training_of_short_contexts(kind: str, text: str) -> None:
    nsa, dense = speeds(f"nsa{kind}", "125m"), speeds(f"dense{kind}", "125m")
    times = [dense[shape] / nsa[shape] for shape in nsa]
    assert f"{min(times):.1f} to {max(times):.1f} times as fast {text}" in BENCH


def test_dense_attention_of_packed_documents() -> None:
    """On FA-2 and on FlashAttention-4, whose forward is faster than NSA's there."""
    nsa, fa2 = (
        [
            row["median_ms"]
            for each in ("forward", "forward_backward")
            for row in read_rows(RESULTS / "packed_h200.json")
            if (row["implementation"], row["heads"], row["batch"], row["pass"])
            == (name, "64/4", 8, each)
        ]
        for name in ("nsa-packed", "fa2-varlen")
    )
    (fa4,) = (
        [row["forward_ms"], row["forward_backward_ms"]]
        for row in json.loads((RESULTS / "flash_attn_4_h200.json").read_text())["times"]
        if (row["branch"], row["heads"], row["documents"]) == ("dense", "64/4", 8)
        and row["implementation"] == "fa4 varlen"
    )
    assert f"take {nsa[0]:.1f} ms forward and {nsa[1]:.1f} ms with the backward" in README
    assert f"on FA-2 varlen takes {fa2[0]:.1f} and {fa2[1]:.1f};" in README
    assert f"takes {fa4[0]:.1f} and {fa4[1]:.1f} for the eight documents" in README
    assert nsa[0] > fa4[0]
    assert nsa[1] < fa4[1]


def test_decoding() -> None:
    steps = [
        row
        for row in json.loads((RESULTS / "decode_h200.json").read_text())
        if row["implementation"] == "nsa, mean of 16 steps" and row["mode"] == "graph"
    ]
    at_64k = [row["dense_over_nsa"] for row in steps if row["seq_len"] == 65536]
    low, high = (round(each + 1e-9, 1) for each in (min(at_64k), max(at_64k)))  # halves go up
    assert f"{low} to {high} times as fast as dense at a context of 64k" in README
    assert {row["batch"] for row in steps if row["seq_len"] == 65536} == {1, 8, 64}
    assert max(row["dense_over_nsa"] for row in steps if row["seq_len"] == 2048) < 1
    even = [r["dense_over_nsa"] for r in steps if (r["seq_len"], r["batch"]) == (8192, 1)]
    assert even
    assert all(1 <= each < 1.2 for each in even)


def test_training_of_short_contexts_on_an_h100() -> None:
    """Compiled and as one graph."""
    rate = {
        (row["implementation"], row["batch"]): row["tokens_per_s"]
        for row in read_rows(RESULTS / "models_h100.json")
    }
    many, one = (
        [rate[f"dense{kind}", batch] / rate[f"nsa{kind}", batch] for kind in ("", "-graph")]
        for batch in (16, 1)
    )
    assert many[1] == pytest.approx(1.2, abs=0.05)
    assert one[1] == pytest.approx(1.2, abs=0.05)
    assert "125M model at 2048 tokens trains 1.2 times as fast with dense attention" in README
    assert f"{many[0]:.2f} times as fast compiled and {many[1]:.2f} times as one graph" in BENCH
    assert f"one row {one[0]:.2f} and {one[1]:.2f} times" in BENCH


def test_packed_documents_beside_batch_rows() -> None:
    rows = {
        (row["implementation"], row["heads"], row["seq_len"], row["pass"]): row["median_ms"]
        for row in read_rows(RESULTS / "packed_h200.json")
    }
    ratios = [
        ms / rows[("nsa", *shape)]
        for (name, *shape), ms in rows.items()
        if name == "nsa-packed" and shape[1] >= 4096 and ("nsa", *shape) in rows
    ]
    assert len(ratios) == 18
    assert f"take {min(ratios):.2f} to {max(ratios):.2f} times as long packed" in BENCH
    known, unknown = (
        [
            ms / rows[("nsa", *shape)]
            for (who, *shape), ms in rows.items()
            if who == name and shape[1] == 1024
        ]
        for name in ("nsa-packed-told", "nsa-packed")
    )
    assert len(known) == len(unknown) == 9
    assert f"1k tokens {min(known):.2f} to {max(known):.2f} times with" in BENCH
    assert f"`max_document_length` and {min(unknown):.2f} to {max(unknown):.2f} without" in BENCH
