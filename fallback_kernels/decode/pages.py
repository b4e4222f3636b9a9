"""One query a row over keys and values in pages, as an engine hands them out.

The kernels of a decode step, with a table of pages between a row's tokens and memory. Constant
shapes and no host sync, as there.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason
from nsa_flex.fallback_kernels.decode import checks
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import Cache, Gating, fake_results, run
from nsa_flex.fallback_kernels.launch.plans import planned


def unsupported_reason(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, config: NSAConfig
) -> str | None:
    """Why the kernels do not take such a step; None if they do. Arguments as of `attend`."""
    if query.dtype != key.dtype:
        return f"query is {query.dtype}, and the pages hold {key.dtype}"
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        return reason
    sizes = (key.shape[2], table.shape[1] * key.shape[1], value.shape[3])
    return checks.sizes_unsupported_reason(query, *sizes, config)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """Native Sparse Attention of one query a row, all stored, its own token included.

    Args:
        query: (B, Hq, 1, D), any strides.
        key: (pages, page size, Hkv, D), value: (pages, page size, Hkv, Dv), last dimension
            contiguous.
        compressed_key: (pages, page size / d, Hkv, D), compressed_value likewise: row r of a page
            is of the block whose last token is token d·(r + 1) - 1 of the page. No rows of what no
            branch reads.
        gates: (B, Hq, 1, C), of the config's branches in its order.
        table: int32 or int64 (B, P), pages of each row in order, any page behind its last.
        positions: int32 (B,), of the queries, less than P · page size.
        config: NSA's sizes.
        scale: factor of the logits.

    Returns:
        (B, Hq, 1, Dv) in query's dtype. Softmax and sums are float32.

    Raises:
        ValueError: the pages do not end where blocks may, or a table or position of another dtype.
    """
    _check(key, compressed_key, table, positions, config)
    out, _, _ = _attend(
        query,
        key,
        value,
        compressed_key,
        compressed_value,
        gates,
        table,
        positions,
        scale,
        config.counts,
    )
    return out.transpose(1, 2)


def _check(
    key: Tensor, compressed_key: Tensor, table: Tensor, positions: Tensor, config: NSAConfig
) -> None:
    expected = key.shape[1] / config.compress_stride if config.compresses else 0
    if compressed_key.shape[1] != expected:
        raise ValueError(
            f"a page has {compressed_key.shape[1]} compressed rows; {key.shape[1]} tokens of "
            f"stride {config.compress_stride} have {expected:g}"
        )
    if table.dim() != 2 or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"table is {table.dtype} {tuple(table.shape)}; expected int32 (B, pages)")
    if positions.dtype != torch.int32 or positions.shape != table.shape[:1]:
        raise ValueError(
            f"positions are {positions.dtype} {tuple(positions.shape)}; expected int32 "
            f"({table.shape[0]},)"
        )


@torch.library.custom_op("nsa_flex::decode_pages", mutates_args=())
@planned
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    counts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    config = NSAConfig.of_counts(counts)
    capacity = table.shape[1] * key.shape[1]
    num_compressed = max(1, config.num_compressed_blocks(capacity))
    plan = DecodePlan.of_sizes(
        query, key.shape[2], value.shape[3], capacity, num_compressed, config
    )
    keys, values, compressed_keys, compressed_values = (
        x.transpose(1, 2) for x in (key, value, compressed_key, compressed_value)
    )
    cache = Cache(keys, values, compressed_keys, compressed_values, positions.contiguous(), table)
    return run(plan, query, cache, Gating(gates), scale)


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_results(query, key.shape[2], value.shape[3], NSAConfig.of_counts(others[-1]))
