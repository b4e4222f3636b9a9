"""InfLLM-V2 attention (MiniCPM4, MiniCPM4.1) in float64 NumPy, forward and backward.

Written from what upstream's attention and kernels compute, and from nothing else: no torch, none
of the package's code. One row without padding; queries are its last tokens. Every block set is an
explicit Python set, every mask an explicit boolean array.

Arrays are (heads H, tokens S, head dim D); G = Hq / Hkv query heads share a KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Backward: TypeAlias = Callable[[Floats], tuple[Floats, Floats, Floats]]


@dataclass(frozen=True)
class Sizes:
    """`sparse_config` by upstream's names; `coarse` is 4 as trained, 1 for the exact lse."""

    kernel_size: int = 8
    kernel_stride: int = 4
    init_blocks: int = 1
    block_size: int = 16
    window_size: int = 32
    topk: int = 3
    dense_len: int = 0
    coarse: int = 4

    @property
    def forced_local(self) -> int:
        """Blocks up to the query's own, that one included."""
        return self.window_size // self.block_size + 1

    @property
    def num_blocks(self) -> int:
        """Blocks of a query, forced ones among them."""
        return self.topk + self.window_size // self.block_size


def window_means(x: Floats, size: int, stride: int) -> Floats:
    """Means of `size` tokens, one every `stride`; whole windows only."""
    starts = range(0, x.shape[1] - size + 1, stride)
    means = [x[:, start : start + size].mean(1) for start in starts]
    return np.stack(means, 1) if means else np.zeros((x.shape[0], 0, x.shape[2]))


def group_scores(q: Floats, k: Floats, sizes: Sizes) -> Floats:
    """exp(q k1 - lse) summed over the heads of a group: (Hkv, Sq, windows); unseen ones are -1.

    `lse` is over the visible coarse windows. A query that sees none of them scores 0.
    """
    heads, num_queries, dim = q.shape
    kv_heads, num_keys = k.shape[:2]
    sums = None
    for head in range(heads):
        key = k[head // (heads // kv_heads)][None]
        fine = window_means(key, sizes.kernel_size, sizes.kernel_stride)[0]
        factor = sizes.coarse
        coarse = window_means(key, factor * sizes.kernel_size, factor * sizes.kernel_stride)[0]
        if sums is None:
            sums = np.zeros((kv_heads, num_queries, len(fine)))
        for row in range(num_queries):
            t = num_keys - num_queries + row
            seen = sizes.kernel_stride * np.arange(len(fine)) + sizes.kernel_size - 1 <= t
            ends = factor * (sizes.kernel_stride * np.arange(len(coarse)) + sizes.kernel_size) - 1
            logits = coarse[ends <= t] @ q[head, row] / np.sqrt(dim)
            if len(logits) == 0:
                sums[head // (heads // kv_heads), row, ~seen] = -1
                continue
            lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            scores = np.exp(fine @ q[head, row] / np.sqrt(dim) - lse)
            target = sums[head // (heads // kv_heads), row]
            target[:] = np.where(seen, target + scores, -1)
    assert sums is not None
    return sums


def max_pooled(scores: Floats, num_blocks: int, sizes: Sizes) -> Floats:
    """Of block j the largest score of the windows that overlap it; -1 where none is seen.

    With kernel_size 2 kernel_stride that is a max-pool of kernel block_size / kernel_stride + 1,
    stride block_size / kernel_stride and padding 1.
    """
    per_block = sizes.block_size // sizes.kernel_stride
    before = sizes.kernel_size // sizes.kernel_stride - 1
    pooled = np.full((*scores.shape[:-1], num_blocks), -1.0)
    for j in range(num_blocks):
        windows = scores[..., max(0, per_block * j - before) : per_block * (j + 1)]
        if windows.shape[-1]:
            pooled[..., j] = windows.max(-1)
    return pooled


def selected_blocks(q: Floats, k: Floats, sizes: Sizes) -> list[list[set[int]]]:
    """For each KV head and query its blocks. Equal scores: the first block."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    num_blocks = -(-num_keys // sizes.block_size)
    pooled = max_pooled(group_scores(q, k, sizes), num_blocks, sizes)
    found = []
    for of_head in pooled:
        sets = []
        for row, scores in enumerate(of_head):
            own = (num_keys - num_queries + row) // sizes.block_size
            first_local = own - sizes.forced_local + 1
            forced = {j for j in range(own + 1) if j < sizes.init_blocks or j >= first_local}
            others = sorted(set(range(own + 1)) - forced, key=lambda j: (-max(scores[j], 0), j))
            sets.append(forced | set(others[: max(0, sizes.num_blocks - len(forced))]))
        found.append(sets)
    return found


def attention(
    q: Floats, k: Floats, v: Floats, sizes: Sizes, *, length: int | None = None
) -> tuple[Floats, Backward]:
    """Output (Hq, Sq, Dv) and gradients of q, k and v from its own; the blocks carry none.

    Dense causal where `length`, tokens of the longest row of the batch, is below dense_len.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    place = np.arange(num_keys)
    t = num_keys - num_queries + np.arange(num_queries)
    mask = np.broadcast_to(place <= t[:, None], (k.shape[0], num_queries, num_keys)).copy()
    if (num_keys if length is None else length) >= sizes.dense_len:
        for head, sets in enumerate(selected_blocks(q, k, sizes)):
            for row, blocks in enumerate(sets):
                mask[head, row] &= np.isin(place // sizes.block_size, list(blocks))
    return masked_attention(q, k, v, mask)


def masked_attention(
    q: Floats, k: Floats, v: Floats, mask: NDArray[np.bool_]
) -> tuple[Floats, Backward]:
    """softmax(q k^T / sqrt(D)) v under a mask (Hkv, Sq, Sk)."""
    group, scale = q.shape[0] // k.shape[0], q.shape[-1] ** -0.5
    wide_k, wide_v, wide_mask = (np.repeat(x, group, axis=0) for x in (k, v, mask))
    logits = np.where(wide_mask, scale * q @ wide_k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    p = weights / weights.sum(-1, keepdims=True)
    out = p @ wide_v

    def backward(grad: Floats) -> tuple[Floats, Floats, Floats]:
        of_p = grad @ wide_v.swapaxes(-1, -2)
        of_logits = p * (of_p - (grad * out).sum(-1, keepdims=True))
        of_k, of_v = scale * of_logits.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ grad
        sums = [x.reshape(k.shape[0], group, *x.shape[1:]).sum(1) for x in (of_k, of_v)]
        return scale * of_logits @ wide_k, sums[0], sums[1]

    return out, backward
