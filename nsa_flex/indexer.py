"""`indexer_topk`: top-k blocks by an indexer's scores, without a tensor of queries by keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa_flex.backends.branch import query_positions
from nsa_flex.config import checked_int
from nsa_flex.inputs import check_positions, check_query_and_key
from nsa_flex.installed import HAS_TRITON

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_SCORES = 1 << 26  # in memory at once


def indexer_topk(
    query: Float[Tensor, "B H Sq D"],
    key: Float[Tensor, "B Hk Sk D"],
    *,
    block_size: int = 128,
    num_blocks: int = 16,
    num_local_blocks: int = 1,
    query_offset: int | Int[Tensor, " B"] | None = None,
    document_start: Int[Tensor, "B Sq"] | None = None,
) -> Int[Tensor, "B H Sq n"]:
    """The blocks that hold the keys most like each query: what `selected_attention` takes.

    A block's score is the largest `query . key` (not scaled, float32 or better) of its keys up to
    the query. Chunked over queries: at most 2^26 scores are in memory at once. On CUDA one Triton
    kernel reduces each block as it is scored.

    Args:
        query: (B, H, Sq, D), one head for each KV head of the attention.
        key: (B, Hk, Sk, D), Hk divides H (1 where all heads share the keys), in the query's dtype.
        block_size: keys of a block, a power of two, at least 16.
        num_blocks: blocks selected for a query, local ones among them.
        num_local_blocks: the query's own block and those before it, selected whatever they score.
        query_offset: key index of query 0, an int or int (B,); by default Sk - Sq.
        document_start: int (B, Sq), key index of the first token of each query's document, a
            multiple of the block size. Blocks before it are not selected.

    Returns:
        int32 (B, H, Sq, n), n = min(num_blocks, ceil(Sk / block_size)): the best first, local
        blocks before all others, -1 past the last; which of equal ones is not defined. It carries
        no gradient.

    Raises:
        ValueError: shapes, head counts, dtypes, devices or sizes that do not fit.

    Source: the lightning indexer of MiniMax-M3 (transformers, `minimax_m3_vl`).

    >>> query, key = torch.randn(1, 4, 64, 8), torch.randn(1, 1, 64, 8)
    >>> indexer_topk(query, key, block_size=16, num_blocks=2)[0, 0, [0, 20]].shape
    torch.Size([2, 2])
    """
    check_query_and_key(query, key)
    _check_sizes(block_size, num_blocks, num_local_blocks)
    check_positions(query, key, query_offset, document_start)
    _, position = query_positions(query, key, query_offset)
    position = position.to(torch.int32).expand(query.shape[0], -1).contiguous()
    start = None if document_start is None else document_start.to(torch.int32).contiguous()
    query, key = query.detach(), key.detach()
    blocks: Tensor = _indexer_topk(
        query, key, position, start, block_size, num_blocks, num_local_blocks
    )
    return blocks


@torch.library.custom_op("nsa_flex::indexer_topk", mutates_args=())
def _indexer_topk(
    query: Tensor,
    key: Tensor,
    position: Tensor,
    start: Tensor | None,
    block_size: int,
    num_blocks: int,
    num_local: int,
) -> Tensor:
    """`indexer_topk` with the position of each query, int32 (B, Sq)."""
    batch, heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    on_kernel = False
    if HAS_TRITON:
        from nsa_flex.fallback_kernels.topk import block_max

        on_kernel = block_max.unsupported_reason(query, block_size) is None
    width = -(-num_keys // block_size)
    row = batch * heads * (width if on_kernel else num_keys)
    chunk = max(1, MAX_SCORES // max(1, row))
    count = min(num_blocks, width)
    selected = query.new_empty((batch, heads, num_queries, count), dtype=torch.int32)
    for first in range(0, num_queries, chunk):
        span = slice(first, first + chunk)
        own, bound = position[:, span].contiguous(), None
        if start is not None:
            bound = start[:, span].contiguous()
        if on_kernel:
            scores = block_max.block_max(query[:, :, span], key, own, bound, block_size)
        else:
            with torch.autocast(query.device.type, enabled=False):
                scores = _block_max(query[:, :, span], key, own, bound, block_size)
        selected[:, :, span] = _best(scores, own, bound, block_size, count, num_local)
    return selected


@_indexer_topk.register_fake
def _(query: Tensor, key: Tensor, *options: object) -> Tensor:
    _, _, block_size, num_blocks, _ = options
    width = (key.shape[2] + block_size - 1) // block_size  # type: ignore[operator]
    count = torch.sym_min(num_blocks, width)
    return query.new_empty((*query.shape[:3], count), dtype=torch.int32)


def _block_max(
    query: Tensor, key: Tensor, position: Tensor, start: Tensor | None, block_size: int
) -> Tensor:
    """As `fallback_kernels.topk.block_max`, by PyTorch operations."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    keys = key.to(dtype).repeat_interleave(group, 1).transpose(-1, -2)
    scores = query.to(dtype) @ keys  # [B, H, Sq, Sk]
    place = torch.arange(key.shape[2], device=key.device)
    hidden = place > position[..., None]  # [B, Sq, Sk]
    if start is not None:
        hidden = hidden | (place < start[..., None])
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    unused = -key.shape[2] % block_size
    scores = torch.nn.functional.pad(scores, (0, unused), value=float("-inf"))
    return scores.unflatten(-1, (-1, block_size)).amax(-1)


def _best(
    scores: Tensor,
    position: Tensor,
    start: Tensor | None,
    block_size: int,
    count: int,
    num_local: int,
) -> Tensor:
    """The best `count` blocks of scores (B, H, Sq, blocks), -1 for those of -inf."""
    block = torch.arange(scores.shape[-1], device=scores.device)
    own = (position // block_size)[..., None]
    local = (block <= own) & (block > own - num_local)  # [B, Sq, blocks]
    if start is not None:
        local = local & (block >= (start // block_size)[..., None])
    scores = scores.masked_fill(local[:, None], float("inf"))
    best, index = scores.topk(count, dim=-1)
    return index.masked_fill(best == float("-inf"), -1).to(torch.int32)


def _check_sizes(block_size: int, num_blocks: int, num_local_blocks: int) -> None:
    """Raises ValueError, or TypeError for no int, naming the first that cannot be."""
    checked_int("block_size", block_size)
    checked_int("num_blocks", num_blocks)
    checked_int("num_local_blocks", num_local_blocks)
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} must be a power of two, at least 16")
    if not 0 <= num_local_blocks <= num_blocks or num_blocks < 1:
        raise ValueError(
            f"num_blocks={num_blocks} must be at least 1, and num_local_blocks={num_local_blocks} "
            "from 0 to that"
        )
