"""BlockMasks against the masks they stand for, and mask_mods against the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from nsa_flex import NSAConfig
from nsa_flex.masks import (
    compressed_block_mask,
    compressed_mask_mod,
    folded_block_mask,
    folded_mask_mod,
    materialize,
    selected_block_mask,
    selected_mask_mod,
    sliding_block_mask,
    sliding_mask_mod,
)
from reference import oracle

CPU = torch.device("cpu")
CONFIGS = [
    NSAConfig(),
    NSAConfig(8, 4, 16, 4, window_size=20),
    NSAConfig(window_size=1),
    NSAConfig(window_size=128),
    NSAConfig(window_size=129),
    NSAConfig(64, 32, 128, 5, window_size=4096),
]


def kept(mask: Tensor, tile: tuple[int, int], full: bool) -> Tensor:
    """Tiles of a (B, H, Q, K) mask that hold any true element, or only true ones.

    Queries past the end hide nothing, for nobody asks them; keys past the end are hidden.
    """
    rows, columns = -mask.shape[2] % tile[0], -mask.shape[3] % tile[1]
    padded = torch.nn.functional.pad(mask, (0, columns), value=False)
    padded = torch.nn.functional.pad(padded, (0, 0, 0, rows), value=full)
    tiles = padded.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0]))
    return tiles.all(-1).all(3) if full else tiles.any(-1).any(3)


def listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """The boolean (B, H, rows, columns) that counts and index lists say; each column once."""
    used = torch.arange(indices.shape[-1]) < counts[..., None]
    hits = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.int64)
    where = torch.where(used, indices.long(), columns)
    hits.scatter_add_(-1, where, torch.ones_like(where))
    assert (hits[..., :columns] <= 1).all(), "a column is listed twice"
    return hits[..., :columns].bool()


def check_tables(block_mask: BlockMask, mask: Tensor, *, exact_full: bool = True) -> None:
    """Together the lists hold every tile with something to see; full ones hold nothing hidden.

    Tiles of the full list whose mask is not full would attend what is hidden; tiles missing from
    both would drop what is seen. A listed tile with nothing to see is only waste.
    """
    tile = block_mask.BLOCK_SIZE
    some, whole = kept(mask, tile, False), kept(mask, tile, True)
    for prefix, seen, all_seen in (("kv", some, whole), ("q", some.mT, whole.mT)):
        columns = seen.shape[-1]
        tables = [
            getattr(block_mask, name)
            for name in (
                f"{prefix}_num_blocks",
                f"{prefix}_indices",
                f"full_{prefix}_num_blocks",
                f"full_{prefix}_indices",
            )
        ]
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tables)
        assert tables[1].shape == tables[3].shape
        partial, full = listed(*tables[:2], columns), listed(*tables[2:], columns)
        assert not (partial & full).any(), f"{prefix}: a tile in both lists"
        assert not (full & ~all_seen).any(), f"{prefix}: a full tile hides something"
        assert not (seen & ~(partial | full)).any(), f"{prefix}: a tile is missing"
        if exact_full:
            assert not (all_seen & ~full).any(), f"{prefix}: a whole tile is not in the full list"


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@given(length=st.integers(1, 700), past=st.integers(0, 300))
def test_sliding(config: NSAConfig, length: int, past: int) -> None:
    offset = torch.tensor([past, past // 2]) if past else None
    mod = sliding_mask_mod(config, offset=offset)
    keys = length + past
    mask = materialize(mod, 2 if past else 1, 1, length, keys)
    want = oracle.sliding_mask(length, keys, config, [past, past // 2] if past else 0)
    assert np.array_equal(mask.numpy(), want)
    block_mask = sliding_block_mask(config, length, keys, CPU, offset=offset)
    check_tables(block_mask, mask, exact_full=False)


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@given(length=st.integers(1, 3000), past=st.integers(0, 300))
def test_compressed(config: NSAConfig, length: int, past: int) -> None:
    offset = torch.tensor([past]) if past else None
    num_blocks = max(1, config.num_compressed_blocks(length + past))
    mask = materialize(compressed_mask_mod(config, offset=offset), 1, 1, length, num_blocks)
    want = oracle.compressed_mask(length, length + past, num_blocks, config, past)
    assert np.array_equal(mask.numpy(), want)
    block_mask = compressed_block_mask(config, length, num_blocks, CPU, offset=offset)
    check_tables(block_mask, mask, exact_full=False)


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@given(length=st.integers(1, 900))
def test_the_fold_is_the_staircase(config: NSAConfig, length: int) -> None:
    """Row j of head (r, h) is query j*d + r + l - 1: the folded causal mask, unfolded."""
    heads, stride, reach = 2, config.compress_stride, config.compress_block_size - 1
    num_blocks = max(1, config.num_compressed_blocks(length))
    folded = materialize(folded_mask_mod(config, heads), 1, heads * stride, num_blocks, num_blocks)
    staircase = materialize(compressed_mask_mod(config), 1, 1, length, num_blocks)[0, 0]
    for t in range(length):
        row, residue = divmod(t - reach, stride)
        if row >= 0:
            assert torch.equal(folded[0, residue * heads, row], staircase[t])
        else:
            assert not staircase[t].any()
    check_tables(folded_block_mask(config, num_blocks, heads, CPU), folded[:, :1])


@given(
    length=st.integers(1, 100),
    past=st.integers(0, 60),
    rows=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**31),
)
def test_selected(length: int, past: int, rows: int, seed: int) -> None:
    config, keys = CONFIGS[1], length + past
    scores = np.random.default_rng(seed).uniform(
        size=(2, 2, length, config.num_select_blocks(keys))
    )
    blocks = torch.from_numpy(oracle.choose_all(scores, config, past)).int()
    offset = torch.full((2,), past) if past else None
    mask = materialize(selected_mask_mod(config, blocks, offset=offset), 2, 2, length, keys)
    want = oracle.selected_mask(blocks.numpy(), keys, config, past)
    assert np.array_equal(mask.numpy(), want)
    block_mask = selected_block_mask(config, blocks, keys, rows, offset=offset)
    check_tables(block_mask, mask.repeat_interleave(rows, 2), exact_full=False)


@pytest.mark.parametrize("length", [1, 130, 700])
def test_documents_leave_no_tile_full(length: int) -> None:
    config = CONFIGS[1]
    start = (torch.arange(length) // 48 * 48)[None].int()
    sliding = sliding_block_mask(config, length, length, CPU, document_start=start)
    mask = materialize(sliding_mask_mod(config, document_start=start), 1, 1, length, length)
    check_tables(sliding, mask, exact_full=False)
    num_blocks = max(1, config.num_compressed_blocks(length))
    compressed = compressed_block_mask(config, length, num_blocks, CPU, document_start=start)
    mask = materialize(compressed_mask_mod(config, document_start=start), 1, 1, length, num_blocks)
    check_tables(compressed, mask, exact_full=False)
    for block_mask in (sliding, compressed):
        assert not block_mask.full_kv_num_blocks.any()
        assert not block_mask.full_q_num_blocks.any()


def test_sparsity_is_that_of_the_window() -> None:
    """64k tokens: the tables list the window's tiles, not all causal ones."""
    block_mask = sliding_block_mask(NSAConfig(), 65536, 65536, CPU)
    tiles = block_mask.kv_num_blocks + block_mask.full_kv_num_blocks
    assert int(tiles.max()) == 5  # 512 keys reach into 5 tiles of 128


@pytest.mark.parametrize("op", ["selected_query_tables", "selected_key_tables", "table"])
def test_custom_ops_pass_opcheck(op: str) -> None:
    config = CONFIGS[1]
    scores = np.random.default_rng(0).uniform(size=(1, 2, 40, 3))
    blocks = torch.from_numpy(oracle.choose_all(scores, config)).int()
    own = torch.arange(40)[None] // config.select_block_size
    arguments = (own,) if op == "table" else (blocks, own, 4)
    torch.library.opcheck(getattr(torch.ops.nsa_flex, op).default, arguments)
