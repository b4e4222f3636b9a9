"""Sparse attention of MiniMax-M3 in float64 NumPy, with explicit masks: one row, no padding.

Written from the model's definition: scores of an indexer, the largest of each block of keys up to
the query, the query's own blocks first, then the best; attention to those blocks alone.
"""

from __future__ import annotations

import numpy as np


def selected_blocks(
    query: np.ndarray, key: np.ndarray, block_size: int, num_blocks: int, num_local: int
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


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    blocks: list[list[set[int]]],
    block_size: int,
) -> np.ndarray:
    """(Hq, Sq, Dv): query (Hq, Sq, D), key and value (Hkv, Sk, D or Dv), a set of blocks each."""
    heads, num_queries, dim = query.shape
    group, num_keys = heads // key.shape[0], key.shape[1]
    place = np.arange(num_keys)
    out = np.zeros((heads, num_queries, value.shape[2]))
    for head in range(heads):
        for row in range(num_queries):
            position = num_keys - num_queries + row
            chosen = blocks[head // group][row]
            seen = np.isin(place // block_size, list(chosen)) & (place <= position)
            scores = key[head // group, seen] @ query[head, row] / np.sqrt(dim)
            weight = np.exp(scores - scores.max())
            out[head, row] = weight @ value[head // group, seen] / weight.sum()
    return out
