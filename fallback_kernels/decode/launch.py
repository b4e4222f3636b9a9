"""Launches of the kernels of a decode step. Grids depend on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import PRODUCTS, NSAConfig
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import next_power_of_2, tile_width
from nsa_flex.fallback_kernels.decode.append_kv import decode_append_kernel
from nsa_flex.fallback_kernels.decode.combine import decode_combine_kernel
from nsa_flex.fallback_kernels.decode.config import DecodePlan, Workspace
from nsa_flex.fallback_kernels.decode.split_kv_compressed import decode_compressed_kernel
from nsa_flex.fallback_kernels.decode.split_kv_selected import decode_selected_sliding_kernel
from nsa_flex.fallback_kernels.decode.topk import decode_topk_kernel

MAX_LENGTHS = 128  # of a batch that every CTA reads


@dataclass(frozen=True)
class Cache:
    """What a layer has stored, and where new tokens go.

    key (B, Hkv, C, D), value (B, Hkv, C, Dv), compressed_key (B, Hkv, Ncap, D), compressed_value
    (B, Hkv, Ncap, Dv), last dimension contiguous; lengths int32 (B,), tokens before the new ones.

    With a table, int (B, P), of the pages of each row, they are (pages, Hkv, rows of a page, ·).
    """

    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor
    lengths: Tensor
    table: Tensor | None = None

    def pages(self, of: Tensor) -> dict[str, Any]:
        """Arguments of a kernel that reads `of`, if it is in pages."""
        if self.table is None:
            return {}
        stride = self.table.stride(0)
        return {"PAGE": of.shape[2], "table_ptr": self.table, "table_stride": stride}


@dataclass(frozen=True)
class Phi:
    """The map from a block's tokens to its compressed row, as `nsa_flex.compression` has it.

    kind: "mean", "weighted", "linear" or "mlp". key, value: its parameters in their order, each
    contiguous: none; logits (Hkv, l); weight (Hkv, l, D, D); position (l, D), hidden weight
    (2, l, D, D) and output weight (2, D, D).
    """

    kind: str = "mean"
    key: tuple[Tensor, ...] = ()
    value: tuple[Tensor, ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether kernels of their own compress, for the bytes of the weights."""
        return self.kind in PRODUCTS


@dataclass(frozen=True)
class NewTokens:
    """What is to be stored, of one branch or of all: key (B, H, T, D), value (B, H, T, Dv)."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Gating:
    """gates (B, Hq, T, C), or with `offset` (C,) what their sigmoid plus offset is.

    bias: (C · Hq,), added to each token's before the sigmoid, head by head.
    """

    gates: Tensor
    offset: Tensor | None = None
    bias: Tensor | None = None


def run(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    gating: Gating,
    scale: float,
    sliding: tuple[Tensor, Tensor] | None = None,
    new: NewTokens | None = None,
    phi: Phi | None = None,
    rows_read: Tensor | None = None,
    *,
    behind_phi: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attends: out (B, T, Hq, Dv), blocks (B, Hkv, T, n) in the order of their slots, and lse
    (B, Hq, T, C) of the C branches that the config has.

    Args:
        new: the one token of each row that the first kernel stores, with the block that it
            completes if `phi`.
        behind_phi: whether φ's own kernels were launched right before.
    """
    shape = (plan.batch, plan.tokens, plan.query_heads, plan.value_dim)
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(
        (plan.batch, plan.query_heads, plan.tokens, len(plan.config.branches)),
        dtype=torch.float32,
        device=query.device,
    )
    query = rows_contiguous(query)
    sliding = (cache.key, cache.value) if sliding is None else sliding
    workspace = plan.workspace(query.device)
    with torch.cuda.device_of(query):
        if plan.compressed_splits:
            launch_compressed(
                plan, query, cache, workspace, scale, new, phi, rows_read, behind_phi=behind_phi
            )
        if plan.num_slots:
            launch_topk(plan, cache, workspace)
        if plan.selected_splits + plan.window_splits:
            launch_selected_sliding(plan, query, cache, sliding, workspace, scale, new, rows_read)
        launch_combine(plan, cache, workspace, gating, out, lse)
    return out, workspace.blocks, lse


def fake_results(
    query: Tensor, kv_heads: int, value_dim: int, config: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like those of `run`, in the kind of the query's memory."""
    batch, heads, tokens, _ = query.shape
    slots = config.num_selected_blocks if config.has("selected") else 0
    return (
        query.new_empty((batch, tokens, heads, value_dim)),
        query.new_empty((batch, kv_heads, tokens, slots), dtype=torch.int32),
        query.new_empty((batch, heads, tokens, len(config.branches)), dtype=torch.float32),
    )


def padded_batch(batch: int) -> int:
    """Of the rows whose lengths each CTA reads to see if it has to wait; 0: it waits anyway."""
    padded = next_power_of_2(batch)
    return padded if padded <= MAX_LENGTHS else 0


def launch_append(
    new: NewTokens, cache: Cache, compressed_heads: int, phi: Phi | None, config: NSAConfig
) -> None:
    """Stores the new tokens, and the blocks that they complete in the first heads if `phi`."""
    batch, kv_heads, tokens, head_dim = new.key.shape
    value_dim = new.value.shape[3]
    weights = phi.key + phi.value if phi is not None and phi.kind == "weighted" else ()
    with torch.cuda.device_of(cache.key):
        decode_append_kernel[(tokens, batch * kv_heads)](
            new.key,
            new.value,
            cache.key,
            cache.value,
            cache.compressed_key,
            cache.compressed_value,
            *(weights or (cache.key, cache.key)),
            cache.lengths,
            strides(new.key),
            strides(new.value),
            strides(cache.key),
            strides(cache.value),
            strides(cache.compressed_key),
            strides(cache.compressed_value),
            cache.key.shape[2],
            cache.compressed_key.shape[2],
            kv_heads,
            compressed_heads,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            COMPRESS=config.compress_block_size,
            STRIDE=config.compress_stride,
            WRITE_COMPRESSED=phi is not None,
            WEIGHTED=bool(weights),
            num_warps=4,
        )


def launch_compressed(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    workspace: Workspace,
    scale: float,
    new: NewTokens | None = None,
    phi: Phi | None = None,
    rows_read: Tensor | None = None,
    *,
    behind_phi: bool = False,
) -> None:
    """Compressed branch; stores the one new token of each row first if `new`, see `run`."""
    weights = phi.key + phi.value if phi is not None and phi.kind == "weighted" else ()
    new_key, new_value = (query, query) if new is None else (new.key, new.value)
    decode_compressed_kernel[(plan.compressed_splits, plan.tokens, plan.batch * plan.kv_heads)](
        query,
        cache.compressed_key,
        cache.compressed_value,
        cache.lengths,
        workspace.partial,
        workspace.row_max,
        workspace.row_sum,
        workspace.score,
        workspace.row_max if rows_read is None else rows_read,
        new_key,
        new_value,
        cache.key,
        cache.value,
        *(weights or (query, query)),
        strides(query),
        strides(cache.compressed_key),
        strides(cache.compressed_value),
        strides(new_key)[:2],
        strides(new_value)[:2],
        strides(cache.key),
        strides(cache.value),
        plan.capacity,
        plan.num_compressed,
        plan.kv_heads,
        plan.compressed_splits,
        plan.num_splits,
        base2_scale(scale),
        **plan.attention_constants(),
        COMPRESS=plan.config.compress_block_size,
        STRIDE=plan.config.compress_stride,
        BLOCK_N=plan.compressed_block_n,
        BLOCK_POOL=tile_width(plan.tile_blocks + 1) if plan.num_slots else 0,
        STAGES=plan.stages,
        HAS_NEW_TOKEN=new is not None,
        WRITE_COMPRESSED=phi is not None,
        WEIGHTED=bool(weights),
        COUNT_ROWS=rows_read is not None,
        PADDED_BATCH=padded_batch(plan.batch) if behind_phi else 0,
        OUTPUT=plan.config.has("compressed"),
        num_warps=plan.warps,
        **cache.pages(cache.compressed_key),
        **pdl_option(plan.pdl),
    )


def launch_topk(plan: DecodePlan, cache: Cache, workspace: Workspace) -> None:
    """The top-k blocks of each chunk."""
    config = plan.config
    decode_topk_kernel[(plan.chunks, plan.tokens, plan.batch * plan.kv_heads)](
        cache.lengths,
        workspace.score,
        workspace.row_max,
        workspace.row_sum,
        workspace.candidates,
        workspace.blocks,
        plan.capacity,
        plan.num_compressed,
        plan.kv_heads,
        plan.compressed_splits,
        plan.num_splits,
        GROUP=plan.group,
        COMPRESS=config.compress_block_size,
        STRIDE=config.compress_stride,
        SELECT=config.select_block_size,
        **plan.slot_constants(),
        HEADS=plan.topk_heads,
        PADDED_COMPRESSED_SPLITS=plan.padded_compressed_splits,
        PADDED_BLOCKS=plan.padded_blocks,
        CHUNK=plan.chunk,
        BLOCK_N=plan.compressed_block_n,
        PDL=plan.pdl,
        LAUNCH_AFTER_WAIT=plan.launches_after_wait,
        num_warps=plan.topk_warps,
        **pdl_option(plan.pdl),
    )


def launch_selected_sliding(
    plan: DecodePlan,
    query: Tensor,
    cache: Cache,
    sliding: tuple[Tensor, Tensor],
    workspace: Workspace,
    scale: float,
    new: NewTokens | None = None,
    rows_read: Tensor | None = None,
    *,
    selected: bool = True,
    sliding_window: bool = True,
) -> None:
    """Selected and sliding branch, or, to be timed, one of them; `new` as above."""
    window_splits = plan.window_splits if sliding_window else 0
    splits = window_splits + (plan.selected_splits if selected else 0)
    first_dependent_split = window_splits + (plan.initial_local_splits if plan.num_topk else 0)
    first_dependent_split = min(first_dependent_split, splits - 1)
    new_key, new_value = (query, query) if new is None else (new.key, new.value)
    decode_selected_sliding_kernel[(plan.batch * plan.kv_heads, plan.tokens, splits)](
        query,
        cache.key,
        cache.value,
        *sliding,
        new_key,
        new_value,
        cache.lengths,
        workspace.candidates,
        workspace.blocks,
        workspace.partial,
        workspace.row_max,
        workspace.row_sum,
        workspace.blocks if rows_read is None else rows_read,
        strides(query),
        strides(cache.key),
        strides(cache.value),
        strides(sliding[0]),
        strides(sliding[1]),
        strides(new_key)[:2],
        strides(new_value)[:2],
        plan.capacity,
        plan.kv_heads,
        plan.compressed_splits,
        plan.num_splits,
        window_splits,
        plan.initial_local_splits,
        first_dependent_split,
        plan.initial_local_per_split,
        plan.topk_per_split,
        plan.tiles_per_split,
        base2_scale(scale),
        **plan.attention_constants(),
        **plan.slot_constants(),
        CHUNKS=plan.chunks,
        WINDOW=plan.window,
        BLOCK_N=plan.block_n,
        STAGES=plan.selected_stages,
        HAS_NEW_TOKEN=new is not None,
        COUNT_ROWS=rows_read is not None,
        num_warps=plan.warps,
        **cache.pages(cache.key),
        # As the first kernel of a step it is launched when all work before is done.
        **pdl_option(plan.pdl and plan.config.compresses),
    )


def launch_combine(
    plan: DecodePlan,
    cache: Cache,
    workspace: Workspace,
    gating: Gating,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The gated sum: out (B, T, Hq, Dv) in its dtype, lse float32 (B, Hq, T, C)."""
    config = plan.config
    block_dv = plan.combine_block_dv
    decode_combine_kernel[(plan.block_dv // block_dv, plan.group, plan.units)](
        workspace.partial,
        workspace.row_max,
        workspace.row_sum,
        gating.gates,
        gating.gates if gating.offset is None else gating.offset,
        gating.gates if gating.bias is None else gating.bias,
        cache.lengths,
        out,
        lse,
        gating.gates.stride(),
        plan.capacity,
        plan.num_compressed,
        plan.kv_heads,
        plan.tokens,
        plan.compressed_splits,
        plan.num_splits,
        plan.window_splits,
        plan.initial_local_splits,
        plan.initial_local_per_split,
        plan.topk_per_split,
        plan.tiles_per_split,
        GROUP=plan.group,
        VALUE_DIM=plan.value_dim,
        BLOCK_DV=block_dv,
        COMPRESS=config.compress_block_size,
        STRIDE=config.compress_stride,
        SELECT=config.select_block_size,
        **plan.slot_constants(),
        WINDOW=plan.window,
        COMPRESSED_BLOCK_N=plan.compressed_block_n if config.has("compressed") else 0,
        BLOCK_N=plan.block_n,
        PADDED_SPLITS=plan.padded_splits,
        FROM_LOGITS=gating.offset is not None,
        HAS_BIAS=gating.bias is not None,
        PDL=plan.pdl,
        num_warps=1,
        **pdl_option(plan.pdl),
    )


def pdl_option(pdl: bool) -> dict[str, bool]:
    """Launch option of a kernel that waits for the one before by itself."""
    return {"launch_pdl": True} if pdl else {}
