"""Top-k block selection as a custom operator: scores by query chunks, then the best n blocks.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.config import KERNEL_RULES, NSAConfig
from nsa_flex.fallback_kernels.common.arch import (
    gluon_unsupported_reason,
    shared_memory_bytes,
    supports_tma,
    triton_unsupported_reason,
)
from nsa_flex.fallback_kernels.common.every_block import every_block
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2
from nsa_flex.fallback_kernels.launch.plans import planned
from nsa_flex.fallback_kernels.launch.streams import round_robin
from nsa_flex.fallback_kernels.topk.config import (
    SPAN,
    SPAN_MIN_TOKENS,
    SPAN_RESIDUES,
    SPAN_STAGES,
    SPAN_TOKENS,
    QueryChunk,
    TopkPlan,
)
from nsa_flex.fallback_kernels.topk.lse import compressed_lse_kernel
from nsa_flex.fallback_kernels.topk.scores import topk_scores_kernel
from nsa_flex.fallback_kernels.topk.select import topk_select_kernel
from nsa_flex.fallback_kernels.topk.span import topk_span_kernel
from nsa_flex.fallback_kernels.topk.tiled import topk_select_tiled_kernel
from nsa_flex.reasons import explained

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_GROUP = 64
MAX_SLOTS = 128
MAX_BANDED = 64  # of these free to choose, where rows of scores come with maxima
MAX_BLOCKS = 1 << 15  # 32 in each thread of the largest CTA
MAX_HEADS = 65535  # KV heads of all batch rows: one axis of the launch grid
TMA_HEAD_DIMS = (16, 32, 64, 128, 256)  # head dims that TMA copies as one tile
KEY_BLOCK_N = 64  # `TopkPlan.block_n` of 2-byte dtypes
NUM_STREAMS = 2  # query chunks in memory at once, each on a stream


@explained
def unsupported_reason(
    query: Tensor, compressed_key: Tensor, config: NSAConfig, num_blocks: int, coarse: int = 1
) -> str | None:
    """Why the kernels do not take these inputs; None if they do. Looks at no values."""
    heads, dim = query.shape[1], query.shape[3]
    batch, kv_heads = compressed_key.shape[:2]
    limits = (
        (heads // kv_heads, MAX_GROUP, "query heads share a KV head"),
        (dim, MAX_HEAD_DIM, "is the head dim"),
        (config.num_selected_blocks, MAX_SLOTS, "blocks are to be selected"),
        (num_blocks, MAX_BLOCKS, "blocks can be selected"),
        (batch * kv_heads, MAX_HEADS, "KV heads in all batch rows"),
    )
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}; the Triton kernels take {DTYPES}"
    if config.selection not in KERNEL_RULES:
        return f"selection is {config.selection!r}; the Triton kernels take {KERNEL_RULES}"
    for value, most, meaning in limits:
        if value > most:
            return f"{value} {meaning}; the Triton kernels take at most {most}"
    if coarse > config.num_selected_blocks:  # whoever sees more blocks sees a coarse one whole
        return f"coarse is {coarse}, more than the {config.num_selected_blocks} selected blocks"
    return None


@explained
def sm90_unsupported_reason(
    query: Tensor, key_tiles: TensorDescriptor | None, config: NSAConfig
) -> str | None:
    """Why the scores come from the kernel in Triton, not that for Hopper; None if from that."""
    reason = gluon_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if config.selection == "max_pool":
        return "selection is 'max_pool'; it adds up probabilities"
    free = config.num_selected_blocks - config.num_forced_blocks
    if free > MAX_BANDED:
        return f"{free} blocks are free to choose; it takes at most {MAX_BANDED}"
    # Imported here: other versions of Gluon may lack the names.
    from nsa_flex.fallback_kernels.topk import scores_sm90

    return scores_sm90.unsupported_reason(
        query,
        key_tiles,
        compress=config.compress_block_size,
        stride=config.compress_stride,
        select=config.select_block_size,
    )


def has_spans(config: NSAConfig, has_documents: bool, num_blocks: int) -> bool:
    """Whether many queries may choose among few blocks, as in packed rows and in short ones."""
    has_few = has_documents or num_blocks <= SPAN
    return config.selection == "top_k" and config.num_selected_blocks < SPAN and has_few


@explained
def span_unsupported_reason(query: Tensor, config: NSAConfig) -> str | None:
    """Why `topk_span_kernel` takes no query; None if it takes those that see few blocks."""
    select = config.select_block_size
    residues = select // config.compress_stride
    element, width = query.element_size(), next_power_of_2(query.shape[3])
    rows = residues * SPAN + SPAN_STAGES * SPAN_TOKENS
    if select < SPAN_MIN_TOKENS or residues not in SPAN_RESIDUES:
        return f"blocks have {select} tokens and {residues} compressed blocks"
    if element == 4:
        return "products of float32 tiles so wide do not fit in registers"
    if rows * width * element > shared_memory_bytes(query.device):
        return f"tiles of head dim {query.shape[3]} do not fit in shared memory"
    return None


# Shapes repeat from layer to layer and step to step.
_plan = lru_cache(maxsize=256)(TopkPlan)


def select_topk_blocks(
    query: Tensor,
    compressed_key: Tensor,
    lse: Tensor | None,
    positions: Tensor,
    document_start: Tensor | None,
    *,
    config: NSAConfig,
    scale: float,
    num_blocks: int,
    coarse_key: Tensor | None = None,
    coarse: int = 1,
) -> Tensor:
    """`nsa_flex.selection.choose_blocks` from the log-sum-exp of the compressed branch.

    Recomputes the probabilities tile by tile; at most 512 MB of scores exist at once.

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16 or float32, any strides.
        compressed_key: (B, Hkv, N, D).
        lse: float32 (B, Hq, Sq), natural log-sum-exp of the compressed branch; ignored for a
            query that sees no compressed block. None computes it first, which costs more than
            the selection.
        positions: int (B or 1, Sq), consecutive, the last below `num_blocks * l'`.
        document_start: int (B, Sq), multiples of l', or None.
        coarse_key: (B, Hkv, N', D), compressed blocks `coarse` times as long and as far apart,
            instead of `lse`: that is then theirs.

    Returns:
        int32 (B, Hkv, Sq, n), ascending, -1 at the end. A NaN score counts as 0.

    Raises:
        ValueError: a shape, dtype or device that the kernels do not take.
    """
    reason = unsupported_reason(query, compressed_key, config, num_blocks, coarse)
    if reason is not None:
        raise ValueError(reason)
    if lse is not None and (lse.shape != query.shape[:3] or lse.dtype != torch.float32):
        got = f"{lse.dtype} {tuple(lse.shape)}"
        raise ValueError(f"lse must be torch.float32 {tuple(query.shape[:3])}, got {got}")
    return topk_operator(
        query.detach(),
        compressed_key.detach(),
        None if lse is None else lse.detach(),
        positions,
        document_start,
        scale,
        num_blocks,
        config.counts,
        None,
        coarse_key,
        coarse,
    )


def run_topk(
    query: Tensor,
    compressed_key: Tensor,
    lse: Tensor | None,
    positions: Tensor,
    document_start: Tensor | None,
    scale: float,
    num_blocks: int,
    counts: list[int],
    longest: int | None = None,
    coarse_key: Tensor | None = None,
    coarse: int = 1,
) -> Tensor:
    """What `select_topk_blocks` runs; operators that contain it call this.

    longest: tokens of the longest document, if known.
    """
    config = NSAConfig.of_counts(counts)
    batch, heads, num_queries, dim = query.shape
    if num_blocks <= config.num_selected_blocks:
        shape = (batch, compressed_key.shape[1], num_queries, config.num_selected_blocks)
        return every_block(positions, document_start, shape, config.select_block_size)
    query, key = rows_contiguous(query), rows_contiguous(compressed_key)
    compress = {"COMPRESS": config.compress_block_size, "STRIDE": config.compress_stride}
    select = {
        "SELECT": config.select_block_size,
        "INITIAL": config.num_initial_blocks,
        "LOCAL": config.num_local_blocks,
    }
    key_tiles = _key_tiles(key, **compress, **select)
    has_documents, longest_blocks = document_start is not None, None
    if has_documents and longest is not None:
        longest_blocks = cdiv(longest, config.select_block_size)
    plan = _plan(
        batch=batch,
        query_heads=heads,
        kv_heads=compressed_key.shape[1],
        num_queries=num_queries,
        head_dim=dim,
        num_blocks=num_blocks,
        num_slots=config.num_selected_blocks,
        select_block_size=config.select_block_size,
        element_size=query.element_size(),
        sm90=sm90_unsupported_reason(query, key_tiles, config) is None,
        spans=has_spans(config, has_documents, num_blocks)
        and span_unsupported_reason(query, config) is None,
        longest=longest_blocks,
        tiled=config.selection == "tiled_top_k",
        maximum=config.selection == "max_pool",
    )
    shape = (batch, plan.kv_heads, num_queries, config.num_selected_blocks)
    blocks = torch.empty(shape, dtype=torch.int32, device=query.device)
    query_positions = _query_positions(positions, document_start)
    with torch.cuda.device_of(query):
        if coarse_key is not None:
            windows = {name: coarse * size for name, size in compress.items()}
            coarse_key = rows_contiguous(coarse_key)
            lse = _log_sum_exp(plan, query, coarse_key, query_positions, scale, **windows)
        elif lse is None:
            lse = _log_sum_exp(plan, query, key, query_positions, scale, **compress)
        if plan.spans:
            _launch_span(
                plan, query, key, lse, blocks, query_positions, scale, **compress, **select
            )
        chunks = tuple(plan.chunks())
        workspaces = [
            plan.empty_workspace(query.device) for _ in range(min(NUM_STREAMS, len(chunks)))
        ]

        def launch(chunk: QueryChunk, scores: Tensor) -> None:
            _launch_scores(
                plan,
                chunk,
                query,
                key,
                key_tiles,
                lse,
                query_positions,
                scores,
                scale,
                **compress,
                **select,
            )
            _launch_select(plan, chunk, scores, blocks, query_positions, **select)

        round_robin(query.device, chunks, workspaces, launch)
    return blocks


topk_operator = torch.library.custom_op(
    "nsa_flex::choose_blocks_fused", planned(run_topk), mutates_args=()
)


@topk_operator.register_fake
def _(query: Tensor, compressed_key: Tensor, *others: Any) -> Tensor:
    num_selected = NSAConfig.of_counts(others[5]).num_selected_blocks
    shape = (query.shape[0], compressed_key.shape[1], query.shape[2], num_selected)
    return query.new_empty(shape, dtype=torch.int32)


class QueryPositions(NamedTuple):
    """Where the queries and their documents are, with the strides of a batch row."""

    positions: Tensor
    starts: Tensor
    position_stride: int
    start_stride: int
    documents: bool


def _query_positions(positions: Tensor, document_start: Tensor | None) -> QueryPositions:
    positions = positions.contiguous()
    starts = positions
    if document_start is not None:  # Triton 3.6 fails to compile a kernel for starts of int64
        starts = document_start.to(torch.int32).contiguous()
    position_stride, start_stride = (
        x.stride(0) if x.shape[0] > 1 else 0 for x in (positions, starts)
    )
    return QueryPositions(
        positions, starts, position_stride, start_stride, document_start is not None
    )


def _log_sum_exp(
    plan: TopkPlan,
    query: Tensor,
    key: Tensor,
    query_positions: QueryPositions,
    scale: float,
    **constants: int,
) -> Tensor:
    tiles = cdiv(plan.num_queries, plan.tile_tokens)
    splits = plan.splits(plan.num_queries, cdiv(key.shape[2], plan.block_n))
    shape = (splits, plan.batch, plan.query_heads, plan.num_queries)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    compressed_lse_kernel[(tiles, plan.batch * plan.kv_heads, splits)](
        query,
        key,
        lse,
        query_positions.positions,
        query_positions.starts,
        strides(query),
        strides(key),
        query_positions.position_stride,
        query_positions.start_stride,
        plan.num_queries,
        key.shape[2],
        plan.kv_heads,
        base2_scale(scale),
        DOCUMENTS=query_positions.documents,
        **plan.tile_constants(),
        **constants,
        num_warps=4,
    )
    return lse[0] if splits == 1 else lse.logsumexp(0)


def _key_tiles(key: Tensor, **constants: int) -> TensorDescriptor | None:
    """TMA descriptor of the keys as (B, Hkv, l'/d, N // (l'/d), D), or None.

    It leaves out the last keys if l'/d does not divide N: they belong to local blocks.
    """
    per, lent = (
        constants["SELECT"] // constants["STRIDE"],
        constants["COMPRESS"] > constants["STRIDE"],
    )
    batch, heads, num_keys, dim = key.shape
    if (
        not supports_tma(key.device)
        or constants["INITIAL"] < lent
        or constants["LOCAL"] < 1 + lent
        or dim not in TMA_HEAD_DIMS
        or key.element_size() != 2
        or num_keys < per
        or key.data_ptr() % 16
        or any(step % 8 for step in key.stride()[:3])
    ):
        return None
    by_batch, by_head, by_key, _ = key.stride()
    return TensorDescriptor(
        key,
        [batch, heads, per, num_keys // per, dim],
        [by_batch, by_head, by_key, per * by_key, 1],
        [1, 1, 1, KEY_BLOCK_N, dim],
    )


def _launch_span(
    plan: TopkPlan,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    blocks: Tensor,
    query_positions: QueryPositions,
    scale: float,
    **constants: int,
) -> None:
    tokens = plan.span_tokens
    topk_span_kernel[(cdiv(plan.num_queries, tokens), plan.batch * plan.kv_heads)](
        query,
        key,
        lse,
        query_positions.positions,
        query_positions.starts,
        blocks,
        strides(query),
        strides(key),
        lse.stride(),
        query_positions.position_stride,
        query_positions.start_stride,
        plan.num_queries,
        key.shape[2],
        plan.kv_heads,
        base2_scale(scale),
        GROUP=plan.group,
        TOKENS=tokens,
        HEAD_DIM=plan.head_dim,
        NUM_SLOTS=plan.num_slots,
        ALL=not plan.has_scores,
        DOCUMENTS=query_positions.documents,
        **constants,
        num_warps=4,
    )


def _launch_scores(
    plan: TopkPlan,
    chunk: QueryChunk,
    query: Tensor,
    key: Tensor,
    key_tiles: TensorDescriptor | None,
    lse: Tensor,
    query_positions: QueryPositions,
    scores: Tensor,
    scale: float,
    **constants: int,
) -> None:
    if chunk.sm90:
        assert key_tiles is not None
        where = (
            query_positions.positions,
            query_positions.starts,
            query_positions.position_stride,
            query_positions.start_stride,
        )
        # Imported here: other versions of Gluon may lack the names.
        from nsa_flex.fallback_kernels.topk import scores_sm90

        scores_sm90.launch_scores(
            plan, chunk, query, key_tiles, lse, where, scores, base2_scale(scale),
            DOCUMENTS=query_positions.documents, SCORED=plan.scored, **constants,
        )  # fmt: skip
        return
    tiles = cdiv(chunk.size, plan.tile_tokens)
    splits = plan.splits(chunk.size, cdiv(chunk.width, plan.block_n - 1))
    topk_scores_kernel[(tiles, plan.batch * plan.kv_heads, splits)](
        query,
        key,
        key_tiles,
        lse,
        query_positions.positions,
        query_positions.starts,
        scores,
        strides(query),
        strides(key),
        lse.stride(),
        query_positions.position_stride,
        query_positions.start_stride,
        chunk.start,
        chunk.size,
        key.shape[2],
        plan.kv_heads,
        chunk.width,
        chunk.pitch,
        base2_scale(scale),
        SCORED=plan.scored,
        DOCUMENTS=query_positions.documents,
        MAXIMUM=plan.maximum,
        **plan.tile_constants(),
        **constants,
        num_warps=4,
        maxnreg=plan.registers,
    )


def _launch_select(
    plan: TopkPlan,
    chunk: QueryChunk,
    scores: Tensor,
    blocks: Tensor,
    query_positions: QueryPositions,
    **constants: int,
) -> None:
    arguments = (
        scores,
        blocks,
        query_positions.positions,
        query_positions.starts,
        query_positions.position_stride,
        query_positions.start_stride,
        chunk.start,
        chunk.size,
        plan.num_queries,
        chunk.pitch,
    )
    grid = (plan.kv_heads, plan.batch)
    if plan.tiled:
        threads = max(32, chunk.width // 32)
        topk_select_tiled_kernel[(chunk.size, *grid)](
            *arguments,
            SELECT=constants["SELECT"],
            NUM_SLOTS=plan.num_slots,
            CANDIDATES=chunk.candidates,
            THREADS=threads,
            DEPTH=chunk.width // threads,
            DOCUMENTS=query_positions.documents,
            num_warps=threads // 32,
        )
        return
    constants |= {
        "CANDIDATES": chunk.candidates,
        "THREADS": chunk.threads,
        "DEPTH": chunk.depth,
        "NUM_SLOTS": plan.num_slots,
        "SCORED": plan.scored,
        "DOCUMENTS": query_positions.documents,
    }
    queries = plan.queries_of_select(chunk.size, query_positions.documents)
    options = {"num_warps": chunk.threads // 32, "maxnreg": 64}
    topk_select_kernel[(cdiv(chunk.size, queries), *grid)](
        *arguments,
        **constants,
        QUERIES=queries,
        BANDED=chunk.banded,
        FEW=chunk.few,
        **options,
    )
