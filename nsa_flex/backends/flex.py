"""All three branches as FlexAttention: mask_mods, analytic BlockMasks, fused Triton kernels."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from nsa_flex.backends.branch import Branch
from nsa_flex.backends.fold import fold_queries, repeat_keys, unfold_outputs
from nsa_flex.masks import (
    compressed_block_mask,
    folded_block_mask,
    selected_block_mask,
    sliding_block_mask,
)
from nsa_flex.masks.block_mask import index_range

Output = tuple[Tensor, Tensor | None]

# Triton's matrix product wants at least 16 rows; a smaller group is padded to that.
MIN_ROWS = 16


def compressed(branch: Branch) -> Output:
    """Branch 1, folded to causal attention where the queries are all the tokens."""
    return _run(_folded if branch.offset is None else _staircase, branch)


def selected(branch: Branch) -> Output:
    """Branch 2 with a group's heads folded into rows: one Q block a query, KV blocks as chosen."""
    return _run(_selected, branch)


def sliding(branch: Branch) -> Output:
    """Branch 3: a causal window."""
    return _run(_sliding, branch)


def _folded(branch: Branch) -> Output:
    config, query = branch.config, branch.query
    num_blocks, heads = branch.key.shape[2], query.shape[1]
    mask = folded_block_mask(
        config,
        num_blocks,
        heads,
        query.device,
        document_start=branch.document_start,
        backward=branch.needs_grad,
    )
    folded = fold_queries(query, num_blocks, config)
    key, value = (repeat_keys(x, config) for x in (branch.key, branch.value))
    out, lse = _flex(branch, folded, key, value, mask)
    out = unfold_outputs(out, query.shape[2], config, 0.0)
    if lse is not None:
        lse = unfold_outputs(lse, query.shape[2], config, float("-inf"))
    return out, lse


def _staircase(branch: Branch) -> Output:
    return _masked(compressed_block_mask, branch)


def _sliding(branch: Branch) -> Output:
    return _masked(sliding_block_mask, branch)


def _masked(make_mask: Callable[..., BlockMask], branch: Branch) -> Output:
    """Queries and keys as they are under the mask that `make_mask` makes for them."""
    mask = make_mask(
        branch.config,
        branch.query.shape[2],
        branch.key.shape[2],
        branch.query.device,
        offset=branch.offset,
        document_start=branch.document_start,
        backward=branch.needs_grad,
    )
    return _flex(branch, branch.query, branch.key, branch.value, mask)


def _selected(branch: Branch) -> Output:
    assert branch.blocks is not None
    query, kv_heads, group = branch.query, branch.key.shape[1], branch.group_size
    rows_per_query = rows_of_group(group)
    mask = selected_block_mask(
        branch.config,
        branch.blocks,
        branch.key.shape[2],
        rows_per_query,
        offset=branch.offset,
        backward=branch.needs_grad,
    )
    rows = group_rows(query, kv_heads, rows_per_query)
    if query.device.type == "cuda" and branch.needs_grad:
        from nsa_flex.backends.small_block_backward import allow_small_block_backward

        allow_small_block_backward()
    columns = min(branch.config.select_block_size, 64)
    tiles = {"fwd_BLOCK_M": rows_per_query, "fwd_BLOCK_N": columns, "fwd_num_warps": 4}
    out, lse = _flex(branch, rows, branch.key, branch.value, mask, tiles)
    out = out.unflatten(2, (-1, rows_per_query))[:, :, :, :group]  # [B, Hkv, S, G, Dv]
    out = out.transpose(2, 3).flatten(1, 2)
    if lse is not None:
        lse = lse.unflatten(2, (-1, rows_per_query))[..., :group].transpose(2, 3).flatten(1, 2)
    return out, lse


def group_rows(query: Tensor, kv_heads: int, rows_per_query: int) -> Tensor:
    """(B, Hq, S, D) -> (B, Hkv, S * rows_per_query, D), a group's heads side by side."""
    grouped = query.unflatten(1, (kv_heads, -1)).transpose(2, 3)  # [B, Hkv, S, G, D]
    group = grouped.shape[3]
    rows = F.pad(grouped, (0, 0, 0, rows_per_query - group)).flatten(2, 3)
    if query.device.type == "cpu":
        # Inductor's C++ template takes a view of a 5-D buffer for its query and fails on it: an
        # operation over the 4-D rows, though it changes nothing, gives it a buffer of its own.
        row = index_range(rows.shape[2], rows.device)[:, None]
        rows = torch.where(row % rows_per_query < group, rows, 0.0)
    return rows


def rows_of_group(group_size: int) -> int:
    """Rows that stand for one query: a power of two, at least 16."""
    return max(MIN_ROWS, 1 << (group_size - 1).bit_length())


def _flex(
    branch: Branch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    tiles: dict[str, Any] | None = None,
) -> Output:
    q_len = query.shape[2]
    # Not the decode kernel, which would take over below 128 rows: it is wrong on the fold.
    options = {"BACKEND": "TRITON", **(tiles or {})} if query.device.type == "cuda" else None
    if query.device.type == "cpu":
        # FlexAttention refuses inputs that require gradients here, even where none are recorded.
        query, key, value = query.detach(), key.detach(), value.detach()
        if torch.compiler.is_compiling():
            if branch.need_lse:
                raise ValueError(
                    "FlexAttention compiled on the CPU gives no log-sum-exp: "
                    "use backend='dense', or leave out return_aux"
                )
            query, key, value = _whole_blocks(query, key, value, mask)
    result: Any = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        scale=branch.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,  # type: ignore[arg-type]
        return_aux=AuxRequest(lse=True) if branch.need_lse else None,  # type: ignore[arg-type]
    )
    if not branch.need_lse:
        out = result[:, :, :q_len]
        if query.device.type == "cpu" and torch.compiler.is_compiling():
            # Else a graph is guarded on whether the cut left a contiguous tensor.
            out = out.clone(memory_format=torch.contiguous_format)
        return out, None
    out, aux = result
    return out[:, :, :q_len], aux.lse[:, :, :q_len].detach().float()


def _whole_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-pads to whole blocks: the C++ template is silently wrong on a partial last one.

    Keys past the end are behind every query, so the masks hide them.
    """
    (q_size, kv_size), (q_len, kv_len) = mask.BLOCK_SIZE, (query.shape[2], key.shape[2])
    q_pad, kv_pad = -q_len % q_size, -kv_len % kv_size
    mask.seq_lengths = (q_len + q_pad, kv_len + kv_pad)
    key, value = (F.pad(x, (0, 0, 0, kv_pad)) for x in (key, value))
    return F.pad(query, (0, 0, 0, q_pad)), key, value


def _run(function: Callable[[Branch], Output], branch: Branch) -> Output:
    """Inlined into the caller's graph, or compiled by itself on CUDA.

    FlexAttention run eagerly evaluates all Sq x Sk scores; on the CPU that is what debugging
    wants, on CUDA it is never what anybody wants.
    """
    if torch.compiler.is_compiling() or branch.query.device.type != "cuda":
        return function(branch)
    tensors = (branch.query, branch.key, branch.value)
    if branch.query.is_meta:
        return _shapes_alone(branch)
    facts = (branch.config, branch.scale, branch.needs_grad, branch.need_lse)
    shapes = tuple((x.dtype, x.shape[1], x.shape[3]) for x in tensors)
    optional = (branch.offset is None, branch.document_start is None)
    return _compiled(function, (*facts, shapes, optional))(branch)


def _shapes_alone(branch: Branch) -> Output:
    """Of tensors that hold nothing and only say they are on CUDA, as `rehearsal` passes them."""
    query, value = branch.query, branch.value
    ties = query.sum() + branch.key.sum() + value.sum()  # what gradients flow to
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if branch.need_lse else None
    return ties.expand(*query.shape[:3], value.shape[3]).contiguous(), lse


@functools.cache
def _compiled(function: Callable[[Branch], Output], key: object) -> Callable[[Branch], Output]:
    """`function` compiled for one set of static facts.

    Each gets a code object and a name of its own. By code object Dynamo counts recompilations,
    and shapes that differ on purpose must not use up the limit; by name it remembers which numbers
    have changed and makes symbols of them, and what `key` holds must not become one.
    """
    code = function.__code__
    code = code.replace(co_name=f"{code.co_name}_{next(_serial)}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    return torch.compile(own, fullgraph=True)


_serial = itertools.count()
