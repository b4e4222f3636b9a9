"""`topk_blocks`: the top-k block selection alone, for attention of one's own."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from nsa_flex.backends.branch import query_positions
from nsa_flex.compression import mean_of_blocks, split_segments
from nsa_flex.config import NSAConfig
from nsa_flex.inputs import check_positions, check_query_and_key, check_scale, check_tensors
from nsa_flex.selection import choose_blocks

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Pooling = Literal["sum", "max"]


def topk_blocks(
    query: Float[Tensor, "B Hq Sq D"],
    key: Float[Tensor, "B Hkv Sk D"],
    *,
    config: NSAConfig,
    compressed_key: Float[Tensor, "B Hkv N D"] | None = None,
    pooling: Pooling = "sum",
    coarse: int = 1,
    scale: float | None = None,
    query_offset: int | Int[Tensor, " B"] | None = None,
    document_start: Int[Tensor, "B Sq"] | None = None,
) -> Int[Tensor, "B Hkv Sq n"]:
    """The blocks of keys that each query and KV head selects: what `selected_attention` takes.

    Compressed key i, a window of l keys at i * d, scores `exp(scale * query . key_i - lse)`,
    summed over the G query heads of the group; a query sees whole windows that end at or before
    it. A block scores the weighted sum of the windows that overlap it, as NSA's selected branch,
    or their maximum, as InfLLM-V2. The initial and local blocks come first, then the highest
    scores; equal scores take the lower index. Float32; at most 2^26 scores are in memory at once.
    Not differentiable: blocks are integers.

    Args:
        query: (B, Hq, Sq, D), key: (B, Hkv, Sk, D), in the same dtype; Hkv divides Hq.
        config: l, d, l', n, the initial and local blocks, and `selection`.
        compressed_key: (B, Hkv, N, D), the windows; by default their means.
        pooling: "sum" for what `config.selection` says, "max" for its "max_pool".
        coarse: 1 takes the log-sum-exp over the same windows, so that scores are probabilities;
            c > 1 over windows of c * l keys at multiples of c * d, means of the compressed keys.
            InfLLM-V2 was trained with 4. A query that sees no such window scores 0 everywhere.
        scale: positive, by default 1 / sqrt(D).
        query_offset: key index of query 0, an int or int (B,); by default Sk - Sq.
        document_start: int (B, Sq), key index of the first token of each query's document, a
            multiple of l'. Blocks and windows before it are not seen.

    Returns:
        int32 (B, Hkv, Sq, n), ascending, -1 behind the last where there are fewer than n.

    Raises:
        ValueError: shapes, head counts, dtypes or devices that do not fit together; an unknown
            pooling; "max" with a selection of tiles; or c * d does not divide l', with documents.
        TypeError: an argument of another type.

    Source: arXiv 2502.11089, section 3.3.2, and arXiv 2506.07900, section 2.2.

    >>> import torch
    >>> query, key = torch.randn(1, 4, 200, 8), torch.randn(1, 2, 200, 8)
    >>> config = NSAConfig(8, 4, 16, num_selected_blocks=4)
    >>> blocks = topk_blocks(query, key, config=config, pooling="max", coarse=4)
    >>> blocks.shape, blocks[0, 0, 20]
    (torch.Size([1, 2, 200, 4]), tensor([ 0,  1, -1, -1], dtype=torch.int32))
    """
    config = _pooled(config, pooling)
    config.specialize()
    check_query_and_key(query, key)
    check_positions(query, key, query_offset, document_start)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    check_scale(scale)
    coarse = _checked_coarse(coarse, config, document_start)
    query, key = query.detach(), key.detach()
    if compressed_key is None:
        compressed_key = mean_of_blocks(split_segments(key, config), config).to(key.dtype)
    _check_compressed(compressed_key, key, config)
    return choose_blocks(
        query,
        compressed_key.detach(),
        config=config,
        scale=scale,
        num_blocks=config.num_select_blocks(key.shape[2]),
        positions=query_positions(query, key, query_offset)[1],
        document_start=document_start,
        coarse=coarse,
    )


def _pooled(config: NSAConfig, pooling: Pooling) -> NSAConfig:
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling is {pooling!r}; it must be sum or max")
    if pooling == "sum" or config.selection == "max_pool":
        return config
    if config.selection != "top_k":
        raise ValueError(
            f"pooling is 'max' and config.selection {config.selection!r}: that adds up "
            "probabilities; leave one of them out"
        )
    return dataclasses.replace(config, selection="max_pool")


def _checked_coarse(coarse: int, config: NSAConfig, document_start: Tensor | None) -> int:
    if isinstance(coarse, bool) or not isinstance(coarse, int):
        raise TypeError(f"coarse must be an int, got {type(coarse).__name__}")
    if coarse < 1:
        raise ValueError(f"coarse={coarse} must be at least 1")
    stride = coarse * config.compress_stride
    if document_start is not None and config.select_block_size % stride:
        raise ValueError(
            f"coarse * compress_stride = {stride} must divide select_block_size="
            f"{config.select_block_size}: with documents coarse windows begin where they do"
        )
    return operator.index(coarse)  # a constant of a compiled graph


def _check_compressed(compressed_key: Tensor, key: Tensor, config: NSAConfig) -> None:
    """Windows that are not whole may follow: no query sees them."""
    check_tensors({"query": key, "key": compressed_key}, own_dtype="")
    batch, heads, num_keys, dim = key.shape
    whole = (num_keys - config.compress_block_size) // config.compress_stride + 1
    shape = tuple(compressed_key.shape)
    if (*shape[:2], shape[3]) != (batch, heads, dim) or shape[2] < whole:
        expected = (batch, heads, max(1, whole), dim)
        raise ValueError(f"compressed_key has shape {shape}; expected {expected}")
