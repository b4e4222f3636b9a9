"""Tables of `generate` and of serving: the best dense row beside NSA's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_flex.bench.report.generation import generating, prefixes, quantizing, serving
from nsa_flex.bench.report.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]


def generated(who: str, ms: float, prefill: float, **changes: Any) -> dict[str, Any]:
    attention = "nsa_flex" if who == "nsa" else "sdpa"
    row = {"target": "generate", "implementation": who, "attention": attention, "status": "ok"}
    row |= {"cache": "static", "batch": 1, "seq_len": 8192, "quantized": None}
    row |= {"ms_per_token": ms, "prefill_ms": prefill, "dtype": "bfloat16", "commit": "abc"}
    return {**row, **changes}


def test_the_faster_dense_attention_of_each_column_counts() -> None:
    rows = [
        generated("nsa", 2.0, 10.0),
        generated("dense", 5.0, 10.0),
        generated("dense", 4.0, 30.0, attention="flash_attention_2"),
        generated("dense", 1.0, 1.0, cache="dynamic"),
        generated("dense", 1.0, 1.0, status="failed"),
    ]
    (line,) = generating(rows).to_numpy().tolist()
    assert line[:3] == ["static", "1", "8k"]
    assert line[3:9] == ["2.00", "4.00", "2.00", "10.00", "10.00", "1.00"]
    assert line[9:] == ["flash_attention_2; sdpa", "abc"]
    rows[1]["prefill_ms"] = 40.0
    assert generating(rows).iloc[0].tolist()[7:10] == ["30.00", "3.00", "flash_attention_2"]


def test_the_fastest_round_has_columns_where_there_are_several() -> None:
    rounds = {"round_ms": [2.0, 1.0, 4.0], "least_round_ms": 1.0}
    rows = [generated("nsa", 2.0, 10.0, **rounds), generated("dense", 3.0, 10.0)]
    line = generating([*rows, generated("nsa", 2.0, 9.0, seq_len=4096)]).iloc[0]
    assert line["ms a token, dense ÷ NSA"] == "1.50"
    assert line["fastest round, NSA"] == "1.00"
    assert line["fastest round, dense ÷ NSA"] == "-"  # a row of one call has none
    assert "fastest round, NSA" not in generating([generated("nsa", 2.0, 10.0)])


def test_what_failed_is_told() -> None:
    failed = {"status": "failed", "reason": "out of memory"}
    line = generating([generated("nsa", 2.0, 10.0) | failed]).iloc[0]
    assert line["ms a token, NSA"] == "failed"
    assert line["ms a token, dense ÷ NSA"] == "-"


def test_quantized_rows_have_a_table_of_their_own() -> None:
    rows = [generated("nsa", 2.0, 10.0), generated("nsa", 1.0, 10.0, quantized="int8wo")]
    rows.append(generated("dense", 3.0, 10.0, quantized="int8wo"))
    assert len(generating(rows)) == 1
    found = quantizing(rows)
    assert found["weights"].tolist() == ["bfloat16", "int8wo"]
    assert found[["batch", "prompt"]].values.tolist() == [["1", "8k"]] * 2
    assert found["ms a token, dense ÷ NSA"].tolist() == ["-", "3.00"]
    skipped = {"target": "generate", "status": "skipped", "quantized": "int8dyn", "commit": "abc"}
    skipped |= {"cache": "static", "batch": 1, "seq_len": 8192, "dtype": "bfloat16"}
    rows += [{**skipped, "implementation": who} for who in ("nsa", "dense")]
    assert quantizing(rows)["ms a token, NSA"].tolist() == ["2.00", "1.00", "skipped"]


def test_serving_and_prefixes() -> None:
    common = {"status": "ok", "requests": 16, "commit": "abc"}
    served = {"target": "serve", "prompt_tokens": 170000, "new_tokens": 1024, **common}
    checks = {"tokens_best": 250, "tokens_checked": 256}
    ours = {"implementation": "nsa", "seconds": 2.0, "new_tokens_per_s": 512.0}
    theirs = {"implementation": "dense", "attention": "sdpa", "seconds": 9.0}
    prefix = {"target": "serve-prefix", "implementation": "nsa", "prefix_tokens": 32768}
    prefix |= {"own_tokens": 4096, "first_ms": 100.0, "later_ms": 11.0, "own_ms": 10.0}
    prefix |= {"later_over_own": 1.1}
    rows = [served | checks | ours, served | checks | theirs, prefix | common]
    line = serving(rows).iloc[0]
    assert line["seconds, dense ÷ NSA"] == "4.50"
    assert line["tokens that are the best"] == "250 of 256"
    assert line["prompt tokens"] == "170,000"
    assert prefixes(rows).to_numpy().tolist() == [
        ["32k", "4k", "100.0", "11.0", "10.0", "1.10", "abc"]
    ]


def test_what_the_guide_says_of_ten_thousand_steps() -> None:
    (row,) = read_rows(ROOT / "bench" / "results" / "generate_steps_h200.json")
    assert (row["steps"], row["seq_len"], row["graphs_after"]) == (10000, 512, 1)
    for name in ("allocated", "reserved", "graphs", "cudagraph_skips"):
        assert row[f"{name}_before"] == row[f"{name}_after"]
    page = " ".join((ROOT / "docs" / "guide" / "generate.md").read_text().split())
    assert f"behind 512 tokens, take {row['ms_per_token']:.2f} ms each" in page
