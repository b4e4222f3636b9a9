"""Measures the backends of each branch on this device and makes of it what dispatch looks up.

The fastest backend of a branch alone need not be the fastest inside the core, which joins some of
them into one operator: where the winners are not what `auto` takes anyway, the core is measured
both ways, and only what is faster there counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nsa_flex.bench.cases.case import DTYPES, Case
from nsa_flex.bench.cases.registry import compiled_without_scores, grid
from nsa_flex.bench.report.rows import Row
from nsa_flex.dispatch import BRANCHES, Facts, choose_backends
from nsa_flex.tuning import Entry, versions

# What is faster by less keeps its place: two runs of one program differ by as much.
WORTH = 0.03

Pair = tuple[int, int]

HEADS: tuple[Pair, ...] = ((64, 4), (32, 8), (16, 16))
LENGTHS = (4096, 16384, 65536)
DIMS: tuple[Pair, ...] = ((128, 128),)


class Shape(NamedTuple):
    """Rows that compete."""

    dtype: str
    train: bool
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    seq_len: int


Orders = dict[Shape, dict[str, tuple[str, ...]]]  # shape -> branch -> backends, fastest first


def branch_cases(
    heads: Sequence[Pair] = HEADS,
    lengths: Sequence[int] = LENGTHS,
    dims: Sequence[Pair] = DIMS,
    dtypes: Sequence[str] = ("bfloat16",),
) -> list[Case]:
    """Every branch on every backend that offers it, but those that keep all scores."""
    found: list[Case] = []
    sides = (tuple(heads), tuple(lengths))
    for dtype in dtypes:
        for branch in BRANCHES:
            offered = compiled_without_scores(branch)
            found += grid(branch, offered, *sides, dims=tuple(dims), dtype=dtype)
    return found


def shape_of(row: Row) -> Shape:
    """What a row's rivals have in common with it."""
    query_heads, kv_heads = (int(number) for number in row["heads"].split("/"))
    train, dims = row["pass"] == "forward_backward", (row["head_dim"], row["value_dim"])
    return Shape(row["dtype"], train, query_heads, kv_heads, *dims, row["seq_len"])


def order_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """Implementations by median time; what was not measured is left out."""
    ordered: list[Row] = []
    for row in rows:
        if row["status"] != "ok":
            continue
        place = len(ordered)
        while place and row["median_ms"] < (1 - WORTH) * ordered[place - 1]["median_ms"]:
            place -= 1
        ordered.insert(place, row)
    return tuple(row["implementation"] for row in ordered)


def orders_of(rows: Sequence[Row]) -> Orders:
    """For every shape and branch that was measured."""
    rivals: dict[tuple[Shape, str], list[Row]] = {}
    for row in rows:
        if row["target"] in BRANCHES and row["pass"] in ("forward", "forward_backward"):
            rivals.setdefault((shape_of(row), row["target"]), []).append(row)
    orders: Orders = {}
    for (shape, branch), each in rivals.items():
        orders.setdefault(shape, {})[branch] = order_of(each)
    return orders


def untuned(shape: Shape) -> dict[str, str]:
    """What `auto` takes for a shape, branch -> backend, as long as nothing tuned is looked up."""

    facts = Facts(
        device_type="cuda",
        dtype=DTYPES[shape.dtype],
        head_dim=shape.head_dim,
        value_head_dim=shape.value_dim,
        num_query_heads=shape.query_heads,
        num_kv_heads=shape.kv_heads,
        num_queries=shape.seq_len,
        whole=True,
        documents=False,
        needs_grad=shape.train,
    )
    choices = choose_backends(facts)
    return {branch: choices[branch].backend for branch in BRANCHES}


def changes(orders: Orders) -> dict[Shape, dict[str, str]]:
    """Shapes whose fastest branches are not what `auto` takes: branch -> backend."""
    found = {}
    for shape, by_branch in orders.items():
        before = untuned(shape)
        fastest = {branch: order[0] for branch, order in by_branch.items() if order}
        if any(before[branch] != backend for branch, backend in fastest.items()):
            found[shape] = {**before, **fastest}
    return found


def core_cases(orders: Orders) -> list[Case]:
    """The core as `auto` takes it and with the fastest branches, where these differ."""
    found = []
    for shape, backends in changes(orders).items():
        named = ",".join(f"{branch}={backend}" for branch, backend in backends.items())
        fields = shape._asdict()
        as_it_is = Case("core", "nsa", fields.pop("train"), **fields)
        found += [as_it_is, replace(as_it_is, implementation=f"nsa:{named}")]
    return found


def confirmed(orders: Orders, core_rows: Sequence[Row]) -> Orders:
    """The orders, but what `auto` takes comes first where the core is not faster without."""
    times: dict[Shape, dict[bool, float]] = {}
    for row in core_rows:
        if row["status"] == "ok" and row["pass"] in ("forward", "forward_backward"):
            changed = row["implementation"] != "nsa"
            times.setdefault(shape_of(row), {})[changed] = row["median_ms"]
    kept = {}
    for shape, by_branch in orders.items():
        each = times.get(shape, {})
        faster = len(each) == 2 and each[True] < (1 - WORTH) * each[False]
        kept[shape] = by_branch if faster else _with_first(by_branch, untuned(shape))
    return kept


def _with_first(
    by_branch: dict[str, tuple[str, ...]], first: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    return {
        branch: (first[branch], *(name for name in order if name != first[branch]))
        for branch, order in by_branch.items()
    }


def entries_of(orders: Orders) -> list[Entry]:
    """One entry for each kind of shape, with the lengths in bands.

    A length that was not measured belongs to the next longer one that was; beyond the longest,
    to that. Neighbouring lengths with the same order are one band.
    """
    kinds: dict[Entry, dict[int, tuple[str, ...]]] = {}
    for shape, by_branch in orders.items():
        group_size = shape.query_heads // shape.kv_heads
        for branch, order in by_branch.items():
            dims = (shape.head_dim, shape.value_dim)
            kind = Entry(branch, shape.dtype, shape.train, group_size, *dims, bands=())
            kinds.setdefault(kind, {})[shape.seq_len] = order
    return [
        kind._replace(bands=bands)
        for kind, by_length in kinds.items()
        if (bands := _bands(by_length))
    ]


def _bands(orders: dict[int, tuple[str, ...]]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    bands: list[tuple[int, tuple[str, ...]]] = []
    for length, order in sorted(orders.items()):
        if not order:
            continue
        if bands and bands[-1][1] == order:
            bands.pop()
        bands.append((length, order))
    if bands:
        bands[-1] = (0, bands[-1][1])
    return tuple(bands)


def write_tuned(path: Path, entries: Sequence[Entry], shared: Row) -> None:
    """The file that `nsa_flex.tuning` reads."""
    content = {**shared, **versions(), "entries": [entry._asdict() for entry in entries]}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)
