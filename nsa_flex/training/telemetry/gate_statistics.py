"""How a layer uses its branches and its choice of blocks, as a few numbers on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.config import BRANCHES, NSAConfig
from nsa_flex.training.telemetry.observe import Observation
from nsa_flex.training.telemetry.schemas import columns

STATISTICS = columns("gates")[3:]


def statistics(seen: Observation) -> Tensor:
    """float32 (len(STATISTICS),): the columns of gates.csv; NaN where there is nothing to average.

    Nothing is read on the host.
    """
    gates = _gates(seen)
    return torch.cat([*gates, *_blocks(seen)]).float()


def _gates(seen: Observation) -> list[Tensor]:
    gates = _of_every_branch(seen).float()  # [B, Hq, S, 3]
    weight = torch.ones_like(gates[:, 0, :, 0]) if seen.real is None else seen.real.float()
    weight = weight[:, None].expand(gates.shape[:3])  # [B, Hq, S]
    total = weight.sum()

    def mean(x: Tensor) -> Tensor:
        return (x * weight).sum() / total

    size = gates.abs()
    share = size / size.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return [
        torch.stack([mean(gates[..., branch]) for branch in range(3)]),
        torch.stack([mean(share[..., branch]) for branch in range(3)]),
        torch.stack(
            [
                mean(entropy),
                mean((gates < 0.01).float().mean(-1)),
                mean((gates > 0.99).float().mean(-1)),
            ]
        ),
    ]


def _of_every_branch(seen: Observation) -> Tensor:
    """Gates (B, Hq, S, 3), 0 of absent branches."""
    if seen.config.branches == BRANCHES:
        return seen.gates
    gates = seen.gates.new_zeros((*seen.gates.shape[:3], len(BRANCHES)))
    gates[..., [BRANCHES.index(name) for name in seen.config.branches]] = seen.gates
    return gates


def _blocks(seen: Observation) -> list[Tensor]:
    """Share of never chosen blocks, and mean distance of the chosen; forced blocks left out."""
    config, blocks = seen.config, seen.blocks
    if blocks is None:  # nothing is selected
        return [seen.gates.new_full((2,), torch.nan)]
    batch, heads, tokens, _ = blocks.shape
    size = config.select_block_size
    place = torch.arange(tokens, device=blocks.device)
    own = (place // size)[None, None, :, None]  # [1, 1, S, 1]
    start = seen.document_start
    first = torch.zeros_like(own) if start is None else (start // size)[:, None, :, None]
    free = (blocks >= first + config.num_initial_blocks) & (
        blocks <= own - config.num_local_blocks
    )  # [B, Hkv, S, n]
    if seen.real is not None:
        free &= seen.real[:, None, :, None]
    distance = torch.where(free, own - blocks, 0).sum() * size / free.sum()
    num_blocks = config.num_select_blocks(tokens)
    counts = torch.zeros(batch, heads, num_blocks, device=blocks.device)
    index = blocks.clamp(min=0).flatten(2).long()
    counts.scatter_add_(2, index, free.flatten(2).float())
    candidate = _candidates(seen, config, num_blocks, batch)[:, None]  # [B, 1, blocks]
    never = (candidate & (counts == 0)).sum() / (candidate.sum() * heads)
    return [never[None], distance[None]]


def _candidates(seen: Observation, config: NSAConfig, num_blocks: int, batch: int) -> Tensor:
    """Bool (B, blocks): blocks that a real query of the document may choose freely."""
    size, local = config.select_block_size, config.num_local_blocks
    device = seen.gates.device
    block = torch.arange(num_blocks, device=device)
    later = (block + local).clamp(max=num_blocks - 1)  # the first query that may choose it
    inside = (block + local < num_blocks).expand(batch, num_blocks)
    if seen.document_start is None:
        return inside & (block >= config.num_initial_blocks)
    first = seen.document_start[:, ::size] // size  # [B, blocks]
    inside = inside & (first[:, later] == first) & (block - first >= config.num_initial_blocks)
    return inside if seen.real is None else inside & seen.real[:, ::size][:, later]
