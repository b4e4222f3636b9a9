"""New tokens enter the cache: keys and values into their slots, and the compressed blocks that
they complete. Block i is complete once token i·d + l - 1 is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import width_of


@triton.jit
def completed_block(position, COMPRESS: tl.constexpr, STRIDE: tl.constexpr):
    """The block that the token at `position` completes, or a negative number."""
    past = position - (COMPRESS - 1)
    return tl.where((past >= 0) & (past % STRIDE == 0), past // STRIDE, -1)


@triton.jit
def load_row(pointer, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One row [BLOCK_D], zeros past DIM."""
    dim = tl.arange(0, BLOCK_D)
    return tl.load(pointer + dim, mask=dim < DIM, other=0.0)


@triton.jit
def store_row(pointer, row, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores `row` [BLOCK_D] in the dtype of the memory."""
    dim = tl.arange(0, BLOCK_D)
    tl.store(pointer + dim, row.to(pointer.dtype.element_ty), mask=dim < DIM)


@triton.jit
def load_tokens(
    cache_ptr, new_ptr, first, first_new, cache_stride_s, new_stride_s,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPRESS: tl.constexpr,
    PADDED_COMPRESS: tl.constexpr,
):  # fmt: skip
    """Tokens first ... first + l - 1 in float32 [PADDED_COMPRESS, BLOCK_D], zeros past them.

    Tokens from `first_new` on are read where the caller has them: another CTA may still be
    writing them into the cache. They are rounded to the cache's dtype all the same.
    """
    row, dim = tl.arange(0, PADDED_COMPRESS), tl.arange(0, BLOCK_D)
    token = first + row  # [PADDED_COMPRESS]
    mask = (row < COMPRESS)[:, None] & (dim < DIM)[None, :]  # [PADDED_COMPRESS, BLOCK_D]
    old = tl.load(
        cache_ptr + token.to(tl.int64)[:, None] * cache_stride_s + dim[None, :],
        mask=mask & (token < first_new)[:, None],
        other=0.0,
    )  # [PADDED_COMPRESS, BLOCK_D]
    new = tl.load(
        new_ptr + (token - first_new)[:, None] * new_stride_s + dim[None, :],
        mask=mask & (token >= first_new)[:, None],
        other=0.0,
    )  # [PADDED_COMPRESS, BLOCK_D]
    return old.to(tl.float32) + new.to(cache_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def compress_tokens(
    tokens, weight_ptr, COMPRESS: tl.constexpr, PADDED_COMPRESS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Mean of a block's tokens [PADDED_COMPRESS, BLOCK_D], or their sum weighted by the softmax of
    logits: [BLOCK_D].
    """
    if WEIGHTED:
        row = tl.arange(0, PADDED_COMPRESS)
        logit = tl.load(weight_ptr + row, mask=row < COMPRESS, other=float("-inf"))
        weight = tl.exp(logit.to(tl.float32) - tl.max(logit.to(tl.float32), 0))
        return tl.sum(tokens * (weight / tl.sum(weight, 0))[:, None], 0)
    return tl.sum(tokens, 0) / COMPRESS


@triton.jit
def append_token(
    new_key_ptr, new_value_ptr, key_ptr, value_ptr, key_stride_s, value_stride_s, position,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Copies one key and value into their slot; the cache's pointers are at its first row."""
    slot = position.to(tl.int64)
    k = load_row(new_key_ptr, HEAD_DIM, BLOCK_D)  # [BLOCK_D]
    v = load_row(new_value_ptr, VALUE_DIM, BLOCK_DV)  # [BLOCK_DV]
    store_row(key_ptr + slot * key_stride_s, k, HEAD_DIM, BLOCK_D)
    store_row(value_ptr + slot * value_stride_s, v, VALUE_DIM, BLOCK_DV)


@triton.jit
def store_completed_block(
    new_key_ptr, new_value_ptr, new_key_stride_s, new_value_stride_s,
    key_ptr, value_ptr, key_stride_s, value_stride_s,
    compressed_key_ptr, compressed_value_ptr, compressed_key_stride_s, compressed_value_stride_s,
    key_weight_ptr, value_weight_ptr, position, first_new, num_compressed,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, PADDED_COMPRESS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Writes the compressed key and value that the token at `position` completes, if any."""
    block = completed_block(position, COMPRESS, STRIDE)
    if (block >= 0) & (block < num_compressed):
        first, slot = block * STRIDE, block.to(tl.int64)
        k = load_tokens(
            key_ptr, new_key_ptr, first, first_new, key_stride_s, new_key_stride_s,
            HEAD_DIM, BLOCK_D, COMPRESS, PADDED_COMPRESS,
        )  # fmt: skip  # [PADDED_COMPRESS, BLOCK_D]
        v = load_tokens(
            value_ptr, new_value_ptr, first, first_new, value_stride_s, new_value_stride_s,
            VALUE_DIM, BLOCK_DV, COMPRESS, PADDED_COMPRESS,
        )  # fmt: skip  # [PADDED_COMPRESS, BLOCK_DV]
        k = compress_tokens(k, key_weight_ptr, COMPRESS, PADDED_COMPRESS, WEIGHTED)  # [BLOCK_D]
        v = compress_tokens(v, value_weight_ptr, COMPRESS, PADDED_COMPRESS, WEIGHTED)  # [BLOCK_DV]
        row_ptr = compressed_key_ptr + slot * compressed_key_stride_s
        store_row(row_ptr, k, HEAD_DIM, BLOCK_D)
        row_ptr = compressed_value_ptr + slot * compressed_value_stride_s
        store_row(row_ptr, v, VALUE_DIM, BLOCK_DV)


@recordable
@triton.jit(do_not_specialize=["compressed_heads"])
def decode_append_kernel(
    new_key_ptr, new_value_ptr, key_ptr, value_ptr, compressed_key_ptr, compressed_value_ptr,
    key_weight_ptr, value_weight_ptr, lengths_ptr,
    new_key_strides, new_value_strides, key_strides, value_strides, compressed_key_strides,
    compressed_value_strides,
    capacity, num_compressed, kv_heads, compressed_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    WRITE_COMPRESSED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """CTA (token, KV head of a batch row): stores the token and the block that it completes.

    Heads from `compressed_heads` on, those of other branches, have no compressed blocks; without
    WRITE_COMPRESSED none is written.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PADDED_COMPRESS: tl.constexpr = triton.next_power_of_2(COMPRESS)
    token, batch_head = tl.program_id(0), tl.program_id(1)
    batch, head = (batch_head // kv_heads).to(tl.int64), (batch_head % kv_heads).to(tl.int64)
    length = tl.load(lengths_ptr + batch)
    position = length + token
    if position >= capacity:
        return
    key_ptr += batch * key_strides[0] + head * key_strides[1]
    value_ptr += batch * value_strides[0] + head * value_strides[1]
    new_key_ptr += batch * new_key_strides[0] + head * new_key_strides[1]
    new_value_ptr += batch * new_value_strides[0] + head * new_value_strides[1]
    append_token(
        new_key_ptr + token * new_key_strides[2], new_value_ptr + token * new_value_strides[2],
        key_ptr, value_ptr, key_strides[2], value_strides[2], position,
        HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
    )  # fmt: skip
    if WRITE_COMPRESSED:  # noqa: SIM102  # known to the compiler, what follows is not
        if head < compressed_heads:
            store_completed_block(
                new_key_ptr, new_value_ptr, new_key_strides[2], new_value_strides[2],
                key_ptr, value_ptr, key_strides[2], value_strides[2],
                compressed_key_ptr
                + batch * compressed_key_strides[0] + head * compressed_key_strides[1],
                compressed_value_ptr
                + batch * compressed_value_strides[0] + head * compressed_value_strides[1],
                compressed_key_strides[2], compressed_value_strides[2],
                key_weight_ptr + head * COMPRESS, value_weight_ptr + head * COMPRESS,
                position, length, num_compressed,
                HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
                COMPRESS, STRIDE, PADDED_COMPRESS, WEIGHTED,
            )  # fmt: skip
