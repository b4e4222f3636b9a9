"""Selected attention as custom operators: checks, fake implementations, autograd.

Needs triton; import it only where a hand-tuned backend was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.bwd_preprocess import row_deltas
from nsa_flex.fallback_kernels.common.checks import check_shapes, check_tensors
from nsa_flex.fallback_kernels.common.strides import empty_bshd, rows_contiguous, to_bshd
from nsa_flex.fallback_kernels.launch.direct import directly
from nsa_flex.fallback_kernels.launch.plans import planned
from nsa_flex.fallback_kernels.selected.bwd import backward
from nsa_flex.fallback_kernels.selected.config import SelectedPlan, index_words
from nsa_flex.fallback_kernels.selected.fwd_partial import forward
from nsa_flex.fallback_kernels.selected.prepare import prepare

BLOCK_SIZES = (16, 32, 64, 128)
MAX_GROUP = 64
MAX_SLOTS = 128
MAX_GRID = 65535  # CUDA's limit of the second grid dimension


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    block_size: int,
    num_initial_blocks: int,
    num_local_blocks: int,
    scale: float,
    query_offset: int | Tensor = 0,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the keys of the selected blocks, none after the query.

    Only `blocks` decides what is attended. The counts of initial and local blocks say which
    blocks almost every query has, so that they need no index; wrong counts cost time.

    Args:
        query: (B, Hq, Sq, D); query i sits at position `query_offset + i` of the keys.
        key: (B, Hkv, Sk, D), Hkv a divisor of Hq.
        value: (B, Hkv, Sk, Dv).
        blocks: int32 (B, Hkv, Sq, n), the blocks of each query and KV head: no block twice, -1 for
            none. A block after the query's own counts as none.
        block_size: l', tokens per block: 16, 32, 64 or 128.
        num_initial_blocks: blocks at the start that every query has.
        num_local_blocks: blocks up to the query's own, that one included, that it forces.
        scale: factor of the logits, positive.
        query_offset: position of query 0, an int or int (B,); `query_offset + Sq` must not exceed
            Sk. A tensor's values are not checked, for the host never sees them: one that lies
            outside counts as the nearest that does not.
        deterministic: no float atomics in the backward, so that equal inputs give equal bits,
            at 2.6 to 5 times its time (H200, 16/16 to 64/4 heads); by default what
            `torch.are_deterministic_algorithms_enabled()` says. The forward always is.

    Returns:
        Output (B, Hq, Sq, Dv) in query's dtype and to_bshd log-sum-exp (B, Hq, Sq) in float32;
        0 and -inf for a query without blocks. Scores, softmax and sums are float32; partial
        results are kept in query's dtype. Both outputs are differentiable, once. Strides are
        free; the memory of results is (B, S, H, D), and a query of other memory is copied.

    Raises:
        ValueError: a shape, dtype, device or option that the kernels do not take.

    Source: arXiv 2502.11089, section 3.3.2 (selected branch).
    """
    _check(
        query,
        key,
        value,
        blocks,
        block_size,
        num_initial_blocks,
        num_local_blocks,
        scale,
        query_offset,
    )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    differentiable = any(x.requires_grad for x in (query, key, value))
    # The deterministic backward sorts: it makes an index of its own.
    keep_index = differentiable and torch.is_grad_enabled() and not deterministic
    offsets = None
    if isinstance(query_offset, Tensor):
        offsets, query_offset = _head_offsets(query_offset, query, key), 0
    out, lse, _ = _attend(
        query,
        key,
        value,
        blocks,
        block_size,
        num_initial_blocks,
        num_local_blocks,
        scale,
        query_offset,
        deterministic,
        keep_index,
        offsets,
    )
    return out, lse


def _head_offsets(query_offset: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """int32 (B, Hkv): the offset of each batch row, within the keys."""
    within = query_offset.clamp(0, key.shape[2] - query.shape[2]).to(torch.int32)
    return within[:, None].expand(-1, key.shape[1]).contiguous()


@torch.library.custom_op("nsa_flex::selected_forward", mutates_args=())
@planned
def selected_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    block_size: int,
    num_initial_blocks: int,
    num_local_blocks: int,
    scale: float,
    query_offset: int,
    deterministic: bool,
    keep_index: bool,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator under `selected_attention`; `deterministic` is for its backward.

    The third result, int32, is the index of `blocks`, which the backward uses again if
    `keep_index` says so; else it has no elements. `offsets`: int32 (B, Hkv), contiguous, the
    offset of each batch row once a KV head, instead of `query_offset`.
    """
    plan = SelectedPlan.of(
        query,
        key,
        value,
        blocks.shape[3],
        block_size,
        num_initial_blocks,
        num_local_blocks,
        query_offset,
        differentiable=keep_index,
        offset_tensor=offsets is not None,
    )
    last_offset = query_offset if offsets is None else key.shape[2] - query.shape[2]
    storage = _empty_index(query, value, blocks, block_size, last_offset, keep_index)
    if query.numel() == 0 or blocks.numel() == 0:
        out, lse = _empty_results(query, value)
        return out.zero_(), lse.fill_(float("-inf")), storage
    with torch.cuda.device_of(query):
        out, lse = forward(
            prepare(
                *(plan, to_bshd(query), rows_contiguous(key), rows_contiguous(value)),
                *(blocks.contiguous(), scale),
                storage=storage if keep_index else None,
                offsets=offsets,
            )
        )
    return out, lse, storage


@selected_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    block_size: int,
    num_initial_blocks: int,
    num_local_blocks: int,
    scale: float,
    query_offset: int,
    deterministic: bool,
    keep_index: bool,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    last_offset = query_offset if offsets is None else key.shape[2] - query.shape[2]
    index = _empty_index(query, value, blocks, block_size, last_offset, keep_index)
    return *_empty_results(query, value), index


@torch.library.custom_op("nsa_flex::selected_backward", mutates_args=())
@planned
def selected_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    index: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    block_size: int,
    num_initial_blocks: int,
    num_local_blocks: int,
    scale: float,
    query_offset: int,
    deterministic: bool,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `selected_forward`."""
    plan = SelectedPlan.of(
        query,
        key,
        value,
        blocks.shape[3],
        block_size,
        num_initial_blocks,
        num_local_blocks,
        query_offset,
        offset_tensor=offsets is not None,
    )
    if query.numel() == 0 or blocks.numel() == 0:
        grad_query, grad_key, grad_value = _empty_gradients(query, key, value)
        return grad_query.zero_(), grad_key.zero_(), grad_value.zero_()
    with torch.cuda.device_of(query):
        grad_out = to_bshd(grad_out)
        return backward(
            plan,
            to_bshd(query),
            rows_contiguous(key),
            rows_contiguous(value),
            blocks.contiguous(),
            to_bshd(lse[..., None])[..., 0],
            row_deltas(to_bshd(out), grad_out, grad_lse, int64_offsets=plan.int64_offsets),
            grad_out,
            scale,
            deterministic=deterministic,
            index=index if index.numel() else None,
            offsets=offsets,
        )


@selected_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(query, key, value)


def _empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    _, heads, tokens, _ = query.shape
    out = empty_bshd(query, heads, tokens, value.shape[3], query.dtype)
    lse = empty_bshd(query, heads, tokens, 1, torch.float32)[..., 0]
    return out, lse


def _empty_index(
    query: Tensor,
    value: Tensor,
    blocks: Tensor,
    block_size: int,
    last_offset: int,
    keep: bool,
) -> Tensor:
    words = index_words(query, value, blocks, block_size, last_offset) if keep else 0
    return torch.empty(words, dtype=torch.int32, device=query.device)


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query_, key_, value_ = (
        empty_bshd(x, x.shape[1], x.shape[2], x.shape[3], x.dtype) for x in (query, key, value)
    )
    return query_, key_, value_


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, blocks, *options, _keep_index, offsets = inputs
    out, lse, index = output
    ctx.mark_non_differentiable(index)
    ctx.save_for_backward(query, key, value, blocks, index, out, lse, offsets)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
) -> tuple[Any, ...]:
    query, key, value, blocks, index, out, lse, offsets = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = _attend_gradients(
        query, key, value, blocks, index, out, lse, grad_out, grad_lse, *ctx.options, offsets
    )
    return (*gradients, None, *(None for _ in ctx.options), None, None)


selected_forward.register_autograd(_backward, setup_context=_setup_context)
_attend = directly(selected_forward, _setup_context, _backward)
_attend_gradients = directly(selected_backward)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    block_size: int,
    num_initial_blocks: int,
    num_local_blocks: int,
    scale: float,
    query_offset: int | Tensor,
) -> None:
    _check_tensors(query, key, value, blocks)
    _check_shapes(query, key, value, blocks)
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}; the Triton kernels take {BLOCK_SIZES}")
    if num_initial_blocks < 0 or num_local_blocks < 1:
        raise ValueError(
            f"num_initial_blocks={num_initial_blocks} must be at least 0 and "
            f"num_local_blocks={num_local_blocks} at least 1"
        )
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    _check_offset(query, key, query_offset)


def _check_offset(query: Tensor, key: Tensor, query_offset: int | Tensor) -> None:
    batch, _, num_queries, _ = query.shape
    num_keys = key.shape[2]
    if isinstance(query_offset, Tensor):
        if query_offset.shape != (batch,) or query_offset.is_floating_point():
            got = f"{query_offset.dtype} {tuple(query_offset.shape)}"
            raise ValueError(f"query_offset must be an int or int ({batch},), got {got}")
        if query_offset.device != query.device:
            raise ValueError(f"query_offset is on {query_offset.device}, query on {query.device}")
        if num_queries > num_keys:
            raise ValueError(f"query has {num_queries} tokens, key only {num_keys}")
    elif query_offset < 0 or query_offset + num_queries > num_keys:
        raise ValueError(
            f"query_offset={query_offset} with {num_queries} queries must lie within "
            f"{num_keys} keys: a query's own key is among them"
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor) -> None:
    check_tensors(query, key, value)
    if blocks.dim() != 4:
        raise ValueError(f"blocks has shape {tuple(blocks.shape)}; it must have 4 dimensions")
    if blocks.device != query.device:
        raise ValueError(f"blocks is on {blocks.device}, query on {query.device}")
    if blocks.dtype != torch.int32:
        raise ValueError(f"blocks is {blocks.dtype}; it must be torch.int32")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor) -> None:
    check_shapes(query, key, value, key.shape[2])
    batch, query_heads, num_queries, _ = query.shape
    kv_heads, num_slots = key.shape[1], blocks.shape[3]
    expected = (batch, kv_heads, num_queries, num_slots)
    if tuple(blocks.shape) != expected:
        raise ValueError(f"blocks has shape {tuple(blocks.shape)}; it must be {expected}")
    if query_heads > MAX_GROUP * kv_heads:
        raise ValueError(
            f"{query_heads // kv_heads} query heads share a KV head; at most {MAX_GROUP} can"
        )
    if batch * kv_heads > MAX_GRID:
        raise ValueError(
            f"batch {batch} times {kv_heads} KV heads is more than {MAX_GRID}, the largest grid"
        )
    if num_slots > MAX_SLOTS:
        raise ValueError(f"blocks offers {num_slots} blocks a query; at most {MAX_SLOTS}")
    if batch * kv_heads * num_queries * num_slots >= 2**31:
        raise ValueError(
            f"blocks has {tuple(blocks.shape)} entries; there must be fewer than 2**31"
        )
