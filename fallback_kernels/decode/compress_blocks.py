"""φ of the kinds linear and mlp, for the blocks that a step's tokens complete.

Both multiply each of a block's l tokens by weights of its own, l·D·D of them, most of the bytes.
They are read only if some row completes a block; that the kernels see from the lengths. The first
kernel multiplies, split over the tokens of a block; the second adds the splits up and writes the
compressed rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import precision_of, width_of
from nsa_flex.fallback_kernels.decode.tiles import (
    completes_any,
    pdl_launch_dependents,
    pdl_wait,
)


@triton.jit
def find_completed(
    lengths_ptr, row, num_rows, rows_per_batch, num_new, capacity, num_compressed,
    COUNT: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Batch row, block and length before the step of `row` [BLOCK_M], and which rows count.

    A row stands for the `row % COUNT`-th block after those that were complete before; it counts if
    the new tokens complete that block.
    """
    batch = row // rows_per_batch
    length = tl.load(lengths_ptr + batch, mask=row < num_rows, other=0)
    complete = tl.where(length >= COMPRESS, (length - COMPRESS) // STRIDE + 1, 0)
    block = complete + row % COUNT
    stored = tl.minimum(length + num_new, capacity)
    mask = (row < num_rows) & (block * STRIDE + COMPRESS <= stored) & (block < num_compressed)
    return batch.to(tl.int64), block, length, mask


@triton.jit
def load_tokens_of_rows(
    cache_ptr, new_ptr, token, first_new, mask, cache_stride_s, new_stride_s, column,
    DIM: tl.constexpr,
):  # fmt: skip
    """Columns `column` [BLOCK] of one token a row, `token` [BLOCK_M]: [BLOCK_M, BLOCK].

    Tokens from `first_new` on are read where the caller has them: they are stored later. They are
    rounded to the cache's dtype all the same.
    """
    is_new = (token >= first_new)[:, None]
    mask = mask[:, None] & (column < DIM)[None, :]
    old_ptr = cache_ptr + token.to(tl.int64) * cache_stride_s  # [BLOCK_M]
    old = tl.load(old_ptr[:, None] + column[None, :], mask=mask & (token < first_new)[:, None],
                  other=0.0)  # fmt: skip  # [BLOCK_M, BLOCK]
    new_ptr += (token - first_new) * new_stride_s  # [BLOCK_M]
    new = tl.load(new_ptr[:, None] + column[None, :], mask=mask & is_new, other=0.0)
    return tl.where(is_new, new.to(old.dtype), old)


@triton.jit
def multiply_tokens(
    cache_ptr, new_ptr, weight_ptr, position_ptr, block, first_new, mask, first, last,
    cache_stride_s, new_stride_s, column,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EMBEDDED: tl.constexpr, SUBTRACT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over the tokens first ... last - 1 of a block, each times its (D, D) weight:
    [BLOCK_M, BLOCK_N] in float32. EMBEDDED adds a position embedding to each token; SUBTRACT takes
    the weight of the other half off, before it is rounded.
    """
    dim = tl.arange(0, BLOCK_D)
    weight_mask = (dim < DIM)[:, None] & (column < DIM)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for token in tl.range(first, last, num_stages=STAGES):
        x = load_tokens_of_rows(
            cache_ptr, new_ptr, block * STRIDE + token, first_new, mask, cache_stride_s,
            new_stride_s, dim, DIM,
        )  # fmt: skip  # [BLOCK_M, BLOCK_D]
        pointers = weight_ptr + token * (DIM * DIM) + dim[:, None] * DIM + column[None, :]
        w = tl.load(pointers, mask=weight_mask, other=0.0)  # [BLOCK_D, BLOCK_N]
        if SUBTRACT:
            other = tl.load(pointers + COMPRESS * DIM * DIM, mask=weight_mask, other=0.0)
            w = w.to(tl.float32) - other.to(tl.float32)  # [BLOCK_D, BLOCK_N]
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if EMBEDDED:
            position = tl.load(position_ptr + token * DIM + dim, mask=dim < DIM, other=0.0)
            acc += tl.sum(position.to(tl.float32)[:, None] * w.to(tl.float32), 0)[None, :]
    return acc


@triton.jit
def add_tokens(
    cache_ptr, new_ptr, position_ptr, block, first_new, mask, first, last, cache_stride_s,
    new_stride_s, column,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum of those tokens and of their position embeddings: [BLOCK_M, BLOCK_N] in float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for token in range(first, last):
        x = load_tokens_of_rows(
            cache_ptr, new_ptr, block * STRIDE + token, first_new, mask, cache_stride_s,
            new_stride_s, column, DIM,
        )  # fmt: skip  # [BLOCK_M, BLOCK_N]
        position = tl.load(position_ptr + token * DIM + column, mask=column < DIM, other=0.0)
        acc += x.to(tl.float32) + position.to(tl.float32)[None, :]
    return acc


@triton.jit
def project_blocks(
    cache_ptr, new_ptr, weight_ptr, position_ptr, partial_ptr, lengths_ptr,
    cache_stride_b, cache_stride_h, cache_stride_s, new_stride_b, new_stride_h, new_stride_s,
    num_new, capacity, num_compressed, batch_size, kv_heads, tokens_per_split, tiles,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MLP: tl.constexpr,
    READ_NEW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`decode_project_kernel` for keys or for values."""
    COLUMN_TILES: tl.constexpr = (DIM + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = 3 if MLP else 1
    split, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    # mlp: one half of the weights, what it has over the other, then the tokens; linear: the head.
    part = tile // COLUMN_TILES
    column = tile % COLUMN_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_per_batch = kv_heads * COUNT if MLP else COUNT
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, block, length, mask = find_completed(
        lengths_ptr, row, batch_size * rows_per_batch, rows_per_batch, num_new, capacity,
        num_compressed, COUNT, COMPRESS, STRIDE,
    )  # fmt: skip
    is_needed = part < (PARTS if MLP else kv_heads)  # the other tensor may have more columns
    if (tl.max(mask.to(tl.int32), 0) > 0) & is_needed:
        head = (row // COUNT % kv_heads if MLP else row * 0 + part).to(tl.int64)
        first_new = length if READ_NEW else length * 0 + capacity
        old_rows = cache_ptr + batch * cache_stride_b + head * cache_stride_h  # [BLOCK_M]
        new_rows = new_ptr + batch * new_stride_b + head * new_stride_h  # [BLOCK_M]
        first = split * tokens_per_split
        last = tl.minimum(first + tokens_per_split, COMPRESS)
        if MLP:
            if part == 2:
                acc = add_tokens(
                    old_rows, new_rows, position_ptr, block, first_new, mask, first, last,
                    cache_stride_s, new_stride_s, column, DIM, STRIDE, BLOCK_M, BLOCK_N,
                )  # fmt: skip  # [BLOCK_M, BLOCK_N]
            elif part == 1:
                acc = multiply_tokens(
                    old_rows, new_rows, weight_ptr, position_ptr, block, first_new, mask, first,
                    last, cache_stride_s, new_stride_s, column, DIM, BLOCK_D, COMPRESS, STRIDE,
                    BLOCK_M, BLOCK_N, True, True, PRECISION, STAGES,
                )  # fmt: skip  # [BLOCK_M, BLOCK_N]
            else:
                acc = multiply_tokens(
                    old_rows, new_rows, weight_ptr, position_ptr, block, first_new, mask, first,
                    last, cache_stride_s, new_stride_s, column, DIM, BLOCK_D, COMPRESS, STRIDE,
                    BLOCK_M, BLOCK_N, True, False, PRECISION, STAGES,
                )  # fmt: skip  # [BLOCK_M, BLOCK_N]
        else:
            weights = weight_ptr + part.to(tl.int64) * (COMPRESS * DIM * DIM)
            acc = multiply_tokens(
                old_rows, new_rows, weights, position_ptr, block, first_new, mask, first, last,
                cache_stride_s, new_stride_s, column, DIM, BLOCK_D, COMPRESS, STRIDE, BLOCK_M,
                BLOCK_N, False, False, PRECISION, STAGES,
            )  # fmt: skip  # [BLOCK_M, BLOCK_N]
        slot = (batch * kv_heads + head) * COUNT + row % COUNT
        slot += split.to(tl.int64) * (batch_size * kv_heads * COUNT)
        slot = slot * PARTS + (part if MLP else 0)
        tl.store(
            partial_ptr + (slot * DIM)[:, None] + column[None, :],
            acc,
            mask=mask[:, None] & (column < DIM)[None, :],
        )


@recordable
@triton.jit(do_not_specialize=["num_new", "batch_size", "kv_heads", "tokens_per_split", "tiles"])
def decode_project_kernel(
    key_ptr, value_ptr, new_key_ptr, new_value_ptr, key_weight_ptr, value_weight_ptr,
    key_position_ptr, value_position_ptr, partial_key_ptr, partial_value_ptr, lengths_ptr,
    key_strides, value_strides, new_key_strides, new_value_strides,
    num_new, capacity, num_compressed, batch_size, kv_heads, tokens_per_split, tiles,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MLP: tl.constexpr,
    READ_NEW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, PADDED_BATCH: tl.constexpr,
):  # fmt: skip
    """CTA (split of a block's tokens and tile of columns, rows, key or value): its product.

    mlp: weights (2, l, D, D) for all heads, so that a row is a (batch row, head, block); partial
    outputs (splits, B, Hkv, COUNT, 3, D): the product with the first half, what it has over that
    with the second, and the sum of the tokens with their position embeddings. linear: weights
    (Hkv, l, D, D), so that a row is a (batch row, block) and each head has tiles of its own;
    (splits, B, Hkv, COUNT, 1, D).
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    # In this order: no kernel of the step finds work from before it unfinished.
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    if PADDED_BATCH:  # noqa: SIM102  # known to the compiler, what follows is not
        if not completes_any(
            lengths_ptr, batch_size, num_new, capacity, num_compressed, COMPRESS, STRIDE,
            PADDED_BATCH,
        ):  # fmt: skip
            return
    if tl.program_id(2) == 0:
        project_blocks(
            key_ptr, new_key_ptr, key_weight_ptr, key_position_ptr, partial_key_ptr, lengths_ptr,
            *key_strides,
            *new_key_strides,
            num_new, capacity, num_compressed, batch_size, kv_heads, tokens_per_split, tiles,
            HEAD_DIM, BLOCK_D, COMPRESS, STRIDE, COUNT, BLOCK_M, BLOCK_N, MLP, READ_NEW,
            PRECISION, STAGES,
        )  # fmt: skip
    else:
        project_blocks(
            value_ptr, new_value_ptr, value_weight_ptr, value_position_ptr, partial_value_ptr,
            lengths_ptr, *value_strides,
            *new_value_strides,
            num_new, capacity, num_compressed, batch_size, kv_heads, tokens_per_split, tiles,
            VALUE_DIM, BLOCK_DV, COMPRESS, STRIDE, COUNT, BLOCK_M, BLOCK_N, MLP, READ_NEW,
            PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def add_splits(
    partial_ptr, slot, stride, mask, column,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sum over splits of rows `slot` [BLOCK_M], columns `column` [BLOCK]: [BLOCK_M, BLOCK]."""
    mask = mask[:, None] & (column < DIM)[None, :]
    pointers = partial_ptr + (slot * DIM)[:, None] + column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for split in tl.range(0, SPLITS, loop_unroll_factor=4):  # so many loads in flight
        total += tl.load(pointers + split * stride * DIM, mask=mask, other=0.0)
    return total


@triton.jit
def gelu(x):
    """x Φ(x), with the normal distribution's Φ as it is."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def write_blocks(
    partial_ptr, output_weight_ptr, compressed_ptr, lengths_ptr,
    compressed_stride_b, compressed_stride_h, compressed_stride_s,
    num_new, capacity, num_compressed, batch_size, kv_heads,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    MLP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`decode_write_blocks_kernel` for keys or for values."""
    PARTS: tl.constexpr = 3 if MLP else 1
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    num_rows = batch_size * kv_heads * COUNT
    batch, block, _, mask = find_completed(
        lengths_ptr, row, num_rows, kv_heads * COUNT, num_new, capacity, num_compressed,
        COUNT, COMPRESS, STRIDE,
    )  # fmt: skip
    if (tl.max(mask.to(tl.int32), 0) > 0) & (tl.program_id(0) * BLOCK_N < DIM):
        slot = row.to(tl.int64) * PARTS
        stride = num_rows.to(tl.int64) * PARTS
        if MLP:
            dim = tl.arange(0, BLOCK_D)
            pointers = output_weight_ptr + dim[:, None] * DIM + column[None, :]
            weight_mask = (dim < DIM)[:, None] & (column < DIM)[None, :]
            w = tl.load(pointers, mask=weight_mask, other=0.0)  # [BLOCK_D, BLOCK_N]
            other = tl.load(pointers + DIM * DIM, mask=weight_mask, other=0.0)
            pdl_wait(PDL)  # the weights are read meanwhile
            hidden = add_splits(
                partial_ptr, slot, stride, mask, dim, DIM, BLOCK_M, BLOCK_D, SPLITS
            )  # [BLOCK_M, BLOCK_D]
            change = add_splits(
                partial_ptr, slot + 1, stride, mask, dim, DIM, BLOCK_M, BLOCK_D, SPLITS
            )  # [BLOCK_M, BLOCK_D]
            first, second = gelu(hidden), gelu(hidden - change)
            total = add_splits(
                partial_ptr, slot + 2, stride, mask, column, DIM, BLOCK_M, BLOCK_N, SPLITS
            )  # [BLOCK_M, BLOCK_N]
            total = total / COMPRESS
            dtype = compressed_ptr.dtype.element_ty
            # gelu(h1) C1 - gelu(h2) C2 in differences: exactly 0 while the halves are equal.
            total = tl.dot((first - second).to(dtype), w.to(dtype), total,
                           input_precision=PRECISION)  # fmt: skip
            w = (w.to(tl.float32) - other.to(tl.float32)).to(dtype)
            total = tl.dot(second.to(dtype), w, total, input_precision=PRECISION)
        else:
            pdl_wait(PDL)
            total = add_splits(
                partial_ptr, slot, stride, mask, column, DIM, BLOCK_M, BLOCK_N, SPLITS
            )  # [BLOCK_M, BLOCK_N]
        head = (row // COUNT % kv_heads).to(tl.int64)
        rows = compressed_ptr + batch * compressed_stride_b + head * compressed_stride_h
        rows += block.to(tl.int64) * compressed_stride_s  # [BLOCK_M]
        tl.store(
            rows[:, None] + column[None, :],
            total.to(compressed_ptr.dtype.element_ty),
            mask=mask[:, None] & (column < DIM)[None, :],
        )


@recordable
@triton.jit(do_not_specialize=["num_new", "batch_size", "kv_heads"])
def decode_write_blocks_kernel(
    partial_key_ptr, partial_value_ptr, key_weight_ptr, value_weight_ptr,
    compressed_key_ptr, compressed_value_ptr, lengths_ptr,
    compressed_key_strides, compressed_value_strides,
    num_new, capacity, num_compressed, batch_size, kv_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    MLP: tl.constexpr, PDL: tl.constexpr, PADDED_BATCH: tl.constexpr,
):  # fmt: skip
    """CTA (tile of columns, rows, key or value): compressed rows from the partial outputs.

    mlp: mean + (gelu(h1) - gelu(h2)) C1 + gelu(h2) (C1 - C2), with output weights (2, D, D).
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(compressed_key_ptr.dtype.element_ty)
    pdl_launch_dependents(PDL)
    if PADDED_BATCH:  # noqa: SIM102  # known to the compiler, what follows is not
        if not completes_any(
            lengths_ptr, batch_size, num_new, capacity, num_compressed, COMPRESS, STRIDE,
            PADDED_BATCH,
        ):  # fmt: skip
            return
    if tl.program_id(2) == 0:
        write_blocks(
            partial_key_ptr, key_weight_ptr, compressed_key_ptr, lengths_ptr,
            *compressed_key_strides,
            num_new, capacity, num_compressed, batch_size, kv_heads,
            HEAD_DIM, BLOCK_D, COMPRESS, STRIDE, COUNT, BLOCK_M, BLOCK_N, SPLITS, MLP,
            PRECISION, PDL,
        )  # fmt: skip
    else:
        write_blocks(
            partial_value_ptr, value_weight_ptr, compressed_value_ptr, lengths_ptr,
            *compressed_value_strides,
            num_new, capacity, num_compressed, batch_size, kv_heads,
            VALUE_DIM, BLOCK_DV, COMPRESS, STRIDE, COUNT, BLOCK_M, BLOCK_N, SPLITS, MLP,
            PRECISION, PDL,
        )  # fmt: skip
