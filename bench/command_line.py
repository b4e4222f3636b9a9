"""What the programs of bench/ have in common on their command lines."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a module's docstring, as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def row_parser(doc: str | None, *heads: str) -> argparse.ArgumentParser:
    """The same of a program that measures shapes: --heads with these defaults, and --out."""
    parser = parser_of(doc)
    parser.add_argument("--heads", nargs="+", default=list(heads), help="Hq/Hkv")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows")
    return parser


def pair_of(heads: str) -> tuple[int, int]:
    """Query heads and KV heads.

    >>> pair_of("32/8")
    (32, 8)
    """
    query_heads, kv_heads = (int(number) for number in heads.split("/"))
    return query_heads, kv_heads
