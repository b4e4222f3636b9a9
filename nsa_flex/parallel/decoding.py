"""A decode step over a cache whose tokens are shared out over ranks: each attends what it holds.

Every rank has the same queries and new tokens. Three ways to share tokens out:

- contiguous parts (this one): one edge a rank, and what is stored is a cache like any other, which
  the kernels read as it is. Ranks work alike once the cache is nearly full; window and local
  blocks lie on one or two of them.
- blocks in turn: alike at any length, but each of thousands of edges cuts compressed blocks.
- KV heads: nothing to merge, but no more ranks than KV heads; that is tensor parallelism.

A layer sends three small things, each by one all-gather: `sent_bytes_per_step`.

1. Log-sum-exps of the compressed branch, and, to select blocks, the logits of the last
   compressed blocks, which overlap the next rank's first block.
2. The best blocks of each rank, as ranks of score and index.
3. Outputs of each branch, and the log-sum-exps of the selected and sliding ones.

Nothing waits for the host and all shapes are constant: a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.decoding import Stored
from nsa_flex.installed import HAS_TRITON
from nsa_flex.parallel.parts import LN2, UNSEEN, Part, Partial
from nsa_flex.parallel.shards import SequenceShards, all_gather
from nsa_flex.selection import RULES, ranks_of_blocks, take_best
from nsa_flex.storing import take_slots


def step_over_ranks(
    query: Tensor,
    stored: Stored,
    gates: Tensor,
    *,
    shards: SequenceShards,
    tokens: int,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """NSA of queries at positions `lengths` ... `lengths + T - 1` over a cache on P ranks.

    Sums and log-sum-exps are float32 (float64 of float64). Every rank of `shards` must call this,
    with equal queries, gates and lengths, and gets the same output.

    Args:
        query: (B, Hq, T, D).
        stored: what this rank holds: token `base + i` of each row in slot i, and compressed block
            `base / d + i` in row i, for base = rank · `tokens`; the new tokens among them. Slots
            from `tokens` on serve φ alone. `lengths` are those of whole rows, before the new
            tokens.
        gates: (B, Hq, T, C), of the config's branches.
        tokens: of a rank, a multiple of l'.

    Returns:
        (B, Hq, T, Dv) in the query's dtype.

    Raises:
        ValueError: `config.selection` takes other blocks than the best, as "tiled_top_k" does.
    """
    if RULES[config.selection].take is not take_best:
        raise ValueError(
            'a cache on several ranks chooses blocks by selection "top_k" or "max_pool", got '
            f'"{config.selection}": keep the cache on one rank'
        )
    part = Part.of(shards, tokens)
    own = _parts(query, stored, config)(query, stored, part, config, scale)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    blocks: Tensor | None = None
    if config.compresses:
        (out, lse), tail = own.compressed()
        sent = torch.cat((lse[..., None], tail), -1) if config.has("selected") else lse[..., None]
        found = all_gather(shards, sent)  # [P, B, Hq, T, 1 + l / d - 1]
        if config.has("compressed"):
            outs, lses = [out], [found[..., :1]]
        if config.has("selected"):
            # Before the first rank there is nothing.
            edge = found[shards.rank - 1, ..., 1:] - (0.0 if shards.rank else float("inf"))
            total = part.total // config.select_block_size
            best = own.candidates(_lse_over_ranks(found[..., 0]), edge)
            blocks = choose_over_ranks(best, shards, total, config.num_selected_blocks)
    return merge(outs, lses, own.local(blocks), gates, shards).to(query.dtype)


def _lse_over_ranks(lses: Tensor) -> Tensor:
    """Log-sum-exp of (P, ...), finite; the first rank sees something where any does."""
    finite = lses.clamp(min=UNSEEN)
    return finite[0] - finite.log_softmax(0)[0]  # three kernels, where logsumexp has nine


def _parts(query: Tensor, stored: Stored, config: NSAConfig) -> type[Any]:
    """What computes this rank's parts: Triton kernels where they take the step."""
    if query.device.type == "cuda" and HAS_TRITON:
        from nsa_flex.parallel import decode_kernels

        if decode_kernels.unsupported_reason(query, stored, config) is None:
            return decode_kernels.KernelParts
    return OperationParts


def merge(
    outs: list[Tensor],
    lses: list[Tensor],
    local: list[Partial],
    gates: Tensor,
    shards: SequenceShards,
) -> Tensor:
    """The gated sum of all branches over all ranks, from each rank's parts of them.

    Args:
        outs: (B, Hq, T, Dv) of the compressed branch, if there is one.
        lses: (P, B, Hq, T, 1) of that branch, of all ranks.
        local: of the other branches.
        gates: (B, Hq, T, C).
    """
    outs = [*outs, *(each.out for each in local)]
    sent = torch.cat((*outs, *(each.lse[..., None] for each in local)), -1)
    found = all_gather(shards, sent).split([sent.shape[-1] - len(local), len(local)], -1)
    # Where no rank saw anything, out is 0 on all of them.
    weight = torch.cat((*lses, found[1]), -1).clamp(min=UNSEEN).softmax(0) * gates
    return (found[0].unflatten(-1, (len(outs), -1)) * weight[..., None]).sum((0, -2))


class OperationParts:
    """What a rank attends of its part, by PyTorch operations."""

    def __init__(
        self,
        query: Tensor,
        stored: Stored,
        part: Part,
        config: NSAConfig,
        scale: float,
    ) -> None:
        self.query, self.stored = query, stored
        self.part, self.config, self.scale = part, config, scale
        new = torch.arange(query.shape[2], device=query.device)
        self.positions = stored.lengths[:, None] + new  # [B, T]

    def compressed(self) -> tuple[Partial, Tensor]:
        """The compressed branch, and base-2 logits (B, Hq, T, l / d - 1) of the blocks that
        reach over the end of the part.
        """
        config = self.config
        rows = self.part.tokens // config.compress_stride
        key, value = self.stored[2:4]
        value = value.expand(-1, -1, rows, -1)  # one row where no branch reads them
        start = torch.arange(rows, device=key.device) * config.compress_stride
        last = self.part.base + start + config.compress_block_size - 1
        visible = last <= self.positions[..., None]  # [B, T, N]
        found, self.logits = _attend(self.query, key, value, visible[:, None, None], self.scale)
        reaching = config.compress_block_size // config.compress_stride - 1
        return found, self.logits[..., rows - reaching :] / LN2

    def candidates(self, lse: Tensor, edge: Tensor) -> Tensor:
        """Ranks of the best of this rank's blocks, int64 (B, Hkv, T, at most n), -1 for none.

        Args:
            lse: (B, Hq, T), over all ranks, finite.
            edge: base-2 logits (B, Hq, T, l / d - 1) of blocks that reach into this part.
        """
        config = self.config
        p = (torch.cat((edge * LN2, self.logits), -1) - lse[..., None]).exp()
        kv_heads = self.stored.compressed_key.shape[1]
        summed = p.unflatten(1, (kv_heads, -1)).sum(2).float()
        per_block = config.select_block_size // config.compress_stride
        # One more block in front, of which nothing but what reaches over its end is there.
        rows = torch.nn.functional.pad(summed, (per_block - edge.shape[-1], 0))
        size = config.select_block_size
        number = self.part.tokens // size
        rank = ranks_of_blocks(
            RULES[config.selection].score(rows, number + 1, config)[..., 1:],
            self.positions,
            None,
            config,
            first=self.part.base // size,
            total=self.part.total // size,
        )
        best = min(config.num_selected_blocks, number)
        return rank.topk(best, -1, sorted=False).values

    def local(self, blocks: Tensor | None) -> list[Partial]:
        """The selected branch over those of `blocks` that this rank holds, and the sliding one."""
        query, positions, part = self.query, self.positions, self.part
        config, scale, found = self.config, self.scale, []
        if blocks is not None:
            selected = self.stored.branch(1)
            found = [selected_part(query, *selected, blocks, positions, part, config, scale)]
        if config.has("sliding"):
            sliding = self.stored.branch(2)
            found.append(sliding_part(query, *sliding, positions, part, config, scale))
        return found


def choose_over_ranks(own: Tensor, shards: SequenceShards, total: int, number: int) -> Tensor:
    """int32 (B, Hkv, T, n): the chosen blocks of whole rows, in any order.

    Where there are fewer, the others lie behind the query, or are block `total`.

    Args:
        own: int64 (B, Hkv, T, at most n), ranks of this rank's best blocks, -1 for none.
        total: blocks of a full cache. number: n.
    """
    candidates = all_gather(shards, own).movedim(0, -2).flatten(-2)
    best = candidates.topk(min(number, candidates.shape[-1]), -1, sorted=False).values
    return total - 1 - best.view(torch.int32)[..., ::2]  # the lower halves


def selected_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    positions: Tensor,
    part: Part,
    config: NSAConfig,
    scale: float,
) -> Partial:
    """The selected branch over the chosen blocks that this rank holds."""
    batch, kv_heads, num_queries, _ = blocks.shape
    size = config.select_block_size
    own = blocks - part.base // size
    held = (own >= 0) & (own < part.tokens // size)
    slots = own[..., None] * size + torch.arange(size, device=key.device)
    visible = held[..., None] & (part.base + slots <= positions[:, None, :, None, None])
    slots = slots.clamp(0, part.tokens - 1).flatten(2)  # [B, Hkv, T * n * l']
    row = torch.arange(batch, device=key.device)[:, None, None]
    head = torch.arange(kv_heads, device=key.device)[:, None]
    chosen_key, chosen_value = (
        x[row, head, slots].unflatten(2, (num_queries, -1)).flatten(1, 2) for x in (key, value)
    )  # [B, Hkv * T, n * l', D]
    alone = query.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(1, 3)[:, :, None]
    mask = visible.flatten(3).flatten(1, 2)[:, :, None, None]  # [B, Hkv * T, 1, 1, n * l']
    found, _ = _attend(alone, chosen_key, chosen_value, mask, scale)
    in_turn = (x[:, :, 0].unflatten(1, (kv_heads, num_queries, -1)) for x in found)
    return Partial(*(x.transpose(2, 3).flatten(1, 2) for x in in_turn))


def sliding_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    part: Part,
    config: NSAConfig,
    scale: float,
) -> Partial:
    """The sliding branch over those tokens of the window that this rank holds."""
    width = min(config.window_size + query.shape[2] - 1, part.tokens)
    first = (positions[:, :1] - config.window_size + 1 - part.base).clamp(0, part.tokens - width)
    slots = first + torch.arange(width, device=key.device)  # [B, width]
    now, place = positions[..., None], part.base + slots[:, None]
    visible = (place <= now) & (place > now - config.window_size)  # [B, T, width]
    key, value = take_slots(key, slots), take_slots(value, slots)
    return _attend(query, key, value, visible[:, None, None], scale)[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
) -> tuple[Partial, Tensor]:
    """Softmax attention under a mask (B, Hkv or 1, 1, T, K), and its logits (B, Hq, T, K)."""
    precision = torch.promote_types(query.dtype, torch.float32)  # of the choice of blocks, too
    grouped = query.unflatten(1, (key.shape[1], -1)).to(precision)  # [B, Hkv, G, T, D]
    logits = grouped @ key[:, :, None].mT.to(precision) * scale
    logits = logits.masked_fill(~visible, float("-inf"))
    lse = logits.logsumexp(-1)
    weights = (logits - lse.clamp(min=UNSEEN)[..., None]).exp()
    out = weights.to(value.dtype) @ value[:, :, None]
    return Partial(out.to(precision).flatten(1, 2), lse.flatten(1, 2)), logits.flatten(1, 2)


NUM_COLLECTIVES = 3  # of a layer's step


def sent_bytes_per_step(
    num_ranks: int,
    num_query_heads: int,
    num_kv_heads: int,
    value_head_dim: int,
    *,
    config: NSAConfig,
    batch_size: int = 1,
    num_tokens: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that a rank sends in one layer's decode step, in closed form; no length is in it.

    In a ring a rank passes every part but one on: (P - 1) times its own.

    Args:
        num_ranks: P. num_query_heads, num_kv_heads, value_head_dim: Hq, Hkv and Dv.
        batch_size, num_tokens: B and T.
        dtype: of queries; what is sent is float32, or float64, and int64 for ranks of blocks.

    >>> sent_bytes_per_step(2, 32, 8, 128, config=NSAConfig())
    50688
    """
    wide = torch.promote_types(dtype, torch.float32).itemsize
    reaching = config.compress_block_size // config.compress_stride - 1
    local = config.has("selected") + config.has("sliding")
    numbers = len(config.branches) * value_head_dim + local
    numbers += config.compresses + (reaching if config.has("selected") else 0)
    blocks = config.num_selected_blocks * 8 if config.has("selected") else 0
    each = num_query_heads * numbers * wide + num_kv_heads * blocks
    return (num_ranks - 1) * batch_size * num_tokens * each
