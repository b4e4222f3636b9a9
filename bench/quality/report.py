"""Rows of several pieces in one file, their table, and their plot beside it.

    python -m nsa_flex.bench.quality.report piece1.json piece2.json --out quality.json

Runs that are neither finished nor stopped are left out.
"""

from __future__ import annotations

from pathlib import Path

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.report.quality import draw, quality
from nsa_flex.bench.report.rows import merged, read_rows, write_rows
from nsa_flex.bench.report.table import markdown


def main() -> None:
    """Merge, print, draw."""
    parser = parser_of(__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="rows that are there stay")
    given = parser.parse_args()
    rows = read_rows(given.out) if given.out.exists() else []
    for path in given.rows:
        rows = merged(rows, [row for row in read_rows(path) if row["status"] != "running"])
    rows.sort(key=lambda row: row["case"])
    write_rows(given.out, rows)
    print(markdown(quality(rows)))
    draw(rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
