"""Tables of rows of `bench.cases.generate` and `bench.cases.serving`."""

from __future__ import annotations

import pandas as pd

from nsa_flex.bench.report.cells import EMPTY, tokens
from nsa_flex.bench.report.rows import Row

_TOKEN, _PREFILL = {"ms_per_token": "ms a token"}, {"prefill_ms": "prefill, ms"}
_SAME = ("target", "cache", "batch", "seq_len", "quantized", "requests")


def generating(rows: list[Row]) -> pd.DataFrame:
    """One line a cache and shape of `generate`, weights not quantized.

    Where dense attention is faster on one implementation a token and on another in the prefill,
    each has its column; "dense on" names both, the token's first. The fastest round has columns
    where a row has several.
    """
    in_rounds = any(len(row.get("round_ms", [])) > 1 for row in rows)
    least = {"least_round_ms": "fastest round"} if in_rounds else {}
    return pd.DataFrame(
        {
            "cache": ours["cache"],
            **_times(ours, dense, {**_TOKEN, **least, **_PREFILL}),
            "dense on": _attentions(dense, "ms_per_token", "prefill_ms"),
            "commit": ours["commit"],
        }
        for ours, dense in _pairs([row for row in rows if not row.get("quantized")])
    )


def quantizing(rows: list[Row]) -> pd.DataFrame:
    """One line a kind of weights and call of `generate`, whole ones first."""
    return pd.DataFrame(
        {
            "weights": ours["quantized"] or ours["dtype"],
            **_times(ours, dense, {**_TOKEN, **_PREFILL}),
            "commit": ours["commit"],
        }
        for ours, dense in _pairs(rows)
    )


def _times(ours: Row, dense: list[Row], columns: dict[str, str]) -> dict[str, str]:
    """Cells of a call of `generate`, and of each column of times by its title."""
    cells = {"batch": str(ours["batch"]), "prompt": tokens(ours["seq_len"])}
    for column, title in columns.items():
        cells |= _against(ours, dense, column, title)
    return cells


def serving(rows: list[Row]) -> pd.DataFrame:
    """One line a load of the engine."""
    return pd.DataFrame(
        {
            "requests": str(ours["requests"]),
            "prompt tokens": _number(ours, "prompt_tokens", 0),
            "new tokens": _number(ours, "new_tokens", 0),
            **_against(ours, dense, "seconds", "seconds"),
            **_at_least(ours, dense),
            "new tokens/s, NSA": _number(ours, "new_tokens_per_s", 0),
            "tokens that are the best": f"{_number(ours, 'tokens_best', 0)} of "
            f"{_number(ours, 'tokens_checked', 0)}",
            "dense on": _attentions(dense, "seconds", "seconds_more_than"),
            "commit": ours["commit"],
        }
        for ours, dense in _pairs([row for row in rows if row["target"] == "serve"])
    )


def slower_run(ours: Row) -> float:
    """Seconds of NSA to hold against dense attention that was not done in its first run."""
    return max(ours["seconds"], ours["first_run_seconds"])


def prefixes(rows: list[Row]) -> pd.DataFrame:
    """One line a shared prefix."""
    return pd.DataFrame(
        {
            "prefix": tokens(row["prefix_tokens"]),
            "own tokens": tokens(row["own_tokens"]),
            "first request, ms": _number(row, "first_ms", 1),
            "later ones": _number(row, "later_ms", 1),
            "own tokens alone": _number(row, "own_ms", 1),
            "later ÷ own": _number(row, "later_over_own", 2),
            "commit": row["commit"],
        }
        for row in rows
        if (row["target"], row["status"], row["implementation"]) == ("serve-prefix", "ok", "nsa")
    )


def _pairs(rows: list[Row]) -> list[tuple[Row, list[Row]]]:
    """Each row of NSA with those of dense attention in the same case that have numbers."""
    dense = [
        row
        for row in rows
        if row["implementation"] == "dense" and row["status"] not in ("failed", "skipped")
    ]
    return [
        (ours, [row for row in dense if all(row.get(name) == ours.get(name) for name in _SAME)])
        for ours in rows
        if ours["implementation"] == "nsa"
    ]


def _best(dense: list[Row], column: str) -> Row:
    """The fastest; {} if there is none."""
    return min((row for row in dense if column in row), key=lambda row: row[column], default={})


def _attentions(dense: list[Row], *columns: str) -> str:
    """What the fastest one ran on, by column, once where it is the same."""
    best = [_best(dense, column) for column in columns]
    return "; ".join(dict.fromkeys(row["attention"] for row in best if row)) or EMPTY


def _against(ours: Row, dense: list[Row], column: str, title: str) -> dict[str, str]:
    """Cells of NSA, of the fastest dense one and of their quotient."""
    best = _best(dense, column)
    cells = {
        f"{title}, NSA": ours["status"] if ours["status"] != "ok" else _number(ours, column, 2),
        f"{title}, dense": _number(best, column, 2),
        f"{title}, dense ÷ NSA": EMPTY,
    }
    if ours["status"] == "ok" and column in ours and column in best:
        cells[f"{title}, dense ÷ NSA"] = f"{best[column] / ours[column]:.2f}"
    return cells


def _at_least(ours: Row, dense: list[Row]) -> dict[str, str]:
    """The same cells of seconds where dense attention was not done, which bounds its time."""
    bound = _best(dense, "seconds_more_than").get("seconds_more_than")
    if bound is None or _best(dense, "seconds"):
        return {}
    cells = {"seconds, dense": f"> {bound:.2f}"}
    if ours["status"] == "ok":
        cells["seconds, dense ÷ NSA"] = f"> {bound / slower_run(ours):.2f}"
    return cells


def _number(row: Row, column: str, digits: int) -> str:
    return f"{row[column]:,.{digits}f}" if column in row else EMPTY
