"""Gradients of selected attention: dK and dV by KV block, dQ by partial results.

The list kernel mirrors the forward's: a block's keys and values are loaded once, the queries that
chose it stream past, dK and dV stay in registers until the item ends, and the tile's share of dQ
goes to the partial buffer, which the merge sums. Dense candidates need no list: the queries of
block j and of the next `LOCAL - 1` blocks are consecutive, and so are all that follow an initial
block. Their share of dQ is recomputed in the merge.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from nsa_flex.fallback_kernels.common.bwd_preprocess import softmax_stats
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.streams import round_robin
from nsa_flex.fallback_kernels.common.strides import empty_bshd, is_bsh, strides
from nsa_flex.fallback_kernels.common.tiles import round_up
from nsa_flex.fallback_kernels.selected.block_union import build_unions
from nsa_flex.fallback_kernels.selected.bwd_dkdv import (
    ADD,
    ATOMIC,
    dense_gradient_kernel,
    list_gradient_kernel,
)
from nsa_flex.fallback_kernels.selected.bwd_dq import query_gradient_kernel
from nsa_flex.fallback_kernels.selected.config import INITIAL_CHUNK_TOKENS, SelectedPlan, Window
from nsa_flex.fallback_kernels.selected.inverted_index import (
    SelectedIndex,
    build_index,
    index_views,
)


class _Backward:
    """One backward pass: its inputs by name, its buffers, its launches."""

    def __init__(
        self,
        plan: SelectedPlan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor,
        delta: Tensor,
        grad_out: Tensor,
        scale: float,
        deterministic: bool,
    ) -> None:
        assert is_bsh(lse)
        assert is_bsh(delta)
        # Without float atomics a list is one program, initial blocks are lists as well, and
        # windows add to the same gradients one after the other.
        if deterministic:
            plan = replace(plan, num_initial=0, in_series=True)
        self.plan = plan
        self.chunk = plan.window_tokens if deterministic else plan.chunk_tokens
        self.deterministic = deterministic
        self.query, self.key, self.value, self.grad_out = query, key, value, grad_out
        self.lse, self.delta = lse, delta
        self.scale = scale
        self.numbers = softmax_stats(lse, delta)
        # Whole blocks, so that no program needs a mask where it adds its block's gradient.
        tokens = (plan.batch, round_up(key.shape[2], plan.block_size), plan.kv_heads)
        self.grad_key, self.grad_value = (
            torch.empty((*tokens, width), dtype=torch.float32, device=query.device)
            for width in (plan.head_dim, plan.value_dim)
        )

    def inputs(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.grad_out

    def launch_dense(self, summary: Tensor, *, local: bool) -> None:
        """Local and initial blocks; without `local` into totals that are set to zero before."""
        plan = self.plan
        chunk = INITIAL_CHUNK_TOKENS if local else plan.chunk_tokens
        locals_per_turn = chunk // plan.block_size if local else 0
        turns = triton.cdiv(self.grad_key.shape[1], chunk)
        for total in (self.grad_key, self.grad_value):
            (total[:, : plan.num_initial * plan.block_size] if local else total).zero_()
        programs = turns * (locals_per_turn + plan.num_initial)
        if programs == 0:
            return
        grid = (programs, plan.batch * plan.kv_heads)
        dense_gradient_kernel[grid](
            *self.inputs(),
            self.numbers,
            summary,
            self.grad_key,
            self.grad_value,
            *strides(self.key),
            *strides(self.value),
            plan.query_offset,
            plan.num_queries,
            plan.num_keys,
            self.grad_key.shape[1],
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.constants(),
            INITIAL=plan.num_initial,
            LOCAL=plan.num_local,
            CHUNK=chunk,
            LOCALS=locals_per_turn,
            ROWS=plan.tile_rows,
            STAGES=plan.gradient_stages,
            num_warps=plan.num_warps,
        )

    def launch_lists(self, window: Window, index: SelectedIndex, partial: Tensor) -> None:
        plan = self.plan
        list_gradient_kernel[(max(window.max_items, 1),)](
            *self.inputs(),
            self.numbers,
            partial,
            self.grad_key,
            self.grad_value,
            index.entries,
            index.items,
            *strides(self.key),
            *strides(self.value),
            window.number * index.items.shape[1],
            window.first_head,
            window.first_list,
            plan.query_offset - window.start,
            plan.window_tokens,
            plan.num_queries,
            plan.num_keys,
            self.grad_key.shape[1],
            plan.num_blocks,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.constants(),
            ROWS=plan.tile_rows,
            STAGES=plan.list_gradient_stages,
            num_warps=plan.num_warps,
            MODE=ADD if self.deterministic else ATOMIC,
        )

    def launch_merge(
        self,
        window: Window,
        summary: Tensor,
        partial: Tensor,
        grad_query: Tensor,
        *,
        forced: bool,
        added: bool,
    ) -> None:
        plan = self.plan
        grid = (plan.window_tokens // plan.merge_tokens, window.num_heads)
        query_gradient_kernel[grid](
            *self.inputs(),
            self.lse,
            self.delta,
            partial,
            summary,
            grad_query,
            *strides(self.key),
            *strides(self.value),
            window.first_head,
            window.start,
            plan.window_tokens,
            plan.query_offset,
            plan.num_queries,
            plan.num_keys,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.constants(),
            FORCED=forced,
            ADDED=added,
            INITIAL=plan.num_initial,
            LOCAL=plan.num_local,
            TOKENS=plan.merge_tokens,
            ROWS=plan.merge_rows,
            STAGES=plan.merge_stages(plan.head_dim),
            num_warps=plan.num_warps,
            maxnreg=plan.stream_registers,
        )

    def everything(
        self,
        blocks: Tensor,
        index: Tensor | None,
        grad_query: Tensor,
        *,
        forced: bool,
        added: bool,
    ) -> None:
        """All launches.

        forced: with dQ of dense candidates, and dK and dV of local blocks. added: dQ is added to
        what is in `grad_query`.
        """
        plan = self.plan
        if self.deterministic:
            parts = build_index(plan, blocks, self.chunk)
        elif index is None:
            parts = build_index(plan, blocks, self.chunk, unions=build_unions(plan, blocks))
        else:
            parts = index_views(plan, self.chunk, index, blocks)
        rooms = [
            self.query.new_empty(plan.partial_rows, plan.head_dim)
            for _ in range(plan.window_lanes)
        ]
        self.launch_dense(parts.summary, local=forced)

        def launch(window: Window, partial: Tensor) -> None:
            self.launch_lists(window, parts, partial)
            self.launch_merge(
                window, parts.summary, partial, grad_query, forced=forced, added=added
            )

        round_robin(self.query.device, plan.windows(self.chunk), rooms, launch)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtype; dK and dV are summed in float32.

    With p the probabilities: dV = p^T dO, dS = p (dO V^T - delta), dQ = scale dS K,
    dK = scale dS^T Q.

    Items of one block add into dK and dV by float32 atomics, in no fixed order. `deterministic`
    sorts the lists and gives every list to one program, which adds without atomics: equal inputs
    then give equal bits, but a block that very many queries chose is worked through alone.

    Args:
        plan, query, key, value, blocks, scale: as in the forward.
        lse, delta: float32 (B, Hq, Sq), memory (B, Sq, Hq); delta is rowsum(out * grad_out),
            less the gradient of the log-sum-exp.
        grad_out: (B, Hq, Sq, Dv), memory (B, Sq, Hq, Dv).
        deterministic: see above; it builds an index of its own.
        index: what the forward wrote into `storage`; None builds it anew.
    """
    run = _Backward(plan, query, key, value, lse, delta, grad_out, scale, deterministic)
    grad_query = empty_bshd(query, plan.query_heads, plan.num_queries, plan.head_dim, query.dtype)
    run.everything(blocks, index, grad_query, forced=True, added=False)
    grad_key = run.grad_key[:, : key.shape[2]].to(key.dtype).contiguous()
    grad_value = run.grad_value[:, : key.shape[2]].to(value.dtype).contiguous()
    return grad_query, grad_key.transpose(1, 2), grad_value.transpose(1, 2)


def add_gradients(
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
    index: Tensor | None,
    grad_query: Tensor,
    forced: bool,
) -> tuple[Tensor, Tensor]:
    """`backward` whose dQ is added to `grad_query`, and whose dK and dV stay in float32.

    Without `forced`, dK and dV lack the local blocks, and dQ lacks these and the initial ones.

    Returns dK and dV (B, tokens, Hkv, D), contiguous, tokens in whole blocks.
    """
    run = _Backward(plan, query, key, value, lse, delta, grad_out, scale, deterministic)
    run.everything(blocks, index, grad_query, forced=forced, added=True)
    return run.grad_key, run.grad_value
