"""Sparse attention of MiniMax-M3 in float64 NumPy, with explicit masks: one row, no padding.

Written from the model's definition: scores of an indexer, the largest of each block of keys up to
the query, the query's own blocks first, then the best; attention to those blocks alone, forward
and backward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.infllm_v2 import Backward, Floats, masked_attention


def selected_blocks(
    query: Floats, key: Floats, block_size: int, num_blocks: int, num_local: int
) -> list[list[set[int]]]:
    """For each head and query the blocks; query (H, Sq, D), key (Sk, D), queries the last."""
    heads, num_queries, _ = query.shape
    num_keys = key.shape[0]
    found: list[list[set[int]]] = []
    for head in range(heads):
        of_head = []
        for row in range(num_queries):
            position = num_keys - num_queries + row
            own = position // block_size
            best = {}
            for block in range(own + 1):
                keys = key[block * block_size : min((block + 1) * block_size, position + 1)]
                best[block] = (keys @ query[head, row]).max()
                if block > own - num_local:
                    best[block] = np.inf
            ranked = sorted(best, key=lambda block: -best[block])
            of_head.append(set(ranked[:num_blocks]))
        found.append(of_head)
    return found


def selected_mask(
    blocks: list[list[set[int]]], num_queries: int, num_keys: int, block_size: int
) -> NDArray[np.bool_]:
    """(Hkv, Sq, Sk): which keys the blocks let the queries, the last of the tokens, see."""
    place = np.arange(num_keys)
    mask = np.zeros((len(blocks), num_queries, num_keys), bool)
    for head, row in np.ndindex(mask.shape[:2]):
        chosen = list(blocks[head][row])
        is_past = place <= num_keys - num_queries + row
        mask[head, row] = np.isin(place // block_size, chosen) & is_past
    return mask


def attention(
    query: Floats, key: Floats, value: Floats, blocks: list[list[set[int]]], block_size: int
) -> tuple[Floats, Backward]:
    """Output (Hq, Sq, Dv), and gradients of query, key and value from its own.

    query (Hq, Sq, D), key and value (Hkv, Sk, D or Dv), a set of blocks each; these carry none.
    """
    mask = selected_mask(blocks, query.shape[1], key.shape[1], block_size)
    return masked_attention(query, key, value, mask)
