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
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.base2 import LOG2E
from nsa_flex.fallback_kernels.selected_index import (
    SelectedIndex,
    build_index,
    index_views,
)
from nsa_flex.fallback_kernels.selected_merge import query_gradient_kernel
from nsa_flex.fallback_kernels.selected_plan import (
    INITIAL_CHUNK_TOKENS,
    SelectedPlan,
    Window,
    empty_natural,
    natural_rows,
    padded,
    round_up,
    strides,
)
from nsa_flex.fallback_kernels.selected_tiles import (
    first_entry,
    group_rows,
    item_of,
    load_block,
    load_rows,
    load_some_rows,
    row_lse_log2,
    store_rows,
)
from nsa_flex.fallback_kernels.selected_union import build_unions

DELTA_ROWS = 32
NUMBER_ROWS = 1024
# How a program hands its dK and dV over.
STORE = tl.constexpr(0)
ATOMIC = tl.constexpr(1)
ADD = tl.constexpr(2)


@triton.jit
def delta_kernel(
    out_ptr,
    grad_out_ptr,
    grad_lse_ptr,
    delta_ptr,
    grad_lse_stride_b,
    grad_lse_stride_h,
    grad_lse_stride_s,
    num_queries,
    query_heads,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = sum(out * grad_out) - grad_lse, (B, Sq, Hq)."""
    b = tl.program_id(1).to(tl.int64)
    num_lines = num_queries * query_heads
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = line < num_lines
    first = b * num_lines
    out = load_some_rows(out_ptr + first * VALUE_DIM, line, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS)
    grad_out = load_some_rows(
        grad_out_ptr + first * VALUE_DIM, line, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS
    )
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        i = (line // query_heads).to(tl.int64)
        place = b * grad_lse_stride_b + i * grad_lse_stride_s
        place += (line % query_heads) * grad_lse_stride_h
        delta -= tl.load(grad_lse_ptr + place, mask=row_ok, other=0.0)
    tl.store(delta_ptr + first + line, delta, mask=row_ok)


@triton.jit(do_not_specialize=["num_lines"])
def row_numbers_kernel(lse_ptr, delta_ptr, numbers_ptr, num_lines, ROWS: tl.constexpr):
    """What is gathered with a row, side by side: base-2 log-sum-exp, and delta."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = line < num_lines
    lse_log2 = row_lse_log2(lse_ptr, line, row_ok)
    delta = tl.load(delta_ptr + line, mask=row_ok, other=0.0)
    tl.store(numbers_ptr + line * 2, lse_log2, mask=row_ok)
    tl.store(numbers_ptr + line * 2 + 1, delta, mask=row_ok)


@triton.jit
def hand_over(
    base_ptr,
    kv_heads,
    tile,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Put a block's gradient (BLOCK_SIZE, COLUMNS) into the float32 buffer at `base_ptr`."""
    position = tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + (position * (kv_heads * WIDTH))[:, None] + column[None, :]
    ok = tl.full([BLOCK_SIZE, COLUMNS], True, tl.int1)
    if WIDTH != COLUMNS:
        ok = ok & (column < WIDTH)[None, :]
    if MODE == STORE:
        tl.store(pointer, tile, mask=ok)
    elif MODE == ATOMIC:
        tl.atomic_add(pointer, tile, mask=ok, sem="relaxed")
    else:
        tl.store(pointer, tl.load(pointer, mask=ok, other=0.0) + tile, mask=ok)


@triton.jit(do_not_specialize=["first_item", "first_head", "first_list", "window_shift"])
def list_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    numbers_ptr,
    partial_ptr,
    grad_key_ptr,
    grad_value_ptr,
    entries_ptr,
    items_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    first_item,
    first_head,
    first_list,
    window_shift,
    window_tokens,
    num_queries,
    num_keys,
    grad_tokens,
    num_blocks,
    kv_heads,
    scale,
    scale_log2,
    GROUP: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    MODE: tl.constexpr,
):
    """Free choices: dK and dV of one chunk of one list, and its share of dQ.

    `numbers_ptr`: base-2 log-sum-exp and delta of every row, as `row_numbers_kernel` writes them.
    """
    start, stop, batch, head, within, block = item_of(
        items_ptr,
        first_item + tl.program_id(0),
        first_head,
        first_list,
        kv_heads,
        num_blocks,
        False,
    )
    if start >= stop:
        return
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    grad_out_ptr = group_rows(grad_out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    numbers_ptr = group_rows(numbers_ptr, b, h, num_queries, kv_heads, GROUP, 2)
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    k = load_block(key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS)
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS
    )
    first = first_entry(within, window_tokens, window_shift, NUM_SLOTS)

    TOKENS: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token = row // GROUP
    member = row % GROUP
    grad_k = tl.zeros([BLOCK_SIZE, HEAD_COLUMNS], tl.float32)
    grad_v = tl.zeros([BLOCK_SIZE, VALUE_COLUMNS], tl.float32)
    for tile in tl.range(start, stop, TOKENS, num_stages=STAGES):
        # Rows past the end repeat the last entry with probability 0: no load needs a mask.
        entry = tl.load(entries_ptr + tl.minimum(tile + token, stop - 1))
        line = (entry // NUM_SLOTS) * query_heads + member
        q = load_rows(query_ptr, line, WIDE, HEAD_DIM, HEAD_COLUMNS)
        grad_out = load_rows(grad_out_ptr, line, WIDE, VALUE_DIM, VALUE_COLUMNS)
        row_ok = (token < TOKENS) & (tile + token < stop)
        numbers = tl.load(numbers_ptr + line[:, None] * 2 + tl.arange(0, 2)[None, :])
        lse_log2, delta = tl.split(numbers)
        lse_log2 = tl.where(row_ok, lse_log2, float("inf"))
        # Keys as rows: probabilities and their gradient are then operands of dV and dK as they
        # lie in registers, and only dQ needs a transposed copy.
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_log2[None, :])
        grad_v = tl.dot(p.to(grad_out.dtype), grad_out, grad_v, input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        grad_scores = (p * (grad_p - delta[None, :])).to(q.dtype)
        # Always so. Triton's pipeliner starts the next tile's loads after all that is no branch:
        # they are on their way while these two products run and dQ is stored.
        if tile < stop:
            grad_k = tl.dot(grad_scores, q, grad_k, input_precision=PRECISION)
            grad_q = tl.dot(tl.trans(grad_scores), k, input_precision=PRECISION)
            # Read once more: kept, it would take registers that spill.
            entry = tl.load(entries_ptr + tile + token, mask=row_ok, other=0)
            place = (first + entry) * GROUP + member
            store_rows(partial_ptr, place, grad_q, row_ok, WIDE, HEAD_DIM, HEAD_COLUMNS, True)

    grad_line = (b * grad_tokens + block * BLOCK_SIZE) * kv_heads + h
    grad_key_ptr += grad_line * HEAD_DIM
    grad_value_ptr += grad_line * VALUE_DIM
    hand_over(grad_key_ptr, kv_heads, grad_k * scale, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, MODE)
    hand_over(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS, MODE)


@triton.jit
def dense_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    numbers_ptr,
    summary_ptr,
    grad_key_ptr,
    grad_value_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    query_offset,
    num_queries,
    num_keys,
    grad_tokens,
    kv_heads,
    scale,
    scale_log2,
    GROUP: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    CHUNK: tl.constexpr,
    LOCALS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Dense candidates: dK and dV of one block from consecutive queries.

    LOCALS: blocks in a chunk; 0 leaves local blocks out.

    A program takes a block as a local one, or a chunk of the later queries that have it as an
    initial one. Programs that read the same queries run at the same time, so that most of them
    find these in the cache: chunks stand beside the blocks they lie in, and every other block
    begins with its later queries, which are the next block's own.

    Every block of keys has a first sum by one program, which stores it: 0 where no query is near.
    Initial blocks have many; they start at 0 and are added to.
    """
    turn = tl.program_id(0) // (LOCALS + INITIAL)
    place = tl.program_id(0) % (LOCALS + INITIAL)
    batch_head = tl.program_id(1)
    b = (batch_head // kv_heads).to(tl.int64)
    h = (batch_head % kv_heads).to(tl.int64)
    is_local = place < LOCALS
    block = tl.where(is_local, turn * LOCALS + place, place - LOCALS)
    start = tl.where(is_local, block, block + LOCAL) * BLOCK_SIZE
    start += tl.where(is_local, 0, turn * CHUNK)
    stop = start + tl.where(is_local, LOCAL * BLOCK_SIZE, CHUNK)
    # As indices of queries; those before the first one or after the last do not exist.
    start = tl.maximum(start - query_offset, 0)
    stop = tl.minimum(stop - query_offset, num_queries)
    stores = is_local & (block >= INITIAL) & (block * BLOCK_SIZE < grad_tokens)
    if (start >= stop) & ~stores:
        return

    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    grad_out_ptr = group_rows(grad_out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    numbers_ptr = group_rows(numbers_ptr, b, h, num_queries, kv_heads, GROUP, 2)
    summary_ptr += (b * kv_heads + h) * num_queries
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    k = load_block(key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS)
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS
    )
    key_index = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE) - query_offset

    TOKENS: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token = row // GROUP
    member = row % GROUP
    grad_k = tl.zeros([BLOCK_SIZE, HEAD_COLUMNS], tl.float32)
    grad_v = tl.zeros([BLOCK_SIZE, VALUE_COLUMNS], tl.float32)
    tiles = tl.cdiv(tl.maximum(stop - start, 0), TOKENS)
    skipped = tl.where(is_local & (block % 2 == 1), tiles // 2, 0)
    for i in tl.range(0, tiles, num_stages=STAGES):
        tile = start + (i + skipped) % tiles * TOKENS
        query = tl.minimum(tile + token, stop - 1)
        line = query * query_heads + member
        q = load_rows(query_ptr, line, WIDE, HEAD_DIM, HEAD_COLUMNS)
        grad_out = load_rows(grad_out_ptr, line, WIDE, VALUE_DIM, VALUE_COLUMNS)
        row_ok = (token < TOKENS) & (tile + token < stop)
        numbers = tl.load(numbers_ptr + line[:, None] * 2 + tl.arange(0, 2)[None, :])
        lse_log2, delta = tl.split(numbers)
        lse_log2 = tl.where(row_ok, lse_log2, float("inf"))
        age = (query + query_offset) // BLOCK_SIZE - block
        candidate = tl.where(age < LOCAL, age, LOCAL + block)
        chosen = ((tl.load(summary_ptr + query) >> candidate) & 1) != 0
        # The last key that the row sees, none if it did not choose the block.
        limit = tl.where(chosen, query, -query_offset - 1)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        p = tl.where(key_index[None, :] <= limit[:, None], p, 0.0)
        grad_v = tl.dot(
            tl.trans(p.to(grad_out.dtype)), grad_out, grad_v, input_precision=PRECISION
        )
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
        grad_scores = (p * (grad_p - delta[:, None])).to(q.dtype)
        if i < tiles:  # always: see the lists
            grad_k = tl.dot(tl.trans(grad_scores), q, grad_k, input_precision=PRECISION)

    grad_line = (b * grad_tokens + block * BLOCK_SIZE) * kv_heads + h
    grad_key_ptr += grad_line * HEAD_DIM
    grad_value_ptr += grad_line * VALUE_DIM
    grad_k *= scale
    if stores:
        hand_over(grad_key_ptr, kv_heads, grad_k, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, STORE)
        hand_over(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS, STORE)
    else:
        hand_over(grad_key_ptr, kv_heads, grad_k, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, ATOMIC)
        hand_over(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS, ATOMIC)


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
        assert natural_rows(lse)
        assert natural_rows(delta)
        # Without float atomics a list is one program, and initial blocks are lists as well.
        self.plan = replace(plan, num_initial=0) if deterministic else plan
        self.chunk = plan.window_tokens if deterministic else plan.chunk_tokens
        self.deterministic = deterministic
        self.query, self.key, self.value, self.grad_out = query, key, value, grad_out
        self.lse, self.delta = lse, delta
        self.scale = scale
        self.numbers = _row_numbers(lse, delta)
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
            self.scale * LOG2E,
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
            self.scale * LOG2E,
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
            self.scale * LOG2E,
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
        partial = torch.empty(
            (plan.partial_rows, plan.head_dim), dtype=self.query.dtype, device=self.query.device
        )
        self.launch_dense(parts.summary, local=forced)
        for window in plan.windows(self.chunk):  # they share `partial`
            self.launch_lists(window, parts, partial)
            self.launch_merge(
                window, parts.summary, partial, grad_query, forced=forced, added=added
            )


def row_deltas(
    plan: SelectedPlan, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """rowsum(out * grad_out) - grad_lse in float32, (B, Hq, Sq) with memory (B, Sq, Hq)."""
    shape = (plan.batch, plan.num_queries, plan.query_heads)
    delta = torch.empty(shape, dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(plan.num_queries * plan.query_heads, DELTA_ROWS), plan.batch)
    lse_gradient = delta.transpose(1, 2) if grad_lse is None else grad_lse
    delta_kernel[grid](
        out,
        grad_out,
        lse_gradient,
        delta,
        *lse_gradient.stride(),
        plan.num_queries,
        plan.query_heads,
        VALUE_DIM=plan.value_dim,
        VALUE_COLUMNS=padded(plan.value_dim),
        WIDE=plan.wide,
        HAS_GRAD_LSE=grad_lse is not None,
        ROWS=DELTA_ROWS,
    )
    return delta.transpose(1, 2)


def _row_numbers(lse: Tensor, delta: Tensor) -> Tensor:
    """Of (B, H, S) numbers with natural memory: float32 (B, S, H, 2), see `row_numbers_kernel`."""
    batch, heads, tokens = lse.shape
    numbers = torch.empty((batch, tokens, heads, 2), dtype=torch.float32, device=lse.device)
    grid = (triton.cdiv(lse.numel(), NUMBER_ROWS),)
    row_numbers_kernel[grid](lse, delta, numbers, lse.numel(), ROWS=NUMBER_ROWS)
    return numbers


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
    grad_query = empty_natural(
        query, plan.query_heads, plan.num_queries, plan.head_dim, query.dtype
    )
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
