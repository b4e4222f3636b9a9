"""Branch 3: the last `window_size` tokens, the query itself included."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from nsa_flex.config import NSAConfig
from nsa_flex.masks.block_mask import (
    TILE,
    BlockRanges,
    MaskMod,
    as_table,
    build_block_mask,
    cdiv,
    num_tiles,
    offset_rows,
    table_width,
    tables_from_ranges,
    tile_rows,
    token_table,
)


def sliding_mask_mod(
    config: NSAConfig, *, offset: Tensor | None = None, document_start: Tensor | None = None
) -> MaskMod:
    """Token `kv` is visible to the query at `t` iff `t - w < kv <= t` and in its document.

    Args:
        config: gives `window_size`, in visible keys.
        offset: int (B,), key index of query row 0; 0 when None.
        document_start: int (B, Sq), first key of each query's document; 0 when None.

    >>> from nsa_flex.masks import materialize
    >>> mod = sliding_mask_mod(NSAConfig(window_size=2))
    >>> materialize(mod, 1, 1, 3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    window = config.window_size

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        t = q if offset is None else q + offset[b]
        visible = (kv <= t) & (kv > t - window)
        if document_start is not None:
            visible = visible & (kv >= document_start[b, q])
        return visible

    return mask_mod


def sliding_block_mask(
    config: NSAConfig,
    q_len: int,
    kv_len: int,
    device: torch.device,
    *,
    offset: Tensor | None = None,
    document_start: Tensor | None = None,
    backward: bool = True,
) -> BlockMask:
    """The BlockMask of `sliding_mask_mod`, from shapes alone: O(S / 128 * w / 128) work.

    `backward=False` leaves out the transposed tables. Arguments as in `sliding_mask_mod`.
    """
    w, off = config.window_size, offset_rows(offset)
    whole = document_start is None  # a document's edge may fall inside any block

    first = tile_rows(q_len, device) + off
    last = first + TILE - 1
    rows = BlockRanges(
        low=(first - w + 1).clamp(min=0) // TILE,
        high=torch.clamp(last, max=kv_len - 1) // TILE,
        full_low=cdiv(last - w + 1, TILE) if whole else torch.ones_like(first),
        full_high=(first + 1) // TILE - 1 if whole else torch.zeros_like(first),
    )
    tiles_seen = cdiv(w - 1, TILE) + 2
    num_columns = num_tiles(kv_len)
    kv_tables = tables_from_ranges(rows, num_columns, table_width(tiles_seen, num_columns, device))
    q_tables = None
    if backward:
        key = tile_rows(kv_len, device) - off
        columns = BlockRanges(
            low=key.clamp(min=0) // TILE,
            high=(key + TILE - 1 + w - 1) // TILE,
            full_low=cdiv(key + TILE - 1, TILE) if whole else torch.ones_like(key),
            full_high=(key + w - TILE) // TILE if whole else torch.zeros_like(key),
        )
        num_rows = num_tiles(q_len)
        q_tables = tables_from_ranges(columns, num_rows, table_width(tiles_seen, num_rows, device))
    mask_mod = sliding_mask_mod(
        config, offset=as_table(offset), document_start=token_table(document_start, q_len)
    )
    return build_block_mask(mask_mod, (q_len, kv_len), (TILE, TILE), kv_tables, q_tables)
