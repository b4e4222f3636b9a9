"""A few queries of each attention written out, in any dtype: what the gate holds results to.

Every function takes R sampled queries of one batch row and one group of G heads with its one KV
head, so that memory is O(R * G * S) and most of it the scores. In float64 it is the truth, in the
case's dtype it is what eager PyTorch errs.

    query (G, R, D); key (S, D); value (S, Dv); positions int64 (R,)
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T) v over what is seen; 0 where that is nothing.

    Args:
        query: (G, R, D).
        key: (K, D), or (R, K, D) where every query has keys of its own; value likewise.
        seen: bool (R, K).

    Returns:
        (G, R, Dv)
    """
    return (
        weights(query, key, seen, scale) @ value
        if key.dim() == 2
        else _own(weights(query, key, seen, scale), value)
    )


def weights(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Probabilities (G, R, K) of `attend`."""
    scores = query @ key.mT if key.dim() == 2 else torch.einsum("grd,rkd->grk", query, key)
    hidden = ~seen
    lowest = torch.finfo(scores.dtype).min
    return (scores * scale).masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)


def _own(probabilities: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("grk,rkd->grd", probabilities, value)


def dense(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Causal attention over all tokens."""
    seen = torch.arange(key.shape[0], device=key.device) <= positions[:, None]
    return attend(query, key, value, seen, scale)


def compressed_seen(num_blocks: int, positions: Tensor, config: NSAConfig) -> Tensor:
    """bool (R, N): block i is seen once its last token is."""
    first = torch.arange(num_blocks, device=positions.device) * config.compress_stride
    return first + config.compress_block_size - 1 <= positions[:, None]


def compressed(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, config: NSAConfig
) -> Tensor:
    """Branch 1; key (N, D) and value (N, Dv) are compressed."""
    seen = compressed_seen(key.shape[0], positions, config)
    return attend(query, key, value, seen, scale)


def sliding(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, config: NSAConfig
) -> Tensor:
    """Branch 3, from the at most w keys that each query sees."""
    width = min(config.window_size, key.shape[0])
    tokens = positions[:, None] - torch.arange(width, device=key.device)  # [R, w]
    own = tokens.clamp(min=0)
    return attend(query, key[own], value[own], tokens >= 0, scale)


def selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scale: float,
    blocks: Tensor,
    config: NSAConfig,
) -> Tensor:
    """Branch 2, from the keys of the chosen blocks int (R, n), -1 for none."""
    size = config.select_block_size
    tokens = blocks.long()[..., None] * size + torch.arange(size, device=key.device)
    tokens = tokens.flatten(1)  # [R, n * l']
    seen = (tokens >= 0) & (tokens <= positions[:, None])
    own = tokens.clamp(0, key.shape[0] - 1)
    return attend(query, key[own], value[own], seen, scale)


def scores(
    query: Tensor, compressed_key: Tensor, positions: Tensor, scale: float, config: NSAConfig
) -> Tensor:
    """Eq. 9 and 10 of every selectable block (R, ceil((t + 1) / l') at most): (R, blocks).

    By the definition: block i of the compressed ones gives to block j once for every segment of
    d tokens of i that lies in j.
    """
    seen = compressed_seen(compressed_key.shape[0], positions, config)
    p = weights(query, compressed_key, seen, scale).sum(0)  # [R, N]
    num_blocks = int(positions.max()) // config.select_block_size + 1
    out = p.new_zeros(p.shape[0], num_blocks + config.compress_block_size)
    per_select = config.select_block_size // config.compress_stride
    segments = torch.arange(p.shape[1], device=p.device)
    for shift in range(config.compress_block_size // config.compress_stride):
        out.index_add_(1, ((segments + shift) // per_select).clamp(max=out.shape[1] - 1), p)
    return out[:, :num_blocks]


def max_pooled_scores(
    query: Tensor,
    compressed_key: Tensor,
    coarse_key: Tensor,
    positions: Tensor,
    scale: float,
    config: NSAConfig,
    coarse: int,
) -> Tensor:
    """InfLLM-V2's score of every selectable block, (R, blocks): a maximum instead of Eq. 9's sum.

    Of exp(scale q k - lse) summed over the group, where lse is that over `coarse_key` (N', D), of
    blocks `coarse` times as long and as far apart.
    """
    size, stride = config.compress_block_size, config.compress_stride
    seen = [
        torch.arange(key.shape[0], device=key.device) * factor * stride + factor * size - 1
        <= positions[:, None]
        for key, factor in ((compressed_key, 1), (coarse_key, coarse))
    ]
    lse = (query @ coarse_key.mT * scale).masked_fill(~seen[1], -torch.inf).logsumexp(-1)
    p = (query @ compressed_key.mT * scale - lse[..., None]).exp()
    p = p.masked_fill(~seen[0] | torch.isinf(lse)[..., None], 0.0).sum(0)  # [R, N]
    num_blocks = int(positions.max()) // config.select_block_size + 1
    out = p.new_zeros(p.shape[0], num_blocks + 1)
    first = torch.arange(p.shape[1], device=p.device) * stride
    for token in range(0, size, stride):  # of a compressed block, in whose block it lies
        block = ((first + token) // config.select_block_size).clamp(max=num_blocks)
        out.scatter_reduce_(1, block.expand_as(p), p, "amax")
    return out[:, :num_blocks]


def largest_products(query: Tensor, key: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """An indexer's score of every block, (R, blocks): the largest q k of its keys up to a query.

    query (R, D); key (S, D).
    """
    place = torch.arange(key.shape[0], device=key.device)
    products = (query @ key.mT).masked_fill(place > positions[:, None], -torch.inf)
    missing = -key.shape[0] % block_size
    products = torch.nn.functional.pad(products, (0, missing), value=-torch.inf)
    num_blocks = int(positions.max()) // block_size + 1
    return products.unflatten(1, (-1, block_size)).amax(-1)[:, :num_blocks]


def choice(scored: Tensor, positions: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """The chosen blocks of each query and how clear the choice was.

    Args:
        scored: float64 (R, blocks) of `scores`.

    Returns:
        blocks int64 (R, n), ascending, -1 behind the last; margin (R,), by which share the worst
        of the taken outscores the best of the others, infinite where all are taken.
    """
    j = torch.arange(scored.shape[1], device=scored.device)
    own = (positions // config.select_block_size)[:, None]
    candidate = j <= own
    forced = candidate & ((j < config.num_initial_blocks) | (j > own - config.num_local_blocks))
    ranked = scored.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)
    n = config.num_selected_blocks
    taken, margin = _highest(ranked, n)
    if config.selection == "tiled_top_k":  # a half before the own tile of n blocks, a half inside
        tile = own // n * n
        before, inside = (
            _highest(ranked.masked_fill(others, -torch.inf), n // 2)
            for others in (j >= tile, j < tile)
        )
        taken = torch.where(tile == 0, taken, before[0] | inside[0])
        margin = torch.where(tile[:, 0] == 0, margin, torch.minimum(before[1], inside[1]))
    blocks = torch.where(taken, j, scored.shape[1]).sort(-1).values[:, :n]
    blocks = blocks.masked_fill(blocks == scored.shape[1], -1)
    return torch.nn.functional.pad(blocks, (0, n - blocks.shape[1]), value=-1), margin


def _highest(ranked: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Which n blocks rank highest, bool (R, blocks), none of -inf, and the share they lead by."""
    order = ranked.sort(dim=-1, descending=True, stable=True)  # stable: ties take the lower index
    taken = torch.zeros_like(ranked, dtype=torch.bool)
    taken.scatter_(1, order.indices[:, :n], order.values[:, :n] > -torch.inf)
    margin = torch.full_like(ranked[:, 0], torch.inf)
    if ranked.shape[1] > n:
        worst, best = order.values[:, n - 1], order.values[:, n]
        gap = ((worst - best) / worst).masked_fill(torch.isinf(worst), torch.inf)
        margin = torch.where(best > -torch.inf, gap, margin)
    return taken, margin
