"""How a query's attention spreads over blocks: dense, and as the compressed keys tell it.

Of some queries alone: scores of all keys are formed for these, never S x S of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.selection import block_scores

QUERIES = 64  # of a row, whose scores over all keys are formed


def spread_queries(tokens: int, device: torch.device) -> Tensor:
    """int64 (Q,): positions of at most `QUERIES` queries of a row, evenly spread."""
    return torch.linspace(0, tokens - 1, min(QUERIES, tokens), device=device).long()


def dense_block_mass(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
    start: Tensor | None = None,
) -> Tensor:
    """Softmax over all visible keys, summed over blocks: float32 (B, Hkv, Q, blocks), sums of 1.

    The mean of the heads of a group, which select together.

    Args:
        query: (B, Hq, Q, D), key: (B, Hkv, S, D).
        positions: int (Q,), key indices of the queries.
        start: int (B, Q), key index of the first token of each query's document; None of rows that
            are one document each.
    """
    tokens, size = key.shape[2], config.select_block_size
    place = torch.arange(tokens, device=key.device)
    hidden = place > positions[:, None]  # [Q, S]
    if start is not None:
        hidden = (hidden | (place < start[..., None]))[:, None, None]  # [B, 1, 1, Q, S]

    def mass_of(queries: Tensor, keys: Tensor) -> Tensor:
        logits = _products(queries, keys).mul(scale)
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        mass = torch.nn.functional.pad(logits.softmax(-1), (0, -tokens % size))
        return mass.unflatten(-1, (-1, size)).sum(-1).mean(2)

    # One KV head after another: scores of all of them at once are large.
    heads = zip(query.chunk(key.shape[1], 1), key.split(1, 1), strict=True)
    return torch.cat([mass_of(*each) for each in heads], 1)


def compressed_block_mass(
    query: Tensor,
    compressed_key: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
    num_blocks: int,
) -> Tensor:
    """The scores that blocks are selected by (Eq. 9 and 10): float32 (B, Hkv, Q, blocks).

    Differentiable. Arguments as of `dense_block_mass`; compressed_key: (B, Hkv, N, D).
    """
    number = compressed_key.shape[2]
    end = torch.arange(number, device=query.device) * config.compress_stride
    hidden = end + config.compress_block_size - 1 > positions[:, None]  # [Q, N]
    logits = _products(query, compressed_key) * scale
    lowest = torch.finfo(logits.dtype).min  # a query that sees nothing gets no NaN
    p = logits.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)
    return block_scores(p.mean(2), num_blocks, config)


def free_blocks(
    positions: Tensor, num_blocks: int, config: NSAConfig, start: Tensor | None = None
) -> Tensor:
    """Bool (Q, blocks): those that scores decide on, neither initial nor local.

    (B, 1, Q, blocks) with `start`, as of `dense_block_mass`.
    """
    size = config.select_block_size
    block = torch.arange(num_blocks, device=positions.device)
    first = 0 if start is None else (start // size)[:, None, :, None]
    last = positions // size - config.num_local_blocks
    return (block >= first + config.num_initial_blocks) & (block <= last[:, None])


def divergence(dense: Tensor, compressed: Tensor, free: Tensor) -> Tensor:
    """KL of the dense mass from the compressed one, both over the free blocks alone: ().

    Mean over the queries that have some; nothing flows into `dense`.
    """
    target, predicted = (_normalised(mass, free) for mass in (dense.detach(), compressed))
    tiny = torch.finfo(torch.float32).tiny
    each = torch.xlogy(target, target) - target * predicted.clamp(min=tiny).log()
    some = free.any(-1).to(each.dtype)  # [Q]
    return (each.sum(-1) * some).sum() / (some.sum() * each[..., 0, 0].numel()).clamp(min=1.0)


class Recall(NamedTuple):
    """Of blocks, the share of the dense attention's best that were selected; of scores, its mass.

    blocks: () of the queries with more free blocks than places for them, NaN if there are none, or
        no places beside the forced blocks'.
    scores: (), forced blocks included; NaN without queries.
    """

    blocks: Tensor
    scores: Tensor


def recall_of(
    dense: Tensor,
    selected: Tensor,
    free: Tensor,
    config: NSAConfig,
    real: Tensor | None = None,
) -> Recall:
    """What the selection keeps of dense attention.

    Args:
        dense: (B, Hkv, Q, blocks) of `dense_block_mass`.
        selected: int (B, Hkv, Q, n), -1 where there are fewer.
        free: bool of `free_blocks`.
        real: bool (B, Q), false of queries that do not count; None counts all.
    """
    places = config.num_selected_blocks - config.num_forced_blocks
    is_selected = torch.zeros_like(dense).scatter_add_(
        -1, selected.clamp(min=0).long(), (selected >= 0).to(dense.dtype)
    )
    is_selected = is_selected > 0
    count = min(max(places, 1), dense.shape[-1])
    best = torch.where(free, dense, -1.0).topk(count, -1).indices
    hits = is_selected.gather(-1, best).float().mean(-1)  # [B, Hkv, Q]
    held = (dense * is_selected).sum(-1)
    counts = torch.ones_like(hits) if real is None else real[:, None].expand_as(hits).float()
    asked = counts * ((free.sum(-1) > places) & (places > 0))
    return Recall((hits * asked).sum() / asked.sum(), (held * counts).sum() / counts.sum())


def selection_recall(
    query: Tensor,
    key: Tensor,
    blocks: Tensor,
    config: NSAConfig,
    scale: float,
    *,
    start: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """What the blocks that a layer selected keep of dense attention: float32 (2,), a `Recall`.

    Of `QUERIES` queries of each row; nothing is read on the host.

    Args:
        query: (B, Hq, S, D), key: (B, Hkv, S, D).
        blocks: int (B, Hkv, S, n), -1 where there are fewer.
        start: int (B, S), first token of each query's document, or None.
        real: bool (B, S), false at padding; None where all are real.
    """
    positions = spread_queries(key.shape[2], key.device)
    query, blocks = query[:, :, positions], blocks[:, :, positions]
    start, real = (None if x is None else x[:, positions] for x in (start, real))
    dense = dense_block_mass(query, key, positions, config, scale, start)
    free = free_blocks(positions, dense.shape[-1], config, start)
    return torch.stack(recall_of(dense, blocks, free, config, real))


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Float32 (B, Hkv, G, Q, keys)."""
    with torch.autocast(query.device.type, enabled=False):
        grouped = query.float().unflatten(1, (key.shape[1], -1))
        return grouped @ key.float()[:, :, None].mT


def _normalised(mass: Tensor, free: Tensor) -> Tensor:
    mass = torch.where(free, mass, 0.0)
    return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
