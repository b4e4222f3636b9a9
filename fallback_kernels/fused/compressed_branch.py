"""The compressed branch inside of the core: cuDNN on the fold, or range attention.

Range attention takes packed documents, queries at an offset, and calls of few tokens, for which it
is one launch.
cuDNN leaves outputs and dQ in the parts of the fold, range attention in the order of tokens. The
latter is a fold as well, that of blocks of one token (l = d = 1), so that whoever reads the parts
need not know.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.add_splits import Splits, add_splits
from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, SHORT_QUERIES
from nsa_flex.fallback_kernels.common.strides import empty_bshd, rows_contiguous
from nsa_flex.fallback_kernels.compressed.cudnn import attend_range, range_gradients
from nsa_flex.fallback_kernels.compressed.fold import Fold, fold_of, sum_residues
from nsa_flex.fallback_kernels.fused import compressed_past
from nsa_flex.fallback_kernels.fused.bwd_gates import SumGradients, fold_gated_lse
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import unfold_lse
from nsa_flex.fallback_kernels.fused.route import is_host_bound
from nsa_flex.fallback_kernels.ranges.bounds import launch as launch_bounds
from nsa_flex.fallback_kernels.ranges.bwd import ranges_gradients
from nsa_flex.fallback_kernels.ranges.fwd import ranges_forward

NUM_PARTS = 4  # of any fold


class CompressedOutput(NamedTuple):
    """What `attend_compressed` returns."""

    parts: tuple[Tensor, ...]  # the output, by the parts of the fold
    fold: Fold
    lse: Tensor  # float32 (B, H, S), natural; -inf for a query that sees no block


class CompressedGradients(NamedTuple):
    """What `compressed_gradients` returns."""

    query_parts: list[Tensor]  # dQ, by the parts of the fold
    fold: Fold
    keys: Splits  # (splits, B, N, Hkv, D), to be added


def attend_compressed(
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    kernels: Literal["cudnn", "ranges"],
    offsets: Tensor | None = None,
    kinds: Tensor | None = None,
    past: int = 0,
) -> CompressedOutput:
    """The compressed branch of queries (B, S, H, D), contiguous.

    document_start: int32 (B, S), first key of each query's document; None for one document.
    kernels: as of `Route.compressed`.
    offsets: int32 (B, Hkv), position of query 0; None where that is key 0.
    kinds: of `block_kinds`; results of short queries are left to other kernels.
    past: tokens before query 0, for cuDNN.
    """
    key, value = rows_contiguous(key), rows_contiguous(value)
    tokens, heads = rows.shape[1:3]
    if kernels == "ranges":
        bounds = _bounds(rows, document_start, key, config, offsets, kinds, SHORT_QUERIES)
        out, lse = ranges_forward(
            *(rows.transpose(1, 2), key, value, *bounds, scale),
            lse_by_head=document_start is None,
            leave=kinds is not None,
        )
        return CompressedOutput((out.transpose(1, 2),) * NUM_PARTS, fold_of(tokens, 1, 1), lse)
    if past > 0:
        keys = compressed_past.PastKeys.of(tokens, past, config)
        out, lse = compressed_past.attend(rows, key, value, keys, scale)
        return CompressedOutput((out,) * NUM_PARTS, fold_of(tokens, 1, 1), lse)
    fold = _fold(tokens, config)
    parts, lses = zip(
        *(
            attend_range(rows, key, value, part, scale, fold.reach, fold.stride)
            for part in fold.ranges
        ),
        strict=True,
    )
    return CompressedOutput(parts, fold, unfold_lse(lses, fold, heads, tokens))


def compressed_gradients(
    sums: SumGradients,
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    lse: Tensor,
    gates: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    kernels: Literal["cudnn", "ranges"],
    kinds: Tensor | None = None,
    offsets: Tensor | None = None,
    past: int = 0,
) -> CompressedGradients:
    """Gradients of what `attend_compressed` took; `out` and `lse` are what it returned.

    sums: where range attention runs, what it is if it was given the log-sum-exp of this branch.
    out: (B, S, H, D), contiguous; not read where range attention runs.
    kinds: of `block_kinds`; results of short documents are left to other kernels.
    """
    keys = (rows_contiguous(key), rows_contiguous(value))
    tokens = rows.shape[1]
    if kernels == "ranges":
        grad_query, splits = ranges_gradients(
            rows.transpose(1, 2),
            *keys,
            *_bounds(rows, document_start, key, config, offsets, kinds, SHORT_DOCUMENT),
            sums.compressed_lse.transpose(1, 2),
            sums.compressed_delta.transpose(1, 2),
            sums.signed.transpose(1, 2),
            scale,
            kinds,
            config.select_block_size,
            config.compress_stride,
        )
        if not is_host_bound(rows.shape[0] * rows.shape[1]):  # memory counts, not a launch
            splits = Splits(*(x[None] for x in add_splits(splits, key.dtype)))
        parts = [grad_query.transpose(1, 2)] * NUM_PARTS
        return CompressedGradients(parts, fold_of(tokens, 1, 1), splits)
    assert out is not None
    if past > 0:
        grads = compressed_past.differentiate(
            *(sums.signed, rows, *keys, out, lse, gates[..., 0]),
            compressed_past.PastKeys.of(tokens, past, config),
            scale,
        )
        splits = Splits(grads.key[None], grads.value[None])
        return CompressedGradients([grads.query] * NUM_PARTS, fold_of(tokens, 1, 1), splits)
    fold = _fold(tokens, config)
    gradients = [
        range_gradients(
            sums.signed, rows, *keys, out, part_lse, part, scale, fold.reach, fold.stride
        )
        for part, part_lse in zip(
            fold.ranges, fold_gated_lse(lse, gates[..., 0], fold), strict=True
        )
    ]
    grad_key, grad_value = (
        _sum_over_parts(shares, like)
        for shares, like in (
            ([part.key for part in gradients], key),
            ([part.value for part in gradients], value),
        )
    )
    splits = Splits(grad_key[None], grad_value[None])
    return CompressedGradients([part.query for part in gradients], fold, splits)


def _bounds(
    rows: Tensor,
    document_start: Tensor | None,
    key: Tensor,
    config: NSAConfig,
    offsets: Tensor | None = None,
    kinds: Tensor | None = None,
    kind: Any = SHORT_QUERIES,
) -> tuple[Tensor, Tensor]:
    tokens, sizes = rows.shape[1], (config.compress_block_size, config.compress_stride)
    if document_start is not None or offsets is not None:
        # The offset of a batch row is the same for all KV heads.
        of_rows = None if offsets is None else offsets[:, 0].contiguous()
        numbers = [key.shape[2], *sizes]
        return launch_bounds(
            *(tokens, 0, of_rows, document_start, rows.device, numbers),
            *(kinds, kind, config.select_block_size),
        )
    # By PyTorch's operators: what follows from no tensor, a launch plan keeps.
    block, stride = sizes
    positions = torch.arange(tokens, device=rows.device, dtype=torch.int32)[None]
    complete = (positions - (block - 1 - stride)).clamp(min=0) // stride
    bounds = positions.clamp(max=0), complete.clamp(max=key.shape[2])
    # All batch rows share them: a batch stride of 0.
    first, end = (x.as_strided(x.shape, (0, 1)) for x in bounds)
    return first, end


def _sum_over_parts(shares: list[Tensor], like: Tensor) -> Tensor:
    _, heads, num_blocks, dim = like.shape
    out = empty_bshd(like, heads, num_blocks, dim, like.dtype)
    sum_residues(shares, out)
    return out.transpose(1, 2)


def _fold(num_tokens: int, config: NSAConfig) -> Fold:
    return fold_of(num_tokens, config.compress_block_size, config.compress_stride)
