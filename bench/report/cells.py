"""One row of a benchmark, or two, as a cell of a table."""

from __future__ import annotations

from nsa_flex.bench.report.rows import Row


def milliseconds(row: Row | None) -> str:
    """Median with half the spread of the 20th to 80th percentile: "12.3 ± 0.1"."""
    if row is None:
        return "-"
    if row["status"] != "ok":
        return row["status"]
    if "p20_ms" not in row:
        return f"{row['median_ms']:.4g}"
    spread = (row["p80_ms"] - row["p20_ms"]) / 2
    digits = 3 if row["median_ms"] < 1 else 2 if row["median_ms"] < 100 else 0
    return f"{row['median_ms']:.{digits}f} ± {spread:.{digits}f}"


def gib(row: Row | None) -> str:
    """Peak memory."""
    if row is None or row.get("peak_bytes") is None:
        return "-"
    return f"{row['peak_bytes'] / 2**30:.1f}"


def over_floor(row: Row | None) -> str:
    """Median over the roofline floor."""
    if row is None or "over_floor" not in row:
        return "-"
    return f"{row['over_floor']:.1f}"


def ratio(above: Row | None, below: Row | None) -> str:
    """Of medians."""
    if above is None or below is None or {above["status"], below["status"]} != {"ok"}:
        return "-"
    return f"{above['median_ms'] / below['median_ms']:.2f}"


def tokens(row: Row) -> str:
    """8192 as 8k."""
    length = row["seq_len"]
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def speed(row: Row | None) -> str:
    """Tokens a second of training."""
    if row is None:
        return "-"
    return f"{row['tokens_per_s']:,}" if row["status"] == "ok" else row["status"]


def seconds(row: Row | None) -> str:
    """Of a compilation."""
    if row is None or row["status"] != "ok":
        return "-" if row is None else row["status"]
    return f"{row['median_ms'] / 1e3:.1f}"


def dims(row: Row) -> str:
    """D, or D/Dv where they differ."""
    wide, out = row["head_dim"], row["value_dim"]
    return str(wide) if wide == out else f"{wide}/{out}"


def part_of(row: Row) -> str:
    """The target, of φ with its kind."""
    kind = f", {row['compression']}" if row["target"] == "compression" else ""
    return row["target"] + kind
