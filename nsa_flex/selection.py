"""Top-k block selection in float32: Eq. 9 and 10, initial and local blocks, the best others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig, SelectionRule
from nsa_flex.fallback_kernels.common.every_block import every_block
from nsa_flex.installed import HAS_TRITON

# Float32 scores alive at once: 2^26 (256 MB) whatever S is.
MAX_SCORES = 1 << 26


def choose_blocks(
    query: Tensor,
    compressed_key: Tensor,
    *,
    config: NSAConfig,
    scale: float,
    num_blocks: int,
    positions: Tensor,
    document_start: Tensor | None = None,
    lse: Tensor | None = None,
    coarse: int = 1,
) -> Tensor:
    """The blocks each query and KV head attends: initial and local ones, then the highest scores.

    `p_slc[j] = sum_m sum_n p_cmp[(l'/d) j + m - n]` summed over the G heads of the group (Eq. 9
    and 10 of arXiv 2502.11089), where p_cmp is the softmax of the compressed branch. Which blocks
    these scores choose, `config.selection` says. Equal scores take the lower index. Float32
    throughout; chunked over queries, so that at most 2^26 scores exist at once. Carries no
    gradient. On CUDA fused Triton kernels where they take the inputs, else PyTorch operations.

    Args:
        query: (B, Hq, Sq, D); compressed_key: (B, Hkv, N, D), same dtype.
        scale: factor of query . key before the softmax.
        num_blocks: selectable blocks among the keys, ceil(Sk / l').
        positions: int (B or 1, Sq), key index of each query.
        document_start: int (B, Sq), first key of each query's document, a multiple of l'.
        lse: float32 (B, Hq, Sq), natural log-sum-exp of the compressed branch, float32 accurate;
            it saves the fused kernels a pass over the keys.
        coarse: scores are exp(s - lse), where lse is that of compressed blocks `coarse` times as
            long and as far apart; 1 for the softmax.

    Returns:
        int32 (B, Hkv, Sq, n), ascending, -1 behind the last block where there are fewer than n.
        A NaN score counts as 0: the initial and local blocks are always there.
    """
    config.specialize()
    if query.device.type == "cuda" and HAS_TRITON:
        from nsa_flex.fallback_kernels.topk import interface as topk

        if topk.unsupported_reason(query, compressed_key, config, num_blocks, coarse) is None:
            windows = compressed_key.detach()
            return topk.select_topk_blocks(
                query,
                compressed_key,
                lse,
                positions,
                document_start,
                config=config,
                scale=scale,
                num_blocks=num_blocks,
                coarse_key=None if coarse == 1 else coarse_keys(windows, config, coarse),
                coarse=coarse,
            )
    return _choose_blocks(
        query.detach(),
        compressed_key.detach(),
        positions,
        document_start,
        scale,
        num_blocks,
        config.counts,
        coarse,
    )


@torch.library.custom_op("nsa_flex::choose_blocks", mutates_args=())
def _choose_blocks(
    query: Tensor,
    compressed_key: Tensor,
    positions: Tensor,
    document_start: Tensor | None,
    scale: float,
    num_blocks: int,
    counts: list[int],
    coarse: int = 1,
) -> Tensor:
    config = NSAConfig.of_counts(counts)
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_compressed = compressed_key.shape[1:3]
    if num_blocks <= config.num_selected_blocks:
        shape = (batch, kv_heads, num_queries, config.num_selected_blocks)
        return every_block(positions, document_start, shape, config.select_block_size)
    blocks = query.new_empty(
        (batch, kv_heads, num_queries, config.num_selected_blocks), dtype=torch.int32
    )
    coarse_key = None if coarse == 1 else coarse_keys(compressed_key, config, coarse)
    chunk = max(1, MAX_SCORES // max(1, batch * heads * num_compressed))
    # Autocast would make the float32 products half precision, here where it is still on.
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, num_queries, chunk):
            span = slice(start, start + chunk)
            first = None if document_start is None else document_start[:, span]
            of_span = (query[:, :, span], compressed_key, positions[:, span], first)
            scores = _scores(*of_span, config, scale, num_blocks, coarse, coarse_key)
            blocks[:, :, span] = best_blocks(scores, positions[:, span], first, config)
    return blocks


@_choose_blocks.register_fake
def _(query: Tensor, compressed_key: Tensor, *options: Any) -> Tensor:
    num_selected = NSAConfig.of_counts(options[4]).num_selected_blocks
    shape = (query.shape[0], compressed_key.shape[1], query.shape[2], num_selected)
    return query.new_empty(shape, dtype=torch.int32)


def _scores(
    query: Tensor,
    compressed_key: Tensor,
    positions: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    num_blocks: int,
    coarse: int,
    coarse_key: Tensor | None,
) -> Tensor:
    """Of all blocks, float32 (B, Hkv, C, num_blocks), by PyTorch operations."""
    grouped = query.unflatten(1, (compressed_key.shape[1], -1))
    p = group_probabilities(
        *(grouped, compressed_key, positions, document_start, config, scale, coarse, coarse_key)
    )
    return RULES[config.selection].score(p, num_blocks, config)


def group_probabilities(
    query: Tensor,
    compressed_key: Tensor,
    positions: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    coarse: int = 1,
    coarse_key: Tensor | None = None,
) -> Tensor:
    """Softmax of the compressed branch summed over a group: (B, Hkv, G, C, D) -> (B, Hkv, C, N).

    Float32. A query that sees no compressed block gets a row of zeros. With `coarse_key` the
    log-sum-exp is over these instead, of blocks `coarse` times as long and as far apart; a query
    that sees none of them gets zeros, too.
    """
    size, stride = config.compress_block_size, config.compress_stride
    hidden = _hidden(compressed_key.shape[2], size, stride, positions, document_start)
    logits = _float32_products(query, compressed_key).mul_(scale)  # [B, Hkv, G, C, N]
    logits = logits.masked_fill_(hidden, float("-inf"))
    if coarse_key is None:
        p = logits.softmax(-1)
    else:
        unseen = _hidden(
            *(coarse_key.shape[2], coarse * size, coarse * stride, positions, document_start)
        )
        coarse_logits = _float32_products(query, coarse_key).mul_(scale)
        lse = coarse_logits.masked_fill_(unseen, float("-inf")).logsumexp(-1, keepdim=True)
        p = (logits - lse.masked_fill_(lse == float("-inf"), float("inf"))).exp_()
    return p.masked_fill_(hidden, 0.0).sum(2)


def _hidden(
    number: int, size: int, stride: int, positions: Tensor, document_start: Tensor | None
) -> Tensor:
    """Which of `number` compressed blocks a query does not see, bool (B or 1, 1, 1, C, number)."""
    starts = torch.arange(number, device=positions.device) * stride
    visible = starts + size - 1 <= positions[..., None]  # [b, C, number]
    if document_start is not None:
        visible = visible & (starts >= document_start[..., None])
    return ~visible[:, None, None]


def coarse_keys(compressed_key: Tensor, config: NSAConfig, factor: int) -> Tensor:
    """Means over windows `factor` times as long and as far apart: (B, Hkv, N, D) -> (..., N', D).

    Of means of l tokens, every l-th: they lie side by side, and d divides l. There is at least
    one window, which nobody sees if it is not whole.
    """
    step = config.compress_block_size // config.compress_stride
    reach = (factor - 1) * step  # from the first mean of a window to its last
    number = max(1, (compressed_key.shape[2] - 1 - reach) // factor + 1)
    missing = max(0, reach + 1 - compressed_key.shape[2])
    padded = torch.nn.functional.pad(compressed_key, (0, 0, 0, missing))
    stop = factor * (number - 1) + 1
    parts = [padded[:, :, m * step : m * step + stop : factor] for m in range(factor)]
    dtype = torch.promote_types(compressed_key.dtype, torch.float32)
    return (torch.stack([x.to(dtype) for x in parts]).sum(0) / factor).to(compressed_key.dtype)


def _float32_products(query: Tensor, key: Tensor) -> Tensor:
    """(B, Hkv, G, C, D) @ (B, Hkv, N, D)^T in float32: (B, Hkv, G, C, N)."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return query.float() @ key.float()[:, :, None].mT
    # Half precision inputs, float32 sums and output: exact products at the tensor cores' rate.
    rows, columns = query.flatten(2, 3).flatten(0, 1), key.flatten(0, 1)
    return torch.bmm(rows, columns.mT, out_dtype=torch.float32).view(*query.shape[:-1], -1)


def block_scores(p: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """Eq. 9 in its geometric reading: (..., N) -> (..., num_blocks), float32.

    Score j sums p over i = (l'/d) j + m - n; an i is hit by as many pairs (m, n) as tokens d
    segments of block i fall into block j. Terms outside [0, N) are 0.
    """
    scores = torch.zeros((*p.shape[:-1], num_blocks), device=p.device, dtype=p.dtype)
    for pairs, part in _overlapping(p, num_blocks, config):
        scores += pairs * part
    return scores


def max_pooled_scores(p: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """The largest p of the compressed blocks that overlap a block: (..., N) -> (..., num_blocks).

    For l = 2 d a max-pool of kernel l'/d + 1, stride l'/d and padding 1, as InfLLM-V2's.
    """
    scores = torch.zeros((*p.shape[:-1], num_blocks), device=p.device, dtype=p.dtype)
    for _, part in _overlapping(p, num_blocks, config):
        scores = torch.maximum(scores, part)
    return scores


def _overlapping(p: Tensor, num_blocks: int, config: NSAConfig) -> Iterator[tuple[int, Tensor]]:
    """Of each block the first compressed one that overlaps it, then the second: (..., blocks).

    With the number of segments of d tokens that the two share. 0 outside [0, N).
    """
    per_select = config.select_block_size // config.compress_stride
    per_compress = config.compress_block_size // config.compress_stride
    left = per_compress - 1
    width = per_select * num_blocks + left
    padded = torch.nn.functional.pad(p, (left, max(0, width - left - p.shape[-1])))
    for k in range(per_select + left):  # i = per_select * j + k - left
        pairs = min(k, left, per_select - 1, per_select + left - 1 - k) + 1
        stop = k + per_select * (num_blocks - 1) + 1
        yield pairs, padded[..., k:stop:per_select]


def best_blocks(
    scores: Tensor, positions: Tensor, document_start: Tensor | None, config: NSAConfig
) -> Tensor:
    """What `config.selection` takes by float32 scores (B, Hkv, C, num_blocks).

    Ranks one int64 a block, score bits above reversed index, so that ties have one answer.

    Returns:
        int32 (B, Hkv, C, n), ascending, -1 behind the last.
    """
    num_blocks, n = scores.shape[-1], config.num_selected_blocks
    rank = ranks_of_blocks(scores, positions, document_start, config)
    own, first = _own_and_first(positions, document_start, config)
    best = RULES[config.selection].take(rank, first, own, n)
    chosen = num_blocks - 1 - (best & 0xFFFFFFFF)
    chosen = torch.where(best >= 0, chosen, num_blocks).sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, n - chosen.shape[-1]), value=num_blocks)
    return torch.where(chosen < num_blocks, chosen, -1).to(torch.int32)


def ranks_of_blocks(
    scores: Tensor,
    positions: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    *,
    first: int = 0,
    total: int | None = None,
) -> Tensor:
    """int64 (B, Hkv, C, num_blocks), higher for what is taken earlier, -1 for no candidate.

    Score bits above, the block counted from the last of `total` below: all different.

    Args:
        scores: float32 (B, Hkv, C, num_blocks), of blocks `first` and following.
    """
    total = scores.shape[-1] if total is None else total
    j = first + torch.arange(scores.shape[-1], device=scores.device)
    own, begin = _own_and_first(positions, document_start, config)
    candidate = (j >= begin) & (j <= own)
    initial_local = candidate & (
        (j < begin + config.num_initial_blocks) | (j > own - config.num_local_blocks)
    )
    finite = scores.nan_to_num(nan=0.0).masked_fill(initial_local, float("inf"))
    rank = finite.contiguous().view(torch.int32).long() << 32
    return torch.where(candidate, rank + (total - 1 - j), -1)


def _own_and_first(
    positions: Tensor, document_start: Tensor | None, config: NSAConfig
) -> tuple[Tensor, Tensor]:
    """A query's own block, and the first of its document: (B or 1, 1, C, 1)."""
    own = (positions // config.select_block_size)[:, None, :, None]
    if document_start is None:
        return own, torch.zeros_like(own)
    return own, (document_start // config.select_block_size)[:, None, :, None]


def take_best(rank: Tensor, first: Tensor, own: Tensor, n: int) -> Tensor:
    """The n highest ranks of all candidates, or all of them.

    Args:
        rank: int64 (B, Hkv, C, num_blocks), all different, those of forced blocks highest, -1 for
            a block that is no candidate.
        first: int (B or 1, 1, C or 1, 1), the first block of a query's document.
        own: likewise, the query's own block.

    Returns:
        int64 (B, Hkv, C, at most n), ranks of the blocks that are taken, -1 for none.
    """
    return rank.topk(min(n, rank.shape[-1]), dim=-1, sorted=False).values


def take_best_of_tiles(rank: Tensor, first: Tensor, own: Tensor, n: int) -> Tensor:
    """The n/2 highest ranks before the query's tile of n blocks and the n/2 highest inside.

    Tiles are counted from the document's first block; a query in the first one has all of it.
    That is what the kernel takes that NSA-1B was trained with: it merges tiles, and keeps a half
    of the best so far and a half of the newest. Arguments as of `take_best`.
    """
    half = min(n // 2, rank.shape[-1])
    j = torch.arange(rank.shape[-1], device=rank.device)
    tile = own - (own - first) % n
    parts = [
        torch.where(inside, rank, -1).topk(half, dim=-1, sorted=False).values
        for inside in (j < tile, j >= tile)
    ]
    best, every = torch.cat(parts, -1), take_best(rank, first, own, n)
    every = torch.nn.functional.pad(every, (0, best.shape[-1] - every.shape[-1]), value=-1)
    return torch.where(tile == first, every, best)


class Rule(NamedTuple):
    """How blocks are chosen: two functions.

    score: from probabilities of compressed blocks (B, Hkv, C, N), the number of blocks and the
        config to scores (B, Hkv, C, num_blocks), not negative.
    take: from ranks to those that are taken, as `take_best`.
    """

    score: Callable[[Tensor, int, NSAConfig], Tensor]
    take: Callable[[Tensor, Tensor, Tensor, int], Tensor]


RULES: dict[SelectionRule, Rule] = {
    "top_k": Rule(block_scores, take_best),
    "tiled_top_k": Rule(block_scores, take_best_of_tiles),
    "max_pool": Rule(max_pooled_scores, take_best),
}
