"""Split outputs of a decode step become its output: softmax weights and gates in one sum."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.decode.tiles import (
    count_slots,
    count_visible_blocks,
    pdl_wait,
    tiles_of_split,
)


@triton.jit
def branch_weights(row_max, row_sum, mask):
    """Weights [PADDED_SPLITS] that sum a branch's splits to its output, and its base-2 LSE.

    Weights are 0 outside of `mask`; without any split the log-sum-exp is -inf.
    """
    branch_max = tl.max(tl.where(mask, row_max, float("-inf")), 0)
    branch_max = tl.where(branch_max == float("-inf"), 0.0, branch_max)
    alpha = tl.where(mask, tl.exp2(row_max - branch_max), 0.0)  # [PADDED_SPLITS]
    branch_sum = tl.sum(tl.where(mask, alpha * row_sum, 0.0), 0)
    return alpha / tl.where(branch_sum == 0.0, 1.0, branch_sum), branch_max + tl.log2(branch_sum)


@triton.jit
def load_gate(
    gate_ptr, gate_stride, gate_offset_ptr, gate_bias_ptr, PLACE: tl.constexpr,
    FROM_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Gate PLACE in float32; FROM_LOGITS computes it, rounded as it would have come."""
    gate = tl.load(gate_ptr + PLACE * gate_stride)
    if FROM_LOGITS:
        logit = gate.to(tl.float32)
        if HAS_BIAS:
            logit += tl.load(gate_bias_ptr + PLACE).to(tl.float32)
        offset = tl.load(gate_offset_ptr + PLACE).to(tl.float32)
        gate = (tl.sigmoid(logit) + offset).to(gate.dtype)
    return gate.to(tl.float32)


@recordable
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_compressed_splits",
        "num_splits",
        "window_splits",
        "initial_local_splits",
        "initial_local_per_split",
        "topk_per_split",
        "tiles_per_split",
    ]
)
def decode_combine_kernel(
    partial_ptr, row_max_ptr, row_sum_ptr, gate_ptr, gate_offset_ptr, gate_bias_ptr, lengths_ptr,
    out_ptr, lse_ptr,
    gate_strides,
    capacity, num_compressed, kv_heads, num_tokens, num_compressed_splits, num_splits,
    window_splits, initial_local_splits, initial_local_per_split, topk_per_split, tiles_per_split,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, TILED: tl.constexpr, WINDOW: tl.constexpr,
    COMPRESSED_BLOCK_N: tl.constexpr, BLOCK_N: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    FROM_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """CTA (slice of Dv, head in group, unit): out (B, T, Hq, Dv), lse (B, Hq, T, C).

    Without COMPRESSED_BLOCK_N there is no compressed branch, without NUM_SLOTS no selected one,
    without WINDOW no sliding one: C counts those that there are.
    """
    LN2: tl.constexpr = 0.6931471805599453
    NUM_BRANCHES: tl.constexpr = (COMPRESSED_BLOCK_N > 0) + (NUM_SLOTS > 0) + (WINDOW > 0)
    head_in_group, unit = tl.program_id(1), tl.program_id(2)
    token, batch_head = unit % num_tokens, unit // num_tokens
    batch = (batch_head // kv_heads).to(tl.int64)
    head = batch_head % kv_heads * GROUP + head_in_group
    position = tl.load(lengths_ptr + batch) + token
    gate_ptr += batch * gate_strides[0] + head * gate_strides[1] + token * gate_strides[2]
    gate_bias_ptr += head * NUM_BRANCHES
    gates = ()
    for branch in tl.static_range(NUM_BRANCHES):
        gate = load_gate(
            gate_ptr, gate_strides[3], gate_offset_ptr, gate_bias_ptr, branch,
            FROM_LOGITS, HAS_BIAS,
        )  # fmt: skip
        gates = gates + (gate,)  # type: ignore[assignment]  # noqa: RUF005
    pdl_wait(PDL)
    is_stored = position < capacity
    num_used = 0
    if COMPRESSED_BLOCK_N:
        num_visible = tl.minimum(count_visible_blocks(position, COMPRESS, STRIDE), num_compressed)
        _, num_used = tiles_of_split(num_visible, num_compressed_splits, COMPRESSED_BLOCK_N)
    TOPK: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    num_initial_local, num_topk = count_slots(position, SELECT, NUM_SLOTS, TOPK, INITIAL, TILED)
    tiles = tl.cdiv(tl.minimum(position + 1, WINDOW), BLOCK_N)

    # Splits of a unit: compressed, window, initial and local blocks, top-k blocks.
    split = tl.arange(0, PADDED_SPLITS)
    compressed = is_stored & (split < num_used)  # [PADDED_SPLITS], as the next two
    in_kind = split - num_compressed_splits
    sliding = is_stored & (in_kind >= 0) & (in_kind < tl.cdiv(tiles, tiles_per_split))
    in_kind -= window_splits
    selected = (in_kind >= 0) & (in_kind < tl.cdiv(num_initial_local, initial_local_per_split))
    in_kind -= initial_local_splits
    selected |= (in_kind >= 0) & (in_kind < tl.cdiv(num_topk, topk_per_split))
    selected &= is_stored
    mask = compressed | selected | sliding
    masks = ()
    if COMPRESSED_BLOCK_N:
        masks = masks + (compressed,)  # type: ignore[assignment]  # noqa: RUF005
    if NUM_SLOTS:
        masks = masks + (selected,)  # type: ignore[assignment]  # noqa: RUF005
    if WINDOW:
        masks = masks + (sliding,)  # type: ignore[assignment]  # noqa: RUF005
    slot = (unit.to(tl.int64) * GROUP + head_in_group) * num_splits + split
    row_max = tl.load(row_max_ptr + slot, mask=mask, other=float("-inf"))  # [PADDED_SPLITS]
    row_sum = tl.load(row_sum_ptr + slot, mask=mask, other=0.0)  # [PADDED_SPLITS]
    dim = tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    partial = tl.load(
        partial_ptr + slot[:, None] * VALUE_DIM + dim[None, :],
        mask=mask[:, None] & (dim < VALUE_DIM)[None, :],
        other=0.0,
    )  # [PADDED_SPLITS, BLOCK_DV]
    lse_ptr += ((batch * kv_heads * GROUP + head) * num_tokens + token) * NUM_BRANCHES
    weights = 0.0
    for branch in tl.static_range(NUM_BRANCHES):
        weight, lse = branch_weights(row_max, row_sum, masks[branch])
        gated = weight * gates[branch]
        weights = weights + gated if branch else gated  # [PADDED_SPLITS]
        tl.store(lse_ptr + branch, lse * LN2)
    out = tl.sum(partial * weights[:, None], 0)  # type: ignore[index]  # [BLOCK_DV]
    offset = ((batch * num_tokens + token) * (kv_heads * GROUP) + head) * VALUE_DIM
    tl.store(out_ptr + offset + dim, out.to(out_ptr.dtype.element_ty), mask=dim < VALUE_DIM)
