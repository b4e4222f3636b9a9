"""Gradients of selected attention: dK and dV by KV block, dQ by partial results.

The kernel of the top-k blocks mirrors the forward's: a block's keys and values are loaded once,
the queries that selected it stream past, dK and dV stay in registers until the work tile ends, and
the partial dQ goes to the partial buffer, which the dQ kernel sums. Initial and local blocks need
no index: the queries of block j and of the next `LOCAL - 1` blocks are consecutive, and so are all
that follow an initial block. Their share of dQ is recomputed in the dQ kernel.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.bwd_preprocess import softmax_stats
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import empty_bshd, is_bsh, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, round_up
from nsa_flex.fallback_kernels.launch.streams import round_robin
from nsa_flex.fallback_kernels.selected.block_union import build_block_unions
from nsa_flex.fallback_kernels.selected.bwd_dkdv import (
    ADD,
    ATOMIC,
    selected_bwd_dkdv_initial_local_kernel,
    selected_bwd_dkdv_kernel,
)
from nsa_flex.fallback_kernels.selected.bwd_dq import selected_bwd_dq_kernel
from nsa_flex.fallback_kernels.selected.config import SEGMENT_TOKENS, QueryChunk, SelectedPlan
from nsa_flex.fallback_kernels.selected.inverted_index import (
    SelectedIndex,
    build_index,
    empty_counts,
    index_views,
)


def empty_sums(plan: SelectedPlan, key: Tensor) -> tuple[Tensor, ...]:
    """Memory for dK and dV, float32 (2, B, tokens, Hkv, D), or (1, ...) for each; contiguous.

    key: (B, Hkv, Sk, D). Tokens are whole blocks, so that no CTA needs a mask where it adds its
    block's gradient.
    """
    tokens = (plan.batch, round_up(key.shape[2], plan.block_size), plan.kv_heads)
    # In one tensor, one operator sets them to zero; but in float32 they may be what is
    # returned, and results must not share memory.
    if plan.head_dim == plan.value_dim and key.dtype != torch.float32:
        shapes = [(2, *tokens, plan.head_dim)]
    else:
        shapes = [(1, *tokens, width) for width in (plan.head_dim, plan.value_dim)]
    return tuple(torch.empty(x, dtype=torch.float32, device=key.device) for x in shapes)


class _Backward:
    """One backward pass: its inputs by name, its buffers, its launches."""

    def __init__(
        self,
        plan: SelectedPlan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stats: Tensor,
        grad_out: Tensor,
        scale: float,
        deterministic: bool,
        offsets: Tensor | None,
        zeros: tuple[Tensor, ...] | None = None,
        kinds: Tensor | None = None,
    ) -> None:
        # Without float atomics a CSR row is one CTA's, initial blocks are indexed as well, and
        # query chunks add to the same gradients one after the other.
        if deterministic:
            plan = replace(plan, num_initial=0, in_series=True)
        self.plan = plan
        self.work_tile_tokens = plan.chunk_tokens if deterministic else plan.work_tile_tokens
        self.deterministic = deterministic
        self.query, self.key, self.value, self.grad_out = query, key, value, grad_out
        self.stats = stats
        self.scale = scale
        self.offsets = offsets
        self.kinds = kinds
        self.are_zero = zeros is not None
        self.sums = empty_sums(plan, key) if zeros is None else zeros
        self.grad_key, self.grad_value = (x for both in self.sums for x in both.unbind())

    def inputs(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.grad_out

    def launch_initial_local(self, bitmask: Tensor, *, local: bool) -> None:
        """Local and initial blocks; where it adds, gradients are set to zero before."""
        plan = self.plan
        tokens = self.grad_key.shape[1]
        segment_tokens = SEGMENT_TOKENS if local else plan.segment_tokens(tokens)
        local_per_segment = segment_tokens // plan.block_size if local else 0
        segments = cdiv(tokens, segment_tokens)
        if not self.are_zero:
            for sums in self.sums:
                (sums[:, :, : plan.num_initial * plan.block_size] if local else sums).zero_()
        num_ctas = segments * (local_per_segment + plan.num_initial)
        if num_ctas == 0:
            return
        grid = (num_ctas, plan.batch * plan.kv_heads)
        selected_bwd_dkdv_initial_local_kernel[grid](
            *self.inputs(),
            self.stats,
            bitmask,
            self.offsets,
            self.grad_key,
            self.grad_value,
            strides(self.key),
            strides(self.value),
            plan.query_offset,
            plan.num_queries,
            plan.num_keys,
            tokens,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.constants(),
            INITIAL=plan.num_initial,
            LOCAL=plan.num_local,
            SEGMENT_TOKENS=segment_tokens,
            LOCAL_PER_SEGMENT=local_per_segment,
            BLOCK_M=plan.tile_rows,
            STAGES=plan.gradient_stages,
            num_warps=plan.num_warps,
        )

    def launch_topk(self, chunk: QueryChunk, csr: SelectedIndex, partial: Tensor) -> None:
        plan = self.plan
        selected_bwd_dkdv_kernel[(max(chunk.max_work_tiles, 1),)](
            *self.inputs(),
            self.stats,
            partial,
            self.grad_key,
            self.grad_value,
            csr.entries,
            csr.work_tiles,
            self.offsets,
            strides(self.key),
            strides(self.value),
            chunk.number * csr.work_tiles.shape[1],
            chunk.first_head,
            chunk.first_csr_row,
            plan.query_offset - chunk.start,
            plan.chunk_tokens,
            plan.num_queries,
            plan.num_keys,
            self.grad_key.shape[1],
            plan.num_blocks,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.constants(),
            NUM_SLOTS=plan.num_slots,
            BLOCK_M=plan.tile_rows,
            STAGES=plan.topk_gradient_stages,
            num_warps=plan.num_warps,
            MODE=ADD if self.deterministic else ATOMIC,
        )

    def launch_combine(
        self,
        chunk: QueryChunk,
        bitmask: Tensor,
        partial: Tensor,
        grad_query: Tensor,
        *,
        initial_local: bool,
        added: bool,
    ) -> None:
        plan = self.plan
        grid = (plan.chunk_tokens // plan.combine_tokens, chunk.num_heads)
        selected_bwd_dq_kernel[grid](
            *self.inputs(),
            self.stats,
            partial,
            bitmask,
            self.offsets,
            grad_query,
            strides(self.key),
            strides(self.value),
            chunk.first_head,
            chunk.start,
            plan.chunk_tokens,
            plan.query_offset,
            plan.num_queries,
            plan.num_keys,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            self.kinds,
            **plan.constants(),
            NUM_SLOTS=plan.num_slots,
            INITIAL_LOCAL=initial_local,
            ADDED=added,
            INITIAL=plan.num_initial,
            LOCAL=plan.num_local,
            BLOCK_TOKENS=plan.combine_tokens,
            BLOCK_M=plan.combine_rows,
            STAGES=plan.combine_stages(plan.head_dim),
            num_warps=plan.num_warps,
            maxnreg=plan.stream_registers,
        )

    def run(
        self,
        blocks: Tensor,
        index: Tensor | None,
        grad_query: Tensor,
        *,
        initial_local: bool,
        added: bool,
    ) -> None:
        """All launches.

        initial_local: with dQ of initial and local blocks, and dK and dV of local blocks.
        added: dQ is added to what is in `grad_query`.
        """
        plan = self.plan
        if self.deterministic:
            csr = build_index(
                plan,
                blocks,
                self.work_tile_tokens,
                offsets=self.offsets,
                kinds=self.kinds,
            )
        elif index is None:
            counts = empty_counts(plan, blocks.device)
            unions = build_block_unions(plan, blocks, self.offsets, counts)
            csr = build_index(
                plan,
                blocks,
                self.work_tile_tokens,
                offsets=self.offsets,
                unions=unions,
                counts=counts,
                kinds=self.kinds,
            )
        else:
            csr = index_views(plan, self.work_tile_tokens, index, blocks)
        workspaces = [
            self.query.new_empty(plan.partial_rows, plan.head_dim) for _ in range(plan.num_streams)
        ]
        self.launch_initial_local(csr.bitmask, local=initial_local)

        def launch(chunk: QueryChunk, partial: Tensor) -> None:
            self.launch_topk(chunk, csr, partial)
            self.launch_combine(
                chunk, csr.bitmask, partial, grad_query, initial_local=initial_local, added=added
            )

        round_robin(self.query.device, plan.chunks(self.work_tile_tokens), workspaces, launch)


def backward(
    plan: SelectedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    scale: float,
    *,
    deterministic: bool,
    index: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtype; dK and dV are summed in float32.

    With p the probabilities: dV = p^T dO, dS = p (dO V^T - delta), dQ = scale dS K,
    dK = scale dS^T Q.

    Work tiles of one block add into dK and dV by float32 atomics, in no fixed order.
    `deterministic` sorts the CSR rows and gives each to one CTA, which adds without atomics: equal
    inputs then give equal bits, but a block that very many queries selected is one CTA's work.

    Args:
        plan, query, key, value, blocks, scale: as in the forward.
        lse, delta: float32 (B, Hq, Sq), memory (B, Sq, Hq); delta is rowsum(out * grad_out),
            less the gradient of the log-sum-exp.
        grad_out: (B, Hq, Sq, Dv), memory (B, Sq, Hq, Dv).
        deterministic: see above; it builds an index of its own.
        index: what the forward wrote into `storage`; None builds it anew.
        offsets: as in the forward.
    """
    assert is_bsh(lse)
    assert is_bsh(delta)
    stats = softmax_stats(lse, delta)
    launches = _Backward(plan, query, key, value, stats, grad_out, scale, deterministic, offsets)
    grad_query = empty_bshd(query, plan.query_heads, plan.num_queries, plan.head_dim, query.dtype)
    launches.run(blocks, index, grad_query, initial_local=True, added=False)
    grad_key = launches.grad_key[:, : key.shape[2]].to(key.dtype).contiguous()
    grad_value = launches.grad_value[:, : key.shape[2]].to(value.dtype).contiguous()
    return grad_query, grad_key.transpose(1, 2), grad_value.transpose(1, 2)


def add_gradients(
    plan: SelectedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    stats: Tensor,
    grad_out: Tensor,
    scale: float,
    *,
    deterministic: bool,
    index: Tensor | None,
    grad_query: Tensor,
    initial_local: bool,
    zeros: tuple[Tensor, ...] | None = None,
    kinds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`backward` whose dQ is added to `grad_query`, and whose dK and dV stay in float32.

    Without `initial_local`, dK and dV lack the local blocks, dQ these and the initial ones.
    `stats` is what `softmax_stats` returns, `zeros` what `empty_sums` does, set to zero: then dK
    and dV are added there. `kinds` is what `block_kinds` returns; results of short documents are
    left to other kernels.

    Returns dK and dV (B, tokens, Hkv, D), contiguous, tokens in whole blocks.
    """
    launches = _Backward(
        plan, query, key, value, stats, grad_out, scale, deterministic, None, zeros, kinds
    )
    launches.run(blocks, index, grad_query, initial_local=initial_local, added=True)
    return launches.grad_key, launches.grad_value
