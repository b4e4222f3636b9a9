"""Launches of the kernels of a decode step. Grids depend on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.decode.append_kv import append_kernel
from nsa_flex.fallback_kernels.decode.combine import combine_kernel
from nsa_flex.fallback_kernels.decode.config import COUNTED, DecodePlan, Scratch, power_of_two
from nsa_flex.fallback_kernels.decode.split_kv_compressed import compressed_kernel
from nsa_flex.fallback_kernels.decode.split_kv_selected import attend_kernel
from nsa_flex.fallback_kernels.decode.topk import choice_kernel

COMPILED = isinstance(combine_kernel, triton.JITFunction)  # else Triton's interpreter runs them


@dataclass(frozen=True)
class Cache:
    """What a layer has stored, and where new tokens go.

    key (B, Hkv, C, D), value (B, Hkv, C, Dv), compressed_key (B, Hkv, Ncap, D), compressed_value
    (B, Hkv, Ncap, Dv), last dimension contiguous; lengths int32 (B,), tokens before the new ones.
    """

    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class NewTokens:
    """What is to be stored, and φ as weights of a block's tokens (mean where None).

    key (B, Hkv, T, D), value (B, Hkv, T, Dv); weights float32 (Hkv, l).
    """

    key: Tensor
    value: Tensor
    key_weights: Tensor | None = None
    value_weights: Tensor | None = None


def early_start(plan: DecodePlan) -> dict[str, bool]:
    """Launch option of a kernel that waits for the one before by itself."""
    return {"launch_pdl": True} if plan.early else {}


def launch_append(
    new: NewTokens, cache: Cache, config: NSAConfig, *, append: bool, emit: bool
) -> None:
    """Stores the new tokens and emits the blocks they complete, or one of both."""
    batch, kv_heads, tokens, head_dim = new.key.shape
    value_dim = new.value.shape[3]
    new_key, new_value = rows_contiguous(new.key), rows_contiguous(new.value)
    weighted = new.key_weights is not None
    with torch.cuda.device_of(cache.key):
        append_kernel[(tokens, batch * kv_heads)](
            new_key,
            new_value,
            cache.key,
            cache.value,
            cache.compressed_key,
            cache.compressed_value,
            new.key_weights if weighted else cache.key,
            new.value_weights if weighted else cache.key,
            cache.lengths,
            *strides(new_key),
            *strides(new_value),
            *strides(cache.key),
            *strides(cache.value),
            *strides(cache.compressed_key),
            *strides(cache.compressed_value),
            cache.key.shape[2],
            cache.compressed_key.shape[2],
            kv_heads,
            HEAD_DIM=head_dim,
            HEAD_COLUMNS=tile_width(head_dim),
            VALUE_DIM=value_dim,
            VALUE_COLUMNS=tile_width(value_dim),
            COMPRESS=config.compress_block_size,
            STRIDE=config.compress_stride,
            COMPRESS_ROWS=power_of_two(config.compress_block_size),
            APPEND=append,
            EMIT=emit,
            WEIGHTED=weighted,
            num_warps=4,
        )


def launch_compressed(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    scratch: Scratch,
    scale: float,
    new: NewTokens | None = None,
    rows_read: Tensor | None = None,
) -> None:
    """Compressed branch; stores the one new token of each row first if `new`."""
    config = plan.config
    weighted = new is not None and new.key_weights is not None
    new_key, new_value = (query, query) if new is None else (new.key, new.value)
    compressed_kernel[(plan.splits, plan.tokens, plan.batch * plan.kv_heads)](
        query,
        cache.compressed_key,
        cache.compressed_value,
        cache.lengths,
        scratch.partial,
        scratch.top,
        scratch.total,
        scratch.score,
        scratch.top if rows_read is None else rows_read,
        new_key,
        new_value,
        cache.key,
        cache.value,
        new.key_weights if weighted else query,  # type: ignore[union-attr]
        new.value_weights if weighted else query,  # type: ignore[union-attr]
        *strides(query),
        *strides(cache.compressed_key),
        *strides(cache.compressed_value),
        *strides(new_key)[:2],
        *strides(new_value)[:2],
        *strides(cache.key),
        *strides(cache.value),
        plan.capacity,
        plan.num_compressed,
        plan.kv_heads,
        plan.splits,
        plan.parts,
        base2_scale(scale),
        **plan.constants(),
        ROWS=tile_width(plan.group),
        KEYS=plan.tile_keys,
        BLOCK_COLUMNS=plan.block_columns,
        POOL_COLUMNS=tile_width(plan.tile_blocks + 1),
        COMPRESS_ROWS=power_of_two(config.compress_block_size),
        PRECISION=plan.precision,
        STAGES=plan.stages,
        STEP=new is not None,
        WEIGHTED=weighted,
        COMPILED=COMPILED,
        COUNT=rows_read is not None,
        EARLY=plan.early,
        num_warps=plan.warps,
        **early_start(plan),
    )


def launch_choice(plan: DecodePlan, cache: Cache, scratch: Scratch) -> None:
    """The best free blocks of each chunk."""
    config = plan.config
    choice_kernel[(plan.chunks, plan.tokens, plan.batch * plan.kv_heads)](
        cache.lengths,
        scratch.score,
        scratch.top,
        scratch.total,
        scratch.candidates,
        scratch.blocks,
        plan.capacity,
        plan.num_compressed,
        plan.kv_heads,
        plan.splits,
        plan.parts,
        GROUP=plan.group,
        COMPRESS=config.compress_block_size,
        STRIDE=config.compress_stride,
        SELECT=config.select_block_size,
        NUM_SLOTS=config.num_selected_blocks,
        MEMBERS=plan.members,
        HEADS=plan.choice_heads,
        SPLIT_COLUMNS=plan.split_columns,
        BLOCK_COLUMNS=plan.block_columns,
        CHUNK=plan.chunk,
        COUNTED=COUNTED,
        KEYS=plan.tile_keys,
        SLOT_COLUMNS=plan.slot_columns,
        INITIAL=config.num_initial_blocks,
        LOCAL=config.num_local_blocks,
        EARLY=plan.early,
        LATE=plan.late,
        num_warps=plan.choice_warps,
        **early_start(plan),
    )


def launch_attend(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    sliding: tuple[Tensor, Tensor],
    scratch: Scratch,
    scale: float,
    new: NewTokens | None = None,
    rows_read: Tensor | None = None,
    *,
    selected: bool = True,
    sliding_window: bool = True,
) -> None:
    """Selected and sliding branch, or, to be timed, one of them; `new` as above."""
    window_parts = plan.window_parts if sliding_window else 0
    parts = window_parts + (plan.select_parts if selected else 0)
    late_part = window_parts + (plan.forced_parts if plan.free_slots else 0)
    grid = (plan.batch * plan.kv_heads, plan.tokens, parts)
    new_key, new_value = (query, query) if new is None else (new.key, new.value)
    attend_kernel[grid](
        query,
        cache.key,
        cache.value,
        *sliding,
        new_key,
        new_value,
        cache.lengths,
        scratch.candidates,
        scratch.blocks,
        scratch.partial,
        scratch.top,
        scratch.total,
        scratch.blocks if rows_read is None else rows_read,
        *strides(query),
        *strides(cache.key),
        *strides(cache.value),
        *strides(sliding[0]),
        *strides(sliding[1]),
        *strides(new_key)[:2],
        *strides(new_value)[:2],
        plan.capacity,
        plan.kv_heads,
        plan.splits,
        plan.parts,
        window_parts,
        plan.forced_parts,
        late_part,
        plan.forced_per_part,
        plan.slots_per_part,
        plan.tiles_per_part,
        base2_scale(scale),
        **plan.constants(),
        NUM_SLOTS=plan.config.num_selected_blocks,
        INITIAL=plan.config.num_initial_blocks,
        LOCAL=plan.config.num_local_blocks,
        CHUNKS=plan.chunks,
        SLOT_COLUMNS=plan.slot_columns,
        BLOCK_COLUMNS=plan.block_columns,
        WINDOW=plan.config.window_size,
        ROWS=tile_width(plan.group),
        KEYS=plan.tile_tokens,
        PRECISION=plan.precision,
        STAGES=plan.attend_stages,
        STEP=new is not None,
        COUNT=rows_read is not None,
        EARLY=plan.early,
        num_warps=plan.warps,
        **early_start(plan),
    )


def launch_merge(
    plan: DecodePlan, cache: Cache, scratch: Scratch, gates: Tensor, out: Tensor, lse: Tensor
) -> None:
    """The gated sum: out (B, T, Hq, Dv) in its dtype, lse float32 (B, Hq, T, 3)."""
    columns = plan.merge_columns
    grid = (plan.value_columns // columns, plan.group, plan.units)
    combine_kernel[grid](
        scratch.partial,
        scratch.top,
        scratch.total,
        gates,
        cache.lengths,
        out,
        lse,
        *gates.stride(),
        plan.capacity,
        plan.num_compressed,
        plan.kv_heads,
        plan.tokens,
        plan.splits,
        plan.parts,
        plan.window_parts,
        plan.forced_parts,
        plan.forced_per_part,
        plan.slots_per_part,
        plan.tiles_per_part,
        **plan.constants(),
        NUM_SLOTS=plan.config.num_selected_blocks,
        INITIAL=plan.config.num_initial_blocks,
        LOCAL=plan.config.num_local_blocks,
        WINDOW=plan.config.window_size,
        COMPRESSED_KEYS=plan.tile_keys,
        KEYS=plan.tile_tokens,
        PART_COLUMNS=plan.part_columns,
        COLUMNS=columns,
        EARLY=plan.early,
        num_warps=1,
        **early_start(plan),
    )


def run(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    gates: Tensor,
    scale: float,
    sliding: tuple[Tensor, Tensor] | None = None,
    new: NewTokens | None = None,
    rows_read: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step: out (B, T, Hq, Dv), blocks (B, Hkv, T, n) in the kernels' order, lse."""
    shape = (plan.batch, plan.tokens, plan.query_heads, plan.value_dim)
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(
        (plan.batch, plan.query_heads, plan.tokens, 3), dtype=torch.float32, device=query.device
    )
    query = rows_contiguous(query)
    sliding = (cache.key, cache.value) if sliding is None else sliding
    if new is not None:
        key, value = (rows_contiguous(x.to(cache.key.dtype)) for x in (new.key, new.value))
        new = replace(new, key=key, value=value)
        if plan.tokens > 1:
            launch_append(new, cache, plan.config, append=True, emit=True)
            new = None
    scratch = plan.scratch(query.device)
    with torch.cuda.device_of(query):
        launch_compressed(plan, query, cache, scratch, scale, new, rows_read)
        launch_choice(plan, cache, scratch)
        launch_attend(plan, query, cache, sliding, scratch, scale, new, rows_read)
        launch_merge(plan, cache, scratch, gates, out, lse)
    return out, scratch.blocks, lse
