"""What a rank attends of its part of a cache in a decode step, by Triton kernels.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.decoding import Stored
from nsa_flex.decoding import unsupported_reason as step_unsupported_reason
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.common.tiles import next_power_of_2
from nsa_flex.fallback_kernels.decode.attend_spans import attend_spans, merge_splits
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import (
    Cache,
    launch_compressed,
    launch_topk,
    step_values,
)
from nsa_flex.parallel.parts import LN2, Part, Partial

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
        return f"{slots} blocks are ranked, one more than selected; at most {MOST_SLOTS} can be"
    if blocks < slots:
        return f"a part has {blocks} blocks; the kernels rank at least {slots}"
    return step_unsupported_reason(query, stored.key, stored.value, config, stored.num_sets)


def _slots(config: NSAConfig) -> int:
    """n, and one for the local block of `_ranking`."""
    return config.num_selected_blocks + 1


class PartPlan(DecodePlan):
    """Of a part, whose last block has room for tokens behind it alone and is not scored."""

    @functools.cached_property
    def padded_blocks(self) -> int:
        blocks = self.config.num_select_blocks(self.capacity) - 1
        return max(128, next_power_of_2(blocks))


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
        part: Part,
        config: NSAConfig,
        scale: float,
    ) -> None:
        self.query, self.stored, self.config = rows_contiguous(query), stored, config
        self.base, self.tokens, self.scale = part.base, part.tokens, scale
        self.total_blocks = part.total // config.select_block_size
        self.own = stored.lengths - part.base  # [B], place of the query in this part
        key, value = stored.branch(1)
        plan = PartPlan.of(query, key, value, stored.compressed_key, config)
        self.plan = dataclasses.replace(plan, pdl=False)

    def compressed(self) -> tuple[Partial, Tensor]:
        """As `OperationParts.compressed`. Of a config without that branch `out` is anything."""
        plan, config = self.plan, self.config
        # The last block of the part is whole with the tokens behind it; no later one is here.
        last = self.tokens + config.compress_block_size - config.compress_stride - 1
        lengths = self.own.clamp(max=last)
        stored = self.stored
        cache = Cache(*stored.branch(1), stored.compressed_key, stored.compressed_value, lengths)
        workspace = plan.workspace(self.query.device)
        workspace.row_sum.zero_()
        workspace.score.fill_(float("-inf"))
        with torch.cuda.device_of(self.query):
            values = step_values(plan, self.query, cache, workspace, self.scale)
            launch_compressed(plan, cache, values)
        found = merge_splits(*workspace[:3], 0, plan.compressed_splits, plan.query_heads)
        # log2 of what each head adds to a block, and each tile to the first block of the next.
        self.score = workspace.score
        self.blocks, carried = self.score.split(
            (plan.padded_blocks, plan.padded_blocks // plan.tile_blocks), 2
        )  # [units, G, blocks], [units, G, tiles]
        number = self.tokens // config.select_block_size
        tile, place = divmod(number, plan.tile_blocks)
        edge = carried[..., tile - 1] if place == 0 else self.blocks[..., number]
        return Partial(*found), edge.reshape(plan.batch, plan.query_heads, 1, 1)

    def candidates(self, lse: Tensor, edge: Tensor) -> Tensor:
        """As `OperationParts.candidates`; the kernel ranks all blocks of the part alike.

        Initial and local blocks score infinity. Blocks behind the query score 0.
        """
        plan, config, size = self.plan, self.config, self.config.select_block_size
        number, local = self.tokens // size, config.num_local_blocks
        first = self.blocks[..., 0]
        torch.logaddexp2(first, edge.view(first.shape), out=first)
        if self.base == 0:
            self.blocks[..., : config.num_initial_blocks] = float("inf")
        block = self.own[:, None] // size - torch.arange(local, device=self.own.device)
        # Those of other parts to the end of a row of scores, which is not read any more.
        score = self.score.view(plan.batch, -1, self.score.shape[-1])
        end = score.shape[-1] - 1
        block = block.masked_fill((block < 0) | (block >= number), end)
        score.scatter_(2, block[:, None].expand(-1, score.shape[1], -1), float("inf"))
        ranked = _ranking(plan)
        workspace = ranked.workspace(self.query.device)._replace(score=self.score)
        torch.div(lse.view(first.shape), LN2, out=workspace.row_max[..., 0])
        workspace.row_sum[..., 0] = 1.0
        # As if of a query in the first block behind the part, which is its one local block.
        lengths = torch.full_like(self.stored.lengths, self.tokens)
        cache = Cache(*self.stored[:4], lengths)
        with torch.cuda.device_of(self.query):
            launch_topk(ranked, step_values(ranked, self.query, cache, workspace, self.scale))
        found = workspace.candidates[..., : ranked.num_topk].reshape(
            plan.batch, plan.kv_heads, 1, -1
        )
        if ranked.chunks > 1:
            found = found.topk(ranked.num_topk, -1, sorted=False).values
        # A rank counts blocks from the last, here of the part's padded ones.
        return found + (self.total_blocks - self.base // size - ranked.padded_blocks)

    def local(self, blocks: Tensor | None) -> list[Partial]:
        """As `OperationParts.local`.

        Args:
            blocks: int32 (B, Hkv, 1, n), of whole rows.
        """
        assert blocks is not None
        config, size = self.config, self.config.select_block_size
        seen = config.window_size if config.has("sliding") else 0
        end = self.own + 1  # [B], behind the last key that the query sees
        back = torch.arange(-seen, 0, size, dtype=torch.int32, device=end.device)
        window = (end[:, None] + back)[:, None].expand(-1, blocks.shape[1], -1)
        first = torch.cat((blocks[:, :, 0] * size - self.base, window), -1)  # [B, Hkv, spans]
        # Of other parts' keys none are left.
        stop = torch.minimum(first + size, end.clamp(max=self.tokens)[:, None, None])
        return [
            Partial(*each)
            for each in attend_spans(
                self.plan,
                self.query,
                self.stored.branch(1),
                self.stored.branch(2),
                torch.stack((first.clamp(min=0), stop), -1),
                len(back),
                self.scale,
            )
        ]
