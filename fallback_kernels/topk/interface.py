"""The fused choice of blocks as a custom operator: scores by chunks of queries, then the best n.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import (
    INTERPRETED,
    gluon_unsupported_reason,
    supports_tma,
    triton_unsupported_reason,
)
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.streams import round_robin
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.topk.config import ChoicePlan, Chunk
from nsa_flex.fallback_kernels.topk.lse import lse_kernel
from nsa_flex.fallback_kernels.topk.scores import score_kernel
from nsa_flex.fallback_kernels.topk.select import top_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_GROUP = 64
MAX_SLOTS = 64
MAX_BLOCKS = 1 << 15  # 32 in each thread of the largest program
MAX_HEADS = 65535  # KV heads of all batch rows: one axis of the launch grid
KEY_TILE_DIMS = (16, 32, 64, 128, 256)  # head dims that a tensor copy brings
KEY_TILE_ROWS = 64  # `ChoicePlan.tile_rows` of 2-byte dtypes
NUM_STREAMS = 2  # chunks in memory at once, each on a stream


def unsupported_reason(
    query: Tensor, compressed_key: Tensor, config: NSAConfig, num_blocks: int
) -> str | None:
    """Why the kernels do not take these inputs; None if they do. Looks at no values."""
    heads, dim = query.shape[1], query.shape[3]
    batch, kv_heads = compressed_key.shape[:2]
    limits = (
        (heads // kv_heads, MAX_GROUP, "query heads share a KV head"),
        (dim, MAX_HEAD_DIM, "is the head dim"),
        (config.num_selected_blocks, MAX_SLOTS, "blocks are to be chosen"),
        (num_blocks, MAX_BLOCKS, "blocks can be chosen"),
        (batch * kv_heads, MAX_HEADS, "KV heads in all batch rows"),
    )
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}; the Triton kernels take {DTYPES}"
    for value, most, meaning in limits:
        if value > most:
            return f"{value} {meaning}; the Triton kernels take at most {most}"
    return None


def sm90_unsupported_reason(
    query: Tensor, key_tiles: TensorDescriptor | None, config: NSAConfig
) -> str | None:
    """Why `score_kernel` computes the scores and not `banded_score_kernel`; None if that does."""
    reason = gluon_unsupported_reason(query.device)
    if reason is not None:
        return reason
    # Imported here: other versions of Gluon may lack the names.
    from nsa_flex.fallback_kernels.topk import scores_sm90

    return scores_sm90.unsupported_reason(
        query,
        key_tiles,
        compress=config.compress_block_size,
        stride=config.compress_stride,
        select=config.select_block_size,
    )


# Shapes repeat from layer to layer and step to step.
_plan = lru_cache(maxsize=256)(ChoicePlan)


def choose_blocks(
    query: Tensor,
    compressed_key: Tensor,
    lse: Tensor | None,
    positions: Tensor,
    document_start: Tensor | None,
    *,
    config: NSAConfig,
    scale: float,
    num_blocks: int,
) -> Tensor:
    """`nsa_flex.selection.choose_blocks` from the log-sum-exp of the compressed branch.

    Recomputes the probabilities tile by tile; scores of at most 512 MB exist at once.

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16 or float32, any strides.
        compressed_key: (B, Hkv, N, D).
        lse: float32 (B, Hq, Sq), natural log-sum-exp of the compressed branch; of no matter for a
            query that sees no compressed block. None computes it first, which costs more than
            the choice.
        positions: int (B or 1, Sq), consecutive, the last below `num_blocks * l'`.
        document_start: int (B, Sq), multiples of l', or None.

    Returns:
        int32 (B, Hkv, Sq, n), ascending, -1 at the end. A NaN score counts as 0.

    Raises:
        ValueError: a shape, dtype or device that the kernels do not take.
    """
    reason = unsupported_reason(query, compressed_key, config, num_blocks)
    if reason is not None:
        raise ValueError(reason)
    if lse is not None and (lse.shape != query.shape[:3] or lse.dtype != torch.float32):
        got = f"{lse.dtype} {tuple(lse.shape)}"
        raise ValueError(f"lse must be torch.float32 {tuple(query.shape[:3])}, got {got}")
    return choose_blocks_operator(
        query.detach(),
        compressed_key.detach(),
        None if lse is None else lse.detach(),
        positions,
        document_start,
        scale,
        num_blocks,
        config.counts,
    )


def run_choice(
    query: Tensor,
    compressed_key: Tensor,
    lse: Tensor | None,
    positions: Tensor,
    document_start: Tensor | None,
    scale: float,
    num_blocks: int,
    counts: list[int],
) -> Tensor:
    """What `choose_blocks` runs, and other operators within themselves."""
    config = NSAConfig.of_counts(counts)
    batch, heads, num_queries, dim = query.shape
    query, key = rows_contiguous(query), rows_contiguous(compressed_key)
    compress = {"COMPRESS": config.compress_block_size, "STRIDE": config.compress_stride}
    select = {
        "SELECT": config.select_block_size,
        "NUM_SLOTS": config.num_selected_blocks,
        "INITIAL": config.num_initial_blocks,
        "LOCAL": config.num_local_blocks,
    }
    key_tiles = _key_tiles(key, **compress, **select)
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
        hopper=sm90_unsupported_reason(query, key_tiles, config) is None,
    )
    shape = (batch, plan.kv_heads, num_queries, config.num_selected_blocks)
    blocks = torch.empty(shape, dtype=torch.int32, device=query.device)
    places = _places(positions, document_start)
    with torch.cuda.device_of(query):
        if lse is None:
            lse = _log_sum_exp(plan, query, key, places, scale, **compress)
        chunks = tuple(plan.chunks())
        rooms = [plan.empty_scores(query.device) for _ in range(min(NUM_STREAMS, len(chunks)))]

        def launch(chunk: Chunk, scores: Tensor) -> None:
            _launch_scores(
                plan,
                chunk,
                query,
                key,
                key_tiles,
                lse,
                places,
                scores,
                scale,
                **compress,
                **select,
            )
            _launch_top(plan, chunk, scores, blocks, places, **select)

        round_robin(query.device, chunks, rooms, launch)
    return blocks


choose_blocks_operator = torch.library.custom_op(
    "nsa_flex::choose_blocks_fused", run_choice, mutates_args=()
)


@choose_blocks_operator.register_fake
def _(query: Tensor, compressed_key: Tensor, *others: Any) -> Tensor:
    num_selected = NSAConfig.of_counts(others[-1]).num_selected_blocks
    shape = (query.shape[0], compressed_key.shape[1], query.shape[2], num_selected)
    return query.new_empty(shape, dtype=torch.int32)


class Places(NamedTuple):
    """Where the queries and their documents are, with the strides of a batch row."""

    positions: Tensor
    starts: Tensor
    position_stride: int
    start_stride: int
    documents: bool


def _places(positions: Tensor, document_start: Tensor | None) -> Places:
    positions = positions.contiguous()
    starts = positions if document_start is None else document_start.contiguous()
    position_stride, start_stride = (
        x.stride(0) if x.shape[0] > 1 else 0 for x in (positions, starts)
    )
    return Places(positions, starts, position_stride, start_stride, document_start is not None)


def _log_sum_exp(
    plan: ChoicePlan,
    query: Tensor,
    key: Tensor,
    places: Places,
    scale: float,
    **constants: int,
) -> Tensor:
    tiles = triton.cdiv(plan.num_queries, plan.tile_tokens)
    splits = plan.splits(plan.num_queries, triton.cdiv(key.shape[2], plan.tile_rows))
    shape = (splits, plan.batch, plan.query_heads, plan.num_queries)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    lse_kernel[(tiles, plan.batch * plan.kv_heads, splits)](
        query,
        key,
        lse,
        places.positions,
        places.starts,
        *strides(query),
        *strides(key),
        places.position_stride,
        places.start_stride,
        plan.num_queries,
        key.shape[2],
        plan.kv_heads,
        base2_scale(scale),
        DOCUMENTS=places.documents,
        **plan.tile_constants(),
        **constants,
        num_warps=4,
    )
    return lse[0] if splits == 1 else lse.logsumexp(0)


def _key_tiles(key: Tensor, **constants: int) -> TensorDescriptor | None:
    """Descriptor of the keys as (B, Hkv, l'/d, N // (l'/d), D) for tensor copies, or None.

    It leaves out the last keys if l'/d does not divide N: blocks that are forced where they exist.
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
        or dim not in KEY_TILE_DIMS
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
        [1, 1, 1, KEY_TILE_ROWS, dim],
    )


def _launch_scores(
    plan: ChoicePlan,
    chunk: Chunk,
    query: Tensor,
    key: Tensor,
    key_tiles: TensorDescriptor | None,
    lse: Tensor,
    places: Places,
    scores: Tensor,
    scale: float,
    **constants: int,
) -> None:
    if chunk.hopper:
        assert key_tiles is not None
        where = (places.positions, places.starts, places.position_stride, places.start_stride)
        # Imported here: other versions of Gluon may lack the names.
        from nsa_flex.fallback_kernels.topk import scores_sm90

        scores_sm90.launch_scores(
            plan, chunk, query, key_tiles, lse, where, scores, base2_scale(scale),
            DOCUMENTS=places.documents, **constants,
        )  # fmt: skip
        return
    tiles = triton.cdiv(chunk.size, plan.tile_tokens)
    splits = plan.splits(chunk.size, triton.cdiv(chunk.width, plan.tile_rows - 1))
    score_kernel[(tiles, plan.batch * plan.kv_heads, splits)](
        query,
        key,
        key_tiles,
        lse,
        places.positions,
        places.starts,
        scores,
        *strides(query),
        *strides(key),
        *lse.stride(),
        places.position_stride,
        places.start_stride,
        chunk.start,
        chunk.size,
        key.shape[2],
        plan.kv_heads,
        chunk.width,
        chunk.pitch,
        base2_scale(scale),
        DOCUMENTS=places.documents,
        COPIES=key_tiles is not None,
        COMPILED=not INTERPRETED,
        **plan.tile_constants(),
        **constants,
        num_warps=4,
        maxnreg=plan.registers,
    )


def _launch_top(
    plan: ChoicePlan,
    chunk: Chunk,
    scores: Tensor,
    blocks: Tensor,
    places: Places,
    **constants: int,
) -> None:
    arguments = (
        scores,
        blocks,
        places.positions,
        places.starts,
        places.position_stride,
        places.start_stride,
        chunk.start,
        chunk.size,
        plan.num_queries,
        chunk.pitch,
    )
    constants |= {
        "SLOT_COLUMNS": triton.next_power_of_2(plan.num_slots),
        "CANDIDATES": chunk.candidates,
        "LANES": chunk.lanes,
        "DEPTH": chunk.depth,
        "DOCUMENTS": places.documents,
    }
    options = {"num_warps": chunk.lanes // 32, "maxnreg": 64}
    top_kernel[(chunk.size, plan.kv_heads, plan.batch)](
        *arguments, **constants, BANDED=chunk.banded, FEW=chunk.few, **options
    )
