"""Partial results of a decode step become its output: softmax weights and gates in one sum."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.decode.tiles import (
    share_of_split,
    visible_blocks,
    wait_for_the_kernel_before,
)
from nsa_flex.fallback_kernels.decode.topk import slots_used


@triton.jit
def branch_weights(top, total, there):
    """Factor of each part so that their sum is the branch's output, and its base-2 log-sum-exp.

    Factors are 0 where not `there`; without any the log-sum-exp is -inf.
    """
    highest = tl.max(tl.where(there, top, float("-inf")), 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    factor = tl.where(there, tl.exp2(top - highest), 0.0)
    norm = tl.sum(tl.where(there, factor * total, 0.0), 0)
    return factor / tl.where(norm == 0.0, 1.0, norm), highest + tl.log2(norm)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_splits",
        "num_parts",
        "window_parts",
        "forced_parts",
        "forced_per_part",
        "slots_per_part",
        "tiles_per_part",
    ]
)
def combine_kernel(
    partial_ptr, top_ptr, total_ptr, gate_ptr, lengths_ptr, out_ptr, lse_ptr,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c,
    capacity, num_compressed, kv_heads, num_tokens, num_splits, num_parts, window_parts,
    forced_parts, forced_per_part, slots_per_part, tiles_per_part,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, WINDOW: tl.constexpr,
    COMPRESSED_KEYS: tl.constexpr, KEYS: tl.constexpr, PART_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (columns, query head of a group, unit): out (B, T, Hq, Dv), lse (B, Hq, T, 3)."""
    LN2: tl.constexpr = 0.6931471805599453
    member, unit = tl.program_id(1), tl.program_id(2)
    token, pair = unit % num_tokens, unit // num_tokens
    batch, head = (pair // kv_heads).to(tl.int64), pair % kv_heads * GROUP + member
    position = tl.load(lengths_ptr + batch) + token
    gate_ptr += batch * gate_stride_b + head * gate_stride_h + token * gate_stride_s
    compressed_gate = tl.load(gate_ptr).to(tl.float32)
    selected_gate = tl.load(gate_ptr + gate_stride_c).to(tl.float32)
    sliding_gate = tl.load(gate_ptr + 2 * gate_stride_c).to(tl.float32)
    wait_for_the_kernel_before(EARLY)
    stored = position < capacity
    seen = tl.minimum(visible_blocks(position, COMPRESS, STRIDE), num_compressed)
    _, splits = share_of_split(seen, num_splits, COMPRESSED_KEYS)
    FREE: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    forced, free = slots_used(position, SELECT, NUM_SLOTS, FREE, INITIAL)
    tiles = tl.cdiv(tl.minimum(position + 1, WINDOW), KEYS)

    part = tl.arange(0, PART_COLUMNS)
    compressed = stored & (part < splits)
    own = part - num_splits
    sliding = stored & (own >= 0) & (own < tl.cdiv(tiles, tiles_per_part))
    own -= window_parts
    selected = (own >= 0) & (own < tl.cdiv(forced, forced_per_part))
    own -= forced_parts
    selected |= (own >= 0) & (own < tl.cdiv(free, slots_per_part))
    selected &= stored
    there = compressed | selected | sliding
    line = (unit.to(tl.int64) * GROUP + member) * num_parts + part
    top = tl.load(top_ptr + line, mask=there, other=float("-inf"))
    total = tl.load(total_ptr + line, mask=there, other=0.0)
    dim = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(
        partial_ptr + line[:, None] * VALUE_DIM + dim[None, :],
        mask=there[:, None] & (dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    lse_ptr += ((batch * kv_heads * GROUP + head) * num_tokens + token) * 3
    weight, lse = branch_weights(top, total, compressed)
    weights = weight * compressed_gate
    tl.store(lse_ptr, lse * LN2)
    weight, lse = branch_weights(top, total, selected)
    weights += weight * selected_gate
    tl.store(lse_ptr + 1, lse * LN2)
    weight, lse = branch_weights(top, total, sliding)
    weights += weight * sliding_gate
    tl.store(lse_ptr + 2, lse * LN2)
    out = tl.sum(x * weights[:, None], 0)
    place = ((batch * num_tokens + token) * (kv_heads * GROUP) + head) * VALUE_DIM
    tl.store(out_ptr + place + dim, out.to(out_ptr.dtype.element_ty), mask=dim < VALUE_DIM)
