"""Columns of rows as the text of a table's cells."""

from __future__ import annotations

import pandas as pd

from nsa_flex.bench.report.rows import Row

EMPTY = "-"


def frame(rows: list[Row]) -> pd.DataFrame:
    """Rows with every column that a table reads; what a row lacks is NaN."""
    table = pd.DataFrame(rows).reindex(columns=_columns(rows))
    for name in (
        "median_ms",
        "p20_ms",
        "p80_ms",
        "wall_ms",
        "host_ms",
        "peak_bytes",
        "over_floor",
    ):
        table[name] = pd.to_numeric(table[name])
    table["D"] = [_dims(*pair) for pair in zip(table.head_dim, table.value_dim, strict=True)]
    table["tokens"] = table.seq_len.map(tokens)
    table["commit"] = table.commit.astype(object).fillna(EMPTY)
    return table


def _columns(rows: list[Row]) -> list[str]:
    read = "case pass status reason target implementation heads head_dim value_dim seq_len batch"
    read += " pattern compression overlap median_ms p20_ms p80_ms wall_ms host_ms peak_bytes"
    read += (
        " over_floor floor_ms tokens_per_s parameters model run matrix_tflops commit device torch"
    )
    return list(dict.fromkeys([*read.split(), *(name for row in rows for name in row)]))


def markdown(table: pd.DataFrame) -> str:
    """A table of strings, its columns as heads; nothing if it has no lines."""
    if table.empty:
        return ""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def milliseconds(part: pd.DataFrame) -> pd.Series:
    """Median with half the spread of the 20th to 80th percentile, "12.3 ± 0.1"; or the status."""
    return part.apply(_milliseconds, axis=1).astype(object) if len(part) else _nothing(part)


def _milliseconds(row: pd.Series) -> str:
    if row.status != "ok":
        return row.status if isinstance(row.status, str) else EMPTY
    if pd.isna(row.p20_ms):
        return f"{row.median_ms:.4g}"
    digits = 3 if row.median_ms < 1 else 2 if row.median_ms < 100 else 0
    spread = (row.p80_ms - row.p20_ms) / 2
    return f"{row.median_ms:.{digits}f} ± {spread:.{digits}f}"


def medians(part: pd.DataFrame) -> pd.Series:
    """`milliseconds` without the spread."""
    return milliseconds(part).str.partition(" ")[0] if len(part) else _nothing(part)


def number(values: pd.Series, digits: int = 2, unit: float = 1.0) -> pd.Series:
    """Numbers to so many digits behind the point."""
    return values.map(lambda x: EMPTY if pd.isna(x) else f"{x / unit:.{digits}f}").astype(object)


def waits(part: pd.DataFrame) -> pd.Series:
    """What a caller waits for, host included, in ms."""
    return part.wall_ms.map(_wait).astype(object)


def _wait(wall_ms: float) -> str:
    if pd.isna(wall_ms):
        return EMPTY
    return f"{wall_ms:.0f}" if wall_ms >= 100 else f"{wall_ms:.3g}"


def gib(part: pd.DataFrame) -> pd.Series:
    """Peak memory."""
    return number(part.peak_bytes, 1, 2**30)


def speeds(part: pd.DataFrame) -> pd.Series:
    """Tokens a second of training, or the status."""
    if not len(part):
        return _nothing(part)
    return part.apply(
        lambda row: f"{row.tokens_per_s:,.0f}" if row.status == "ok" else _milliseconds(row),
        axis=1,
    ).astype(object)


def _nothing(part: pd.DataFrame) -> pd.Series:
    return pd.Series(index=part.index, dtype=object)


def tokens(length: int) -> str:
    """8192 as 8k."""
    return f"{length // 1024:.0f}k" if length % 1024 == 0 else f"{length:.0f}"


def _dims(wide: float, out: float) -> str:
    """D, or D/Dv where they differ."""
    if pd.isna(wide):
        return EMPTY
    return f"{wide:.0f}" if wide == out else f"{wide:.0f}/{out:.0f}"


def part_names(table: pd.DataFrame) -> pd.Series:
    """The target, of φ with its kind."""
    kinds = ", " + table.compression.astype(str)
    return table.target.where(table.target != "compression", table.target + kinds)
