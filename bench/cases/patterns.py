"""Queries whose real choices (Eq. 9) overlap as asked, and choices that a trained model made.

* `random`: independent normal queries and keys: neighbours share little but the forced blocks.
* `overlap`: a query is a moving average of normal noise over a width of tokens, which is searched
  until neighbours share 88 to 92 % of their blocks. Keys stay independent.
* `trained`: the choices of one layer of the demo's model on held-out text, as they were recorded,
  for the selected branch alone; one model for each group size G, whose heads choose together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nsa_flex.bench.cases.case import Case, Skip
from nsa_flex.compression import mean_of_blocks, split_segments
from nsa_flex.config import NSAConfig
from nsa_flex.selection import choose_blocks

OVERLAP = (0.88, 0.92)
MAX_WIDTH = 1 << 14
SAMPLED_RUNS = 16  # runs of neighbouring queries on which an overlap is measured
RUN_LENGTH = 32


def smooth_noise(shape: tuple[int, int, int, int], width: int, device: torch.device) -> Tensor:
    """Normal float32 (B, S, H, D); along S a moving average over `width`, of variance 1."""
    batch, length, heads, dim = shape
    out = torch.empty(shape, device=device)
    for b in range(batch):
        for h in range(heads):  # one head at a time: float64 sums over all of S are large
            noise = torch.randn(length + width, dim, device=device, dtype=torch.float64)
            sums = noise.cumsum(0)
            out[b, :, h] = ((sums[width:] - sums[:length]) / width**0.5).float()
    return out


def neighbour_overlap(blocks: Tensor) -> float:
    """Mean share of a query's blocks that the query before it chose too.

    Args:
        blocks: int (B, Hkv, S, n), -1 for none. Queries with fewer than n blocks are left out.

    >>> neighbour_overlap(torch.tensor([[[[0, 1], [0, 2], [0, 2]]]]))
    0.75
    """
    now, before = blocks[:, :, 1:], blocks[:, :, :-1]
    full = (now >= 0).all(-1) & (before >= 0).all(-1)
    shared = (now[..., None] == before[..., None, :]).any(-1).float().mean(-1)
    return shared[full].mean().item()


def sampled_overlap(query: Tensor, key: Tensor, config: NSAConfig) -> float:
    """`neighbour_overlap` of the real choices, on runs of queries of the first batch row.

    Args:
        query: (B, Hq, S, D); key: (B, Hkv, S, D).
    """
    length = key.shape[2]
    run = min(RUN_LENGTH, length)
    least = min(config.num_selected_blocks * config.select_block_size, length - run)
    starts = torch.linspace(least, length - run, SAMPLED_RUNS).long().tolist()
    compressed = mean_of_blocks(split_segments(key[:1], config), config).to(key.dtype)
    shares = []
    for start in starts:
        blocks = choose_blocks(
            query[:1, :, start : start + run].contiguous(),
            compressed,
            config=config,
            scale=query.shape[-1] ** -0.5,
            num_blocks=config.num_select_blocks(length),
            positions=torch.arange(start, start + run, device=key.device)[None],
        )
        shares.append(neighbour_overlap(blocks))
    return float(np.nanmean(shares))


def overlapping_queries(case: Case, key: Tensor) -> Tensor:
    """Queries (B, Hq, S, D) in (B, S, Hq, D) memory whose choices overlap by 88 to 92 %.

    The least width whose overlap is in the interval is found by halving; where the widest does
    not reach it, or a step jumps over it, the nearest is taken: rows state the overlap measured.
    """
    shape = (case.batch, case.seq_len, case.query_heads, case.head_dim)
    one_group = (1, case.seq_len, case.group_size, case.head_dim)
    seed = torch.initial_seed()

    def overlap_of(width: int) -> float:
        torch.manual_seed(seed)
        query = smooth_noise(one_group, width, key.device).transpose(1, 2).to(key.dtype)
        return sampled_overlap(query, key[:1, :1], case.config)

    low, high = 1, MAX_WIDTH
    while low < high:
        width = (low + high) // 2
        share = overlap_of(width)
        if OVERLAP[0] <= share <= OVERLAP[1]:
            low = high = width
        elif share < OVERLAP[0]:
            low = width + 1
        else:
            high = width
    torch.manual_seed(seed)
    return smooth_noise(shape, low, key.device).to(key.dtype).transpose(1, 2)


RESULTS = Path(__file__).parents[1] / "results"


def recorded_file(group_size: int) -> Path:
    """Where choices of G query heads a KV head are kept.

    >>> recorded_file(4).name
    'choices_demo_g4.npz'
    """
    return RESULTS / f"choices_demo_g{group_size}.npz"


def recorded_choices(case: Case, device: torch.device) -> Tensor:
    """int32 (B, Hkv, S, n): recorded KV heads of the case's G in turn, the first S queries.

    Raises:
        Skip: nothing was recorded for this G, length, block size or n; a wheel holds no rows.
    """
    recorded = recorded_file(case.group_size)
    if not recorded.exists():
        raise Skip(f"the choices of a trained model are not there: {recorded}")
    with np.load(recorded) as file:
        table, block_size = file["blocks"], int(file["block_size"])  # [heads, S, n]
    heads, length, slots = table.shape
    config = case.config
    if case.seq_len > length:
        raise Skip(f"choices of a trained model were recorded for {length} tokens only")
    if (block_size, slots) != (config.select_block_size, config.num_selected_blocks):
        raise Skip(f"recorded choices are {slots} blocks of {block_size} tokens")
    chosen = torch.from_numpy(table[:, : case.seq_len].astype(np.int32)).to(device)
    turns = torch.arange(case.kv_heads, device=device) % heads
    return chosen[turns][None].expand(case.batch, -1, -1, -1).contiguous()
