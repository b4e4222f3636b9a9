"""Ranges of keys that the branches' queries see, as tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.block_kinds import SHORT_QUERIES, has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import cdiv
from nsa_flex.fallback_kernels.launch.direct import directly
from nsa_flex.fallback_kernels.launch.plans import planned

QUERIES = tl.constexpr(1024)  # of one CTA


@torch.library.custom_op("nsa_flex::range_bounds", mutates_args=())
@planned
def range_bounds(
    like: Tensor,
    num_queries: int,
    offset: int,
    offsets: Tensor | None,
    document_start: Tensor | None,
    sizes: list[int],
) -> tuple[Tensor, Tensor]:
    """First key that each query sees, and one past the last: two int32 tensors.

    Of compressed keys they go from the first block of the query's document to the last complete
    one: start/d ... (t - l + 1)//d. Neither range goes back from one query to the next.

    Args:
        like: on the device that the bounds are to be on.
        num_queries: Sq.
        offset: key index of query 0.
        offsets: int (B,), added to it, or None.
        document_start: int32 (B, Sq), contiguous, key index of the first token of each query's
            document, of compressed keys a multiple of d; None where each row is one.
        sizes: N, l and d for compressed keys, or w for the last w tokens of the document.

    Returns:
        two of (B, Sq), or of (1, Sq) if neither offsets nor documents differ between rows.
    """
    with torch.cuda.device_of(like):
        return launch(num_queries, offset, offsets, document_start, like.device, sizes)


@range_bounds.register_fake
def _(like: Tensor, num_queries: int, _offset: int, *others: Any) -> tuple[Tensor, Tensor]:
    offsets, document_start, _ = others
    return _empty(num_queries, offsets, document_start, like.device)


bounds = directly(range_bounds)


def launch(
    num_queries: int,
    offset: int,
    offsets: Tensor | None,
    document_start: Tensor | None,
    device: torch.device,
    sizes: list[int],
    kinds: Tensor | None = None,
    kind: tl.constexpr = SHORT_QUERIES,
    block_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """The kernel of `range_bounds` by itself, for operators that need the bounds inside.

    kinds: of `block_kinds` for blocks of `block_size` tokens: queries of this `kind` see nothing.
        Sizes are of compressed blocks then, and there is no offset.
    """
    first, end = _empty(num_queries, offsets, document_start, device)
    num_keys, block, stride = sizes if len(sizes) == 3 else (sizes[0], 0, 1)
    range_bounds_kernel[(cdiv(num_queries, QUERIES.value), first.shape[0])](
        offsets,
        document_start,
        kinds,
        first,
        end,
        num_queries,
        offset,
        num_keys,
        BLOCK_SIZE=block,
        STRIDE=stride,
        KIND=kind,
        SELECT=block_size,
    )
    return first, end


def _empty(
    num_queries: int,
    offsets: Tensor | None,
    document_start: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    rows = next((x.shape[0] for x in (offsets, document_start) if x is not None), 1)
    options: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return torch.empty((rows, num_queries), **options), torch.empty((rows, num_queries), **options)


@recordable
@triton.jit(do_not_specialize=["num_queries", "offset", "num_keys"])
def range_bounds_kernel(
    offsets_ptr, document_start_ptr, kinds_ptr, first_ptr, end_ptr, num_queries, offset, num_keys,
    BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr,
    SELECT: tl.constexpr,
):  # fmt: skip
    """CTA (tile of queries, batch row). BLOCK_SIZE of compressed keys, 0 for a window of num_keys.

    All vectors are [QUERIES].
    """
    b = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    mask = query < num_queries
    position = query + offset
    if offsets_ptr is not None:
        position += tl.load(offsets_ptr + b).to(tl.int32)
    start = tl.zeros([QUERIES], tl.int32)
    if document_start_ptr is not None:
        start = tl.load(document_start_ptr + b * num_queries + query, mask=mask, other=0)
    if BLOCK_SIZE > 0:
        first = tl.minimum(start // STRIDE, num_keys)
        # Of no complete block, and of numbers below zero, whose quotient is rounded up: none.
        complete = tl.maximum(position - (BLOCK_SIZE - 1 - STRIDE), 0) // STRIDE
        end = tl.maximum(tl.minimum(complete, num_keys), first)
    else:
        first = tl.maximum(position - num_keys + 1, start)
        end = position + 1
    if kinds_ptr is not None:
        # Empty as far on as may be: ranges do not go back, and CTAs of another document's keys
        # pass by the queries behind them.
        empty = has_kind(kinds_ptr, b, query, num_queries, KIND, SELECT)
        nothing = tl.minimum(query // STRIDE, num_keys)
        first, end = tl.where(empty, nothing, first), tl.where(empty, nothing, end)
    tl.store(first_ptr + b * num_queries + query, first, mask=mask)
    tl.store(end_ptr + b * num_queries + query, end, mask=mask)
