"""A chunk of new tokens enters a cache in one kernel, with the blocks that it completes.

Where tokens go follows from `lengths`, on the device: one launch plan serves all chunks of a size,
wherever they begin.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.common.tiles import cdiv, tile_width, width_of
from nsa_flex.fallback_kernels.decode import checks
from nsa_flex.fallback_kernels.decode.launch import (
    Cache,
    launch,
    values_of_logits,
    values_of_stored,
)
from nsa_flex.fallback_kernels.launch.direct import directly
from nsa_flex.fallback_kernels.launch.plans import planned

CACHE = ("key", "value", "compressed_key", "compressed_value")
TILE_ELEMENTS = 1024  # a load of 16 bytes a thread in half precision
IN_FLIGHT = tl.constexpr(8)  # such loads, before the first store
WARPS = 4


def unsupported_reason(new_key: Tensor, new_value: Tensor, key: Tensor) -> str | None:
    """Why the kernel does not store such tokens in such a cache; None if it does."""
    reason = triton_unsupported_reason(key.device)
    if reason is not None:
        return reason
    for x in (new_key, new_value):
        if x.dtype not in checks.DTYPES or x.device != key.device:
            wanted = f"{checks.DTYPES} on {key.device}"
            return f"new tokens are {x.dtype} on {x.device}; the kernel stores {wanted}"
    if key.dtype not in checks.DTYPES:
        return f"the cache is {key.dtype}; the kernel stores {checks.DTYPES}"
    dim = max(new_key.shape[3], new_value.shape[3])
    if dim > checks.MAX_HEAD_DIM:
        return f"the head dim is {dim}; the kernel stores at most {checks.MAX_HEAD_DIM}"
    return None if new_key.shape[2] else "there are no new tokens"


@torch.library.custom_op("nsa_flex::store_tokens", mutates_args=CACHE)
@planned
def store_tokens(
    new_key: Tensor,
    new_value: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    logits: list[Tensor],
    compresses: bool,
    counts: list[int],
) -> None:
    """Stores T new tokens a row and, for φ mean or weighted, the blocks that they complete.

    New token i of row b goes into slot lengths[b] + i; block i is complete once token i·d + l - 1
    is stored. Sums are float32.

    Args:
        new_key: (B, H, T, D), new_value: (B, H, T, Dv), any strides and float dtype; rounded to
            the cache's.
        key: (B, H, C, D), value: (B, H, C, Dv), tokens from slot 0 of each row, last dimension
            contiguous. Slots from C on are left out.
        compressed_key: (B, Hkv, Ncap, D), compressed_value: (B, Hkv, Ncap, Dv), of the first of
            H = Hkv or 3 · Hkv heads. Without a compressed branch one row of values takes them all.
        lengths: int32 (B,), tokens of each row before the new ones.
        logits: (Hkv, l) of keys and of values for φ weighted; none for mean.
        compresses: False stores the tokens alone, for any φ.
        counts: those of an `NSAConfig`.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take; nothing is written.
    """
    config = NSAConfig.of_counts(counts)
    _check(new_key, new_value, (key, value, compressed_key, compressed_value), lengths, config)
    for name, x, rows in zip(("key", "value"), logits, (compressed_key, compressed_value),
                             strict=False):  # fmt: skip
        checks.check_phi("weighted", [x], rows, config, name)
    compressed_value = compressed_value.expand(-1, -1, compressed_key.shape[2], -1)
    new_key, new_value = rows_contiguous(new_key), rows_contiguous(new_value)
    batch, heads, num_new, head_dim = new_key.shape
    block, stride = config.compress_block_size, config.compress_stride
    segments = TILE_ELEMENTS // tile_width(max(head_dim, new_value.shape[3]))
    # Those of d tokens that the chunk lies in, and those before it that completed blocks begin in.
    most = (block if compresses else stride) // stride + cdiv(num_new - 1, stride)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    with torch.cuda.device_of(key):
        launch(
            store_tokens_kernel,
            (batch * heads * cdiv(most, segments), 2),
            values_of_stored((new_key, new_value), cache, config),
            num_warps=WARPS,
            **values_of_logits("logit", logits, key),
            rows=batch * heads,
            SEGMENTS=segments,
            WRITE_COMPRESSED=compresses,
        )


@store_tokens.register_fake
def _(new_key: Tensor, new_value: Tensor, *others: Any) -> None:
    return None


store = directly(store_tokens)


def _check(
    new_key: Tensor,
    new_value: Tensor,
    cache: tuple[Tensor, Tensor, Tensor, Tensor],
    lengths: Tensor,
    config: NSAConfig,
) -> None:
    key, value, compressed_key, _ = cache
    num_sets = key.shape[1] // max(1, compressed_key.shape[1])
    checks.check_cache(*cache, lengths, num_sets, config)
    checks.check_new(new_key, new_value, key, value, most=key.shape[2])
    reason = unsupported_reason(new_key, new_value, key)
    if reason is not None:
        raise ValueError(reason)


@triton.jit
def load_tokens_of_segments(
    pointer, token, mask, stride_s, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One token of each segment, `token` [SEGMENTS]: [SEGMENTS, BLOCK_D], 0 where masked."""
    dim = tl.arange(0, BLOCK_D)
    pointers = (pointer + token.to(tl.int64) * stride_s)[:, None] + dim[None, :]
    return tl.load(pointers, mask=mask[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def add_weighted(total, x, logit_ptr, row_max, row_sum, WEIGHTED: tl.constexpr):
    """`total` and, in float32, x times the softmax of the logit at `logit_ptr` if WEIGHTED."""
    x = x.to(tl.float32)
    if WEIGHTED:
        x *= tl.exp(tl.load(logit_ptr).to(tl.float32) - row_max) / row_sum
    return total + x


@triton.jit
def store_segments(
    new_ptr, cache_ptr, compressed_ptr, logit_ptr, tile, length, stop, num_compressed,
    new_stride_s, cache_stride_s, compressed_stride_s, is_compressed,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    PADDED_COMPRESS: tl.constexpr, SEGMENTS: tl.constexpr, IN_FLIGHT: tl.constexpr,
    WRITE_COMPRESSED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """`store_tokens_kernel` for keys or for values of a head; pointers are at its first rows."""
    SPAN: tl.constexpr = COMPRESS if WRITE_COMPRESSED else STRIDE
    # From the first block that was not complete before, or the first segment with a new token.
    first = tl.maximum(length - (SPAN - STRIDE), 0) // STRIDE + tile * SEGMENTS
    if first * STRIDE < stop:
        segment = first + tl.arange(0, SEGMENTS)  # [SEGMENTS]
        completes = (segment * STRIDE + COMPRESS <= stop) & (segment < num_compressed)
        completes = completes & is_compressed  # [SEGMENTS]
        dim = tl.arange(0, BLOCK_D)
        mask_d = (dim < DIM)[None, :]
        total = tl.zeros((SEGMENTS, BLOCK_D), tl.float32)
        row_max, row_sum = 0.0, 1.0
        if WEIGHTED:
            row = tl.arange(0, PADDED_COMPRESS)
            logit = tl.load(logit_ptr + row, mask=row < COMPRESS, other=float("-inf"))
            row_max = tl.max(logit.to(tl.float32), 0)
            row_sum = tl.sum(tl.exp(logit.to(tl.float32) - row_max), 0)
        if WRITE_COMPRESSED:
            # Of the first CTA: tokens that the cache has.
            for start in range(0, tl.minimum(length - first * STRIDE, SPAN), IN_FLIGHT):
                for i in tl.static_range(0, IN_FLIGHT):
                    offset = tl.minimum(start + i, SPAN - 1)
                    token = segment * STRIDE + start + i  # [SEGMENTS]
                    mask = completes & (token < length) & (start + i < SPAN)
                    x = load_tokens_of_segments(
                        cache_ptr, token, mask, cache_stride_s, DIM, BLOCK_D
                    )  # [SEGMENTS, BLOCK_D]
                    total = add_weighted(total, x, logit_ptr + offset, row_max, row_sum, WEIGHTED)
        for start in tl.static_range(0, SPAN, IN_FLIGHT):
            # All of these are loaded before one is stored: a load cannot pass a store.
            tiles = ()
            for i in tl.static_range(0, IN_FLIGHT):
                if start + i < SPAN:
                    token = segment * STRIDE + (start + i)  # [SEGMENTS]
                    mask = completes
                    if start + i < STRIDE:  # the segment's own, which it stores
                        mask = segment >= 0
                    x = load_tokens_of_segments(
                        new_ptr, token - length, mask & (token >= length) & (token < stop),
                        new_stride_s, DIM, BLOCK_D,
                    )  # fmt: skip  # [SEGMENTS, BLOCK_D]
                    tiles += (x.to(cache_ptr.dtype.element_ty),)  # type: ignore[assignment]
            for i in tl.static_range(0, IN_FLIGHT):
                if start + i < STRIDE:
                    token = segment * STRIDE + (start + i)  # [SEGMENTS]
                    pointers = (cache_ptr + token.to(tl.int64) * cache_stride_s)[:, None] + dim
                    mask = (token >= length) & (token < stop)
                    tl.store(pointers, tiles[i], mask=mask[:, None] & mask_d)
            if WRITE_COMPRESSED:
                for i in tl.static_range(0, IN_FLIGHT):
                    if start + i < SPAN:
                        total = add_weighted(
                            total, tiles[i], logit_ptr + (start + i), row_max, row_sum, WEIGHTED
                        )
        if WRITE_COMPRESSED:
            if not WEIGHTED:
                total = total / COMPRESS
            rows = compressed_ptr + segment.to(tl.int64) * compressed_stride_s  # [SEGMENTS]
            total = total.to(compressed_ptr.dtype.element_ty)
            tl.store(rows[:, None] + dim, total, mask=completes[:, None] & mask_d)


@recordable
@triton.jit(
    do_not_specialize=[
        *("num_new", "capacity", "num_compressed", "rows", "kv_heads", "compressed_heads")
    ]
)
def store_tokens_kernel(
    new_key_ptr, new_value_ptr, key_ptr, value_ptr, compressed_key_ptr, compressed_value_ptr,
    key_logit_ptr, value_logit_ptr, lengths_ptr,
    new_key_strides, new_value_strides, key_strides, value_strides, compressed_key_strides,
    compressed_value_strides,
    num_new, capacity, num_compressed, rows, kv_heads, compressed_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    SEGMENTS: tl.constexpr, WRITE_COMPRESSED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """CTA (segments of d tokens of a KV head of a batch row, key or value): stores their new
    tokens, and the blocks that begin with them and that the new tokens complete.

    Heads come first in the grid: those of a token may lie side by side in memory.
    A block's tokens are read again by each of its l/d segments, from the L1 or L2 cache. Tokens
    before `lengths` come from the cache, where no CTA writes them. Heads from `compressed_heads`
    on, those of other branches, have no compressed blocks; without WRITE_COMPRESSED none is
    written.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PADDED_COMPRESS: tl.constexpr = triton.next_power_of_2(COMPRESS)
    tile, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    batch, head = row // kv_heads, row % kv_heads
    length = tl.load(lengths_ptr + batch)
    stop = tl.minimum(length + num_new, capacity)
    is_compressed = head < compressed_heads
    logit = tl.where(is_compressed, head, 0) * COMPRESS
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    if tl.program_id(1) == 0:
        store_segments(
            new_key_ptr + batch * new_key_strides[0] + head * new_key_strides[1],
            key_ptr + batch * key_strides[0] + head * key_strides[1],
            compressed_key_ptr
            + batch * compressed_key_strides[0] + head * compressed_key_strides[1],
            key_logit_ptr + logit, tile, length, stop, num_compressed,
            new_key_strides[2], key_strides[2], compressed_key_strides[2], is_compressed,
            HEAD_DIM, BLOCK_D, COMPRESS, STRIDE, PADDED_COMPRESS, SEGMENTS, IN_FLIGHT,
            WRITE_COMPRESSED, WEIGHTED,
        )  # fmt: skip
    else:
        store_segments(
            new_value_ptr + batch * new_value_strides[0] + head * new_value_strides[1],
            value_ptr + batch * value_strides[0] + head * value_strides[1],
            compressed_value_ptr
            + batch * compressed_value_strides[0] + head * compressed_value_strides[1],
            value_logit_ptr + logit, tile, length, stop, num_compressed,
            new_value_strides[2], value_strides[2], compressed_value_strides[2], is_compressed,
            VALUE_DIM, BLOCK_DV, COMPRESS, STRIDE, PADDED_COMPRESS, SEGMENTS, IN_FLIGHT,
            WRITE_COMPRESSED, WEIGHTED,
        )  # fmt: skip
