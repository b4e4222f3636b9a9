"""Pieces that the selection kernels share: work tiles, K/V blocks, the blocks of a query."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_work_tile(
    work_tiles_ptr,
    work_tile,
    first_head,
    first_csr_row,
    kv_heads,
    num_blocks,
    SKIP_UNIONS: tl.constexpr,
):
    """A work tile's range of entries and its CSR row: batch row, KV head, KV head within the query
    chunk, block.

    SKIP_UNIONS leaves out the entries of query tiles that have a union.
    """
    csr_row = tl.load(work_tiles_ptr + work_tile * 4)
    start = tl.load(work_tiles_ptr + work_tile * 4 + 1)
    stop = tl.load(work_tiles_ptr + work_tile * 4 + 2)
    if SKIP_UNIONS:
        stop = tl.minimum(stop, tl.load(work_tiles_ptr + work_tile * 4 + 3))
    row_in_chunk = csr_row - first_csr_row
    head_in_chunk = row_in_chunk // num_blocks
    batch_head = first_head + head_in_chunk
    return (
        start,
        stop,
        batch_head // kv_heads,
        batch_head % kv_heads,
        head_in_chunk,
        row_in_chunk % num_blocks,
    )


@triton.jit
def row_offset(offsets_ptr, batch_head, query_offset, start, BLOCK_SIZE: tl.constexpr):
    """Position of query 0 of a batch row, and the position `start` of a tile or chunk.

    As they came, unless offsets_ptr has an offset for each (batch row, KV head): then `start`
    came counted from the block of query 0, see `SelectedPlan`.
    """
    if offsets_ptr is not None:
        query_offset = tl.load(offsets_ptr + batch_head)
        start += query_offset // BLOCK_SIZE * BLOCK_SIZE
    return query_offset, start


@triton.jit
def last_key(offsets_ptr, query_offset, num_queries, num_keys):
    """Keys up to the last query's own; what follows may hold anything. `num_keys` if no tensor
    has the offsets: the host left out those that follow.
    """
    if offsets_ptr is not None:
        num_keys = tl.minimum(num_keys, query_offset + num_queries)
    return num_keys


@triton.jit
def row_shift(offsets_ptr, batch_head, chunk_shift, BLOCK_SIZE: tl.constexpr):
    """`chunk_shift` of a batch row: from the chunk's first position to that of query 0."""
    if offsets_ptr is not None:
        chunk_shift += tl.load(offsets_ptr + batch_head) % BLOCK_SIZE
    return chunk_shift


@triton.jit
def first_partial(head_in_chunk, chunk_tokens, chunk_shift, NUM_SLOTS: tl.constexpr):
    """Slot in the partial buffer of entry 0 of a KV head, counted within the query chunk."""
    return (head_in_chunk * chunk_tokens + chunk_shift) * NUM_SLOTS


@triton.jit
def load_block(
    base_ptr,
    stride,
    block,
    num_keys,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """Keys or values of one block [BLOCK_SIZE, BLOCK_D]; 0 past the last key.

    WHOLE: no key of the block is past the last one, so that no mask is needed.
    """
    position = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, BLOCK_D)
    pointer = base_ptr + (position.to(tl.int64) * stride)[:, None] + column[None, :]
    if WHOLE and DIM == BLOCK_D:
        tile = tl.load(pointer)
    else:
        mask = (position < num_keys)[:, None] & (column < DIM)[None, :]
        tile = tl.load(pointer, mask=mask, other=0.0)
    return tile  # [BLOCK_SIZE, BLOCK_D]


@triton.jit
def split_blocks(
    blocks_ptr,
    row,
    row_mask,
    position,
    NUM_SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Blocks of some queries, which of them are top-k blocks, the slots of these, and the bitmask.

    bitmask [BLOCK_TOKENS]: bits 0 to 15 say which local (own block first) and then which initial
    blocks a query selected; bits from 24 on count its top-k blocks. A block in a query's future
    counts as none, so that no kernel reads out of bounds.
    """
    column = tl.arange(0, PADDED_SLOTS)
    offset = row[:, None] * NUM_SLOTS + column[None, :]
    mask = row_mask[:, None] & (column < NUM_SLOTS)[None, :]
    block = tl.load(blocks_ptr + offset, mask=mask, other=-1)  # [BLOCK_TOKENS, PADDED_SLOTS]
    age = (position // BLOCK_SIZE)[:, None] - block
    valid = (block >= 0) & (age >= 0)
    local = valid & (age < LOCAL)
    initial = valid & (age >= LOCAL) & (block < INITIAL)
    is_topk = valid & (age >= LOCAL) & (block >= INITIAL)
    count = is_topk.to(tl.int32)
    slot = tl.cumsum(count, 1) - 1
    bit = tl.where(local, age, tl.where(initial, LOCAL + block, 0))
    bits = tl.where(local | initial, 1 << bit, 0)
    bitmask = tl.sum(bits, 1) | (tl.sum(count, 1) << 24)
    return block, is_topk, slot, bitmask
