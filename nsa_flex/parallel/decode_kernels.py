"""What a rank attends of its part of a cache in a decode step, by Triton kernels.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.decoding import Stored
from nsa_flex.decoding import unsupported_reason as step_unsupported_reason
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.decode.attend_spans import attend_spans, merge_splits
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import (
    Cache,
    launch_compressed,
    launch_topk,
    step_values,
)
from nsa_flex.parallel.parts import Part, Partial

LN2 = 0.6931471805599453
INFINITE = 0x7F800000 << 32  # a rank's bits of an infinite score
MOST_SLOTS = 64


def unsupported_reason(query: Tensor, stored: Stored, config: NSAConfig) -> str | None:
    """Why these kernels do not take such a step; None if they do."""
    if query.shape[2] != 1:
        return f"{query.shape[2]} new tokens a row; the kernels of a sharded cache take one"
    if config.compress_block_size != 2 * config.compress_stride:
        return "compressed blocks of other than two strides reach further over an edge"
    if not config.has("selected"):
        return "there is no selected branch"
    if config.selection != "top_k":
        return f"selection is {config.selection!r}"
    slots, blocks = _slots(config), stored.key.shape[2] // config.select_block_size - 1
    if slots > MOST_SLOTS:
        return f"{slots} selected, initial and local blocks; at most {MOST_SLOTS} are ranked"
    if blocks < slots:
        return f"a part has {blocks} blocks; the kernels rank at least {slots}"
    return step_unsupported_reason(query, stored.key, stored.value, config, stored.num_sets)


def _slots(config: NSAConfig) -> int:
    """Room for n blocks besides those that are taken out again."""
    return config.num_selected_blocks + config.num_initial_blocks + config.num_local_blocks


def _ranking(plan: DecodePlan) -> DecodePlan:
    """The plan of the top-k kernel over all blocks of a part, whatever a query's own is."""
    config = dataclasses.replace(
        plan.config,
        num_selected_blocks=_slots(plan.config),
        num_initial_blocks=0,
        num_local_blocks=1,
    )
    return dataclasses.replace(plan, config=config, compressed_splits=1)


class KernelParts:
    """As `OperationParts`, of one new token a row."""

    def __init__(
        self,
        query: Tensor,
        stored: Stored,
        positions: Tensor,
        part: Part,
        config: NSAConfig,
        scale: float,
    ) -> None:
        self.query, self.stored, self.config = rows_contiguous(query), stored, config
        self.base, self.tokens, self.scale = part.base, part.tokens, scale
        self.total_blocks = part.total // config.select_block_size
        self.own = positions[:, 0] - part.base  # [B], place of the query in this part
        key, value = stored.branch(1)
        plan = DecodePlan.of(query, key, value, stored.compressed_key, config)
        self.plan = dataclasses.replace(plan, pdl=False)

    def compressed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The branch's out (B, Hq, 1, Dv) and lse (B, Hq, 1), and what overlaps the next part.

        Of a config without that branch `out` is anything.
        """
        plan, config = self.plan, self.config
        # The last block of the part is whole with the tokens behind it; no later one is here.
        last = self.tokens + config.compress_block_size - config.compress_stride - 1
        lengths = self.own.clamp(max=last).to(torch.int32)
        stored = self.stored
        cache = Cache(*stored.branch(1), stored.compressed_key, stored.compressed_value, lengths)
        workspace = plan.workspace(self.query.device)
        workspace.row_sum.zero_()
        workspace.score.fill_(float("-inf"))
        with torch.cuda.device_of(self.query):
            values = step_values(plan, self.query, cache, workspace, self.scale)
            launch_compressed(plan, cache, values)
        out, lse = merge_splits(*workspace[:3], 0, plan.compressed_splits, plan.query_heads)
        # log2 of what each head adds to a block, and each tile to the first block of the next.
        self.score = workspace.score
        self.blocks, carried = self.score.split(
            (plan.padded_blocks, plan.padded_blocks // plan.tile_blocks), 2
        )  # [units, G, blocks], [units, G, tiles]
        number = self.tokens // config.select_block_size
        tile, place = divmod(number, plan.tile_blocks)
        edge = carried[..., tile - 1] if place == 0 else self.blocks[..., number]
        tail = (edge * LN2 - lse.view(edge.shape)).exp().nan_to_num(nan=0.0)
        return out, lse, tail.view(*lse.shape, 1)

    def candidates(self, lse: Tensor, edge: Tensor) -> Tensor:
        """As `OperationParts.candidates`; the kernel ranks all blocks of the part alike.

        Initial and local blocks are then taken out of what it found, and put in front.
        """
        plan, config = self.plan, self.config
        units, group = plan.units, plan.group
        log = (lse / LN2).view(units, group)
        first = self.blocks[..., 0]
        first.copy_(torch.logaddexp2(first, edge.view(units, group).log2() + log))
        ranked = _ranking(plan)
        workspace = ranked.workspace(self.query.device)._replace(score=self.score)
        workspace.row_max[..., 0], workspace.row_sum[..., 0] = log, 1.0
        # As if of a query in the first block behind the part, which is its one local block.
        lengths = torch.full_like(self.stored.lengths, self.tokens)
        cache = Cache(*self.stored[:4], lengths)
        with torch.cuda.device_of(self.query):
            launch_topk(ranked, step_values(ranked, self.query, cache, workspace, self.scale))
        found = workspace.candidates[..., : ranked.num_topk].reshape(
            plan.batch, plan.kv_heads, 1, -1
        )
        block = ranked.padded_blocks - 1 - (found & 0xFFFFFFFF)
        size = config.select_block_size
        block = torch.where(found >= 0, block + self.base // size, -1)
        return self._best(found, block, config.num_selected_blocks)

    def _best(self, found: Tensor, block: Tensor, number: int) -> Tensor:
        """The highest ranks of what was found and of the initial and local blocks held here."""
        config, size, last = self.config, self.config.select_block_size, self.total_blocks - 1
        own = ((self.own + self.base) // size)[:, None, None, None]
        is_free = (block >= config.num_initial_blocks) & (block <= own - config.num_local_blocks)
        rank = torch.where(is_free, (found >> 32 << 32) + (last - block), -1)
        device = own.device
        initial = torch.arange(config.num_initial_blocks, device=device).expand(*own.shape[:3], -1)
        local = own - torch.arange(config.num_local_blocks, device=device)
        local = torch.where(local >= config.num_initial_blocks, local, -1)  # once each
        forced = torch.cat((initial, local), -1)
        begin, end = self.base // size, (self.base + self.tokens) // size
        is_held = (forced >= begin) & (forced < end) & (forced <= own)
        forced = torch.where(is_held, INFINITE + (last - forced), -1)
        forced = forced.expand(-1, rank.shape[1], -1, -1)
        return torch.cat((forced, rank), -1).topk(number, -1, sorted=False).values

    def local(self, blocks: Tensor | None) -> dict[str, Partial]:
        """Out and lse of the selected branch, over those of `blocks` held here, and the sliding.

        Without a sliding branch its spans are empty.

        Args:
            blocks: int32 (B, Hkv, 1, n), of whole rows.
        """
        assert blocks is not None
        config, size = self.config, self.config.select_block_size
        end = (self.own + 1).clamp(0, self.tokens)  # [B], behind the last key seen here
        own = blocks[:, :, 0] - self.base // size  # [B, Hkv, n]
        held = (blocks[:, :, 0] >= 0) & (own >= 0) & (own < self.tokens // size)
        first = torch.where(held, own * size, 0)
        stop = torch.where(held, torch.minimum(first + size, end[:, None, None]), 0)
        spans = torch.stack((first, stop), -1)
        seen = config.window_size if config.has("sliding") else 0
        begin = (self.own + 1 - seen).clamp(0, self.tokens)
        count = max(1, -(-seen // size))
        starts = begin[:, None] + torch.arange(count, device=begin.device) * size  # [B, count]
        window = torch.stack((starts, torch.minimum(starts + size, end[:, None])), -1)
        window = window[:, None].expand(-1, spans.shape[1], -1, -1)
        selected, sliding = attend_spans(
            self.plan,
            self.query,
            self.stored.branch(1),
            self.stored.branch(2),
            spans.to(torch.int32),
            window.to(torch.int32),
            self.scale,
        )
        found = {"selected": Partial(*selected)}
        return found | ({"sliding": Partial(*sliding)} if seen else {})
