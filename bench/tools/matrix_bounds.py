"""What a kernel that `matrix` did not compile asks for at most: its tiles tell.

Kernels have thousands of variants by group, head dim and block size, whose tiles are few. Two of
the same tiles ask for nearly the same shared memory, and those with large tiles for no more than
what they keep there: a formula that holds for every compiled one bounds the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

from nsa_flex.bench.tools.matrix_entries import DEVICES, Entry
from nsa_flex.fallback_kernels.common.tiles import next_power_of_2, tile_width

SPARE_BYTES = 2048  # barriers, statistics of rows, sums over warps
# Numbers of a variant that are sizes of tiles.
SIZES = (
    *("BLOCK_M", "BLOCK_N", "BLOCK_SIZE", "BLOCK_POOL", "LOCAL_BLOCK_M", "COMPRESSED_BLOCK_N"),
    *("STAGES", "PARTIAL_STAGES", "PADDED_BLOCKS", "CHUNK", "DEPTH", "THREADS", "TOKENS"),
)
WIDTHS = ("HEAD_DIM", "VALUE_DIM", "DIM")

Sizes = dict[str, int]
Tile = tuple[str, tuple[tuple[str, int], ...]]  # a kernel and its sizes by name


def tile_of(entry: Entry) -> Tile:
    """The kernel and the sizes of its tiles: rounded up as it rounds them."""
    constants, element_size, warps = _read(entry)
    sizes = {name: constants[name] for name in SIZES if name in constants}
    sizes |= {name: tile_width(constants[name]) for name in WIDTHS if name in constants}
    if {"GROUP", "BLOCK_TOKENS"} <= constants.keys():
        rows = next_power_of_2(constants["GROUP"]) * constants["BLOCK_TOKENS"]
        sizes["rows"] = tile_width(rows)
    sizes |= {"element_size": element_size, "warps": warps}
    return entry.kernel, tuple(sorted(sizes.items()))


def is_within(tile: Tile, other: Tile) -> bool:
    """Whether it is a tile of the same kernel that is larger nowhere."""
    ours, theirs = dict(tile[1]), dict(other[1])
    return (
        tile[0] == other[0]
        and ours.keys() == theirs.keys()
        and all(ours[name] == theirs[name] for name in ("element_size", "warps"))
        and all(size <= theirs[name] for name, size in ours.items())
    )


def unbounded(tiles: Iterable[Tile], compiled: Collection[Tile], sm: int) -> list[Tile]:
    """The largest that nothing bounds: within none that compiled, by a formula over the limit."""
    limit = DEVICES[sm].shared_memory

    def is_bounded(tile: Tile) -> bool:
        most = bound_of(tile, sm)
        fits = most is not None and most <= limit
        return fits or tile in compiled or any(is_within(tile, other) for other in compiled)

    found = sorted(tile for tile in set(tiles) if not is_bounded(tile))
    return [x for x in found if not any(x != other and is_within(x, other) for other in found)]


def bound_of(tile: Tile, sm: int) -> int | None:
    """Bytes of shared memory at most; None of kernels without a formula.

    Tiles that stay, tiles that stream, one a stage, and the weights between queries and keys. On
    sm_100 what is summed for the tiles that stay passes through shared memory to be stored.
    """
    kernel, sizes = tile[0], dict(tile[1])
    elements = next((count(sizes) for names, count in _ELEMENTS.items() if kernel in names), None)
    if elements is None:
        return None
    if sm == 100:
        rows = max(sizes[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_SIZE") if name in sizes)
        elements += rows * (sizes["HEAD_DIM"] + sizes["VALUE_DIM"])
    return elements * sizes["element_size"] + SPARE_BYTES


def _queries_stay(x: Sizes) -> int:
    keys = x["STAGES"] * x["BLOCK_N"] * (x["HEAD_DIM"] + x["VALUE_DIM"])
    return x["BLOCK_M"] * x["HEAD_DIM"] + keys + x["BLOCK_M"] * x["BLOCK_N"]


def _queries_and_gradients_stay(x: Sizes) -> int:
    rows = x["BLOCK_M"] + x["STAGES"] * x["BLOCK_N"]
    return rows * (x["HEAD_DIM"] + x["VALUE_DIM"]) + x["BLOCK_M"] * x["BLOCK_N"]


def _keys_stay(x: Sizes) -> int:
    rows = x["BLOCK_N"] + max(2, x["STAGES"]) * x["BLOCK_M"]
    return rows * (x["HEAD_DIM"] + x["VALUE_DIM"]) + 2 * x["BLOCK_M"] * x["BLOCK_N"]


def _block_stays(x: Sizes) -> int:
    rows = x["BLOCK_SIZE"] + x.get("STAGES", 1) * x["BLOCK_M"]
    return rows * (x["HEAD_DIM"] + x["VALUE_DIM"]) + x["BLOCK_M"] * x["BLOCK_SIZE"]


def _partials_stream(x: Sizes) -> int:
    """Before them a block stays, with one tile of queries."""
    partials = (x["STAGES"] - 1) * x["BLOCK_M"] * max(x["HEAD_DIM"], x["VALUE_DIM"])
    return max(_block_stays({**x, "STAGES": 1}), partials)


def _block_and_partials(x: Sizes) -> int:
    return _block_stays(x) + (x["PARTIAL_STAGES"] - 1) * x["BLOCK_M"] * x["VALUE_DIM"]


_ELEMENTS: dict[tuple[str, ...], Callable[[Sizes], int]] = {
    ("ranges_fwd_kernel", "short_fwd_kernel", "fused_sliding_epilogue_kernel"): _queries_stay,
    ("ranges_bwd_dq_kernel", "short_bwd_dq_kernel", "fused_bwd_dq_kernel"): (
        _queries_and_gradients_stay
    ),
    ("ranges_bwd_dkdv_kernel", "short_bwd_dkdv_kernel", "fused_bwd_dkdv_kernel"): _keys_stay,
    (
        *("selected_bwd_dkdv_kernel", "selected_bwd_dkdv_initial_local_kernel"),
        *("selected_fwd_partial_kernel", "selected_fwd_union_kernel"),
    ): _block_stays,
    ("selected_bwd_dq_kernel", "selected_fwd_combine_kernel"): _partials_stream,
    ("fused_fwd_epilogue_kernel",): _block_and_partials,
}


def _read(entry: Entry) -> tuple[dict[str, int], int, int]:
    """Integer constants by name, bytes of an element of the inputs, and warps."""
    wanted: dict[str, Any] = json.loads(entry.wanted)
    names, signature = list(wanted["signature"]), str(wanted["signature"])
    found = zip(wanted["constant_keys"], wanted["constant_vals"], strict=True)
    constants = {
        names[path[0]]: value for path, value in found if len(path) == 1 and type(value) is int
    }
    is_half = "fp16" in signature or "bf16" in signature
    return constants, 2 if is_half else 4, wanted["options"]["num_warps"]
