"""The stages of the core's forward and backward, in order.

Forward: compressed branch, top-k block selection from its log-sum-exps, selected branch, then the
sliding branch with the gated sum as its epilogue. Where selected and sliding branch have the same
keys, one epilogue computes what is left of both. Where a call is small, one kernel attends the row
whole for both instead, and masks what was not selected; what it saves is the same.

Backward: gates and deltas, compressed branch, dQ of everything but the top-k blocks, selected
branch (which adds the top-k blocks' dQ), and dK and dV of the window with the selected branch's
sums. After the first stage nobody needs the outputs of the selected and the sliding branch.

With documents, a document's first blocks are top-k blocks as far as kernels are concerned: what
counts as an initial block is counted from the row's start, and only the first document begins
there. Local blocks are the same with documents and without. Queries of a document that see no more
blocks than they select have short rows' forward, which is written last. Short documents have short
rows' backward: queries in the first stage, while the branches' outputs are there, and nobody
touches what they have got then; keys at the end, over what others left there.

Offsets are read on the device, so that one launch plan serves all chunks of a prefill. There is no
backward of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.add_splits import add_splits
from nsa_flex.fallback_kernels.common.documents import (
    NONE_EARLY,
    NONE_LEFT_OUT,
    Early,
    LeftOut,
)
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.fused import fwd_epilogue
from nsa_flex.fallback_kernels.fused.bwd_dkdv import key_gradients
from nsa_flex.fallback_kernels.fused.bwd_dq import InitialLocal, QueryRows, query_gradients
from nsa_flex.fallback_kernels.fused.bwd_gates import (
    SumGradients,
    after_zero,
    gated_sum_gradients,
    switch_gate_sign,
)
from nsa_flex.fallback_kernels.fused.compressed_branch import (
    attend_compressed,
    compressed_gradients,
    is_ranged,
)
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import sliding_epilogue
from nsa_flex.fallback_kernels.ranges.bwd import tokens_read_around
from nsa_flex.fallback_kernels.selected import bwd as selected_backward
from nsa_flex.fallback_kernels.selected import fwd_partial as selected_forward
from nsa_flex.fallback_kernels.selected import prepare as selected_prepare
from nsa_flex.fallback_kernels.selected.config import SelectedPlan, index_words
from nsa_flex.fallback_kernels.short.bwd_dq import query_gradients as short_query_gradients
from nsa_flex.fallback_kernels.short.chosen import (
    is_masked,
    is_masked_backward,
    is_masked_in_two,
    longest_of,
    masked_tokens,
)
from nsa_flex.fallback_kernels.short.core import overwrite_key_gradients
from nsa_flex.fallback_kernels.short.fwd import (
    Chosen,
    ShortResults,
    empty_results,
    short_forward,
)
from nsa_flex.fallback_kernels.topk.interface import run_topk

CoreTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
BranchGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
CoreGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def run_forward(
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    differentiable: bool,
    max_document_length: int | None = None,
    offsets: Tensor | None = None,
) -> CoreTensors:
    """The results of `core_forward`; `own`: keys and values of the sliding branch, if others."""
    query, key, value, compressed_key, compressed_value, gates = tensors
    tokens = query.shape[2]
    longest = longest_of(query, document_start, max_document_length)
    rows = query.transpose(1, 2).contiguous()
    q = rows.transpose(1, 2)
    # One part of the compressed branch, in the order of tokens.
    is_one_part = is_ranged(query.shape[0], tokens, document_start) and offsets is None
    is_masked_forward = is_one_part and is_masked(q, key, value, config, longest)
    early = NONE_EARLY
    is_early_apart = not is_masked_forward or is_masked_in_two(query, value)
    if document_start is not None and offsets is None and is_early_apart:
        early = Early(document_start, config.num_selected_tokens)
    parts, fold, compressed_lse = attend_compressed(
        rows, compressed_key, compressed_value, document_start, config, scale, offsets, early
    )
    blocks = run_topk(
        q,
        compressed_key,
        compressed_lse,
        _positions(tokens, offsets, query.device),
        document_start,
        scale,
        config.num_select_blocks(key.shape[2]),
        config.counts,
        longest,
    )
    words = index_words(q, value, blocks, config.select_block_size, 0)
    index = torch.empty(words if differentiable else 0, dtype=torch.int32, device=query.device)
    is_indexed = differentiable and not is_masked_backward(q, key, value, config, longest)
    left_out = _left_out(q, key, value, document_start, config)
    plan = _plan(q, key, value, blocks, document_start, config, is_indexed, offsets is not None)
    selected_keys = (rows_contiguous(key), rows_contiguous(value))
    keys, window_keys = (key, value), own or (key, value)
    window, storage = config.window_size, index if is_indexed else None
    if is_masked_forward:
        if is_indexed:
            selected_prepare.prepare(plan, q, *selected_keys, blocks, scale, storage=storage)
        chosen, found = Chosen(blocks, parts[0], compressed_lse), None
        call = ((q, *tensors[1:]), own, document_start, config, scale)
        if early.document_start is not None:
            found = empty_results(q, value, True, differentiable, chosen)
            short_forward(*call, early.tokens, save=differentiable, into=found)
        whole = short_forward(*call, longest, save=differentiable, chosen=chosen, into=found)
        return (
            whole.out,
            blocks,
            whole.compressed if differentiable else query.new_empty(0),
            compressed_lse,
            whole.selected,
            whole.selected_lse,
            whole.sliding,
            whole.sliding_lse,
            index,
        )
    reason = fwd_epilogue.unsupported_reason(
        plan, q, keys, window_keys, window, save=differentiable
    )
    prepared = (plan, q, *selected_keys, blocks, scale)
    options: dict[str, Any] = {"storage": storage, "offsets": offsets}
    options |= {"left_out": left_out, "early": early}
    saved: dict[str, Any] = {
        "save": differentiable,
        "save_compressed": differentiable and not is_one_part,
    }
    if reason is None:
        selection = selected_prepare.prepare(*prepared, **options)
        both = fwd_epilogue.fwd_epilogue(
            selection, document_start, window, parts, fold, gates, **saved
        )
        out, compressed, selected, sliding = both.out, both.compressed, both.selected, both.sliding
        selected_lse, sliding_lse = both.selected_lse, both.sliding_lse
    else:
        selected, selected_lse = selected_forward.forward(*prepared, **options)
        selected, selected_lse = (x.transpose(1, 2) for x in (selected, selected_lse))
        last = sliding_epilogue(
            q,
            *window_keys,
            document_start,
            window,
            scale,
            parts,
            fold,
            selected,
            gates,
            offsets=offsets,
            **saved,
        )
        out, compressed, sliding = last.out, last.compressed, last.sliding
        sliding_lse = last.sliding_lse
        if not differentiable:
            selected = query.new_empty(0)
    if differentiable and is_one_part:
        compressed = parts[0]
    if early.document_start is not None:
        # Others left these out, or computed something: what is written last counts.
        found = ShortResults(
            out, parts[0], compressed_lse, selected, selected_lse, sliding, sliding_lse
        )
        short_forward(
            (q, *tensors[1:]),
            own,
            document_start,
            config,
            scale,
            early.tokens,
            save=differentiable,
            into=found,
        )
    return (
        out,
        blocks,
        compressed,
        compressed_lse,
        selected,
        selected_lse,
        sliding,
        sliding_lse,
        index,
    )


def run_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    document_start: Tensor | None,
    scale: float,
    config: NSAConfig,
    deterministic: bool,
) -> CoreGradients:
    """The results of `core_backward`, all in one step."""
    query, key, value = inputs[:3]
    if _left_out(query, key, value, document_start, config).document_start is not None:
        grad = grad.contiguous()  # which the first stage leaves undone there
    rows = grad if grad.is_contiguous() else grad.new_empty(grad.shape)
    of_call = (document_start, scale, config)
    first = run_gates_backward(grad, inputs, results, *of_call, None if rows is grad else rows)
    blocks, compressed, compressed_lse, _, selected_lse, _, sliding_lse, index = results
    kept = Kept(blocks, compressed, compressed_lse, selected_lse, sliding_lse, index)
    of_branches = run_branches_backward(
        *(rows, first.sums, inputs, kept, *of_call, deterministic, first.short)
    )
    return *of_branches[:5], first.gates, *of_branches[5:]


@dataclass(frozen=True)
class Short:
    """What the queries of short documents beside long ones get before these."""

    query: Tensor  # dQ (B, S, Hq, D) of theirs, contiguous; the rest is to be written
    stats: Tensor  # as short rows' `query_gradients` returns them


@dataclass(frozen=True)
class GateGradients:
    """What the backward computes while the outputs of the branches are there."""

    gates: Tensor  # (B, S, Hq, 3)
    sums: SumGradients
    short: Short | None  # None where no document can be short


def run_gates_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    document_start: Tensor | None,
    scale: float,
    config: NSAConfig,
    rows: Tensor | None = None,
) -> GateGradients:
    """The first stage. Arguments as of `core_backward`; rows: as of `gated_sum_gradients`.

    Queries of short documents have all their gradients at once, in one pass over the outputs.
    """
    query, key, value, *_, gates = inputs[:6]
    blocks, compressed, compressed_lse, selected, selected_lse, sliding, *_ = results
    ranged = is_ranged(query.shape[0], query.shape[2], document_start)
    left_out = _left_out(query, key, value, document_start, config)
    grad_gates, sums = gated_sum_gradients(
        *(grad, compressed, selected, sliding, selected_lse, gates),
        compressed_lse if ranged else None,
        rows=rows,
        left_out=left_out,
        around=tokens_read_around(config.compress_stride),
    )
    if left_out.document_start is None:
        return GateGradients(grad_gates, sums, None)
    batch, heads, tokens, dim = query.shape
    of_short = short_query_gradients(
        grad.transpose(1, 2),
        tuple(inputs[:6]),
        (inputs[6], inputs[7]) if len(inputs) > 6 else None,
        ShortResults(grad, *results[1:-1]),  # the output itself is not needed
        left_out.document_start,
        config,
        scale,
        left_out.tokens,
        blocks,
        (query.new_empty((batch, tokens, heads, dim)), grad_gates),
    )
    return GateGradients(grad_gates, sums, Short(of_short.query, of_short.stats))


@dataclass(frozen=True)
class Kept:
    """Results of `core_forward` that the backward of the branches takes."""

    blocks: Tensor
    compressed: Tensor | None  # None where range attention runs
    compressed_lse: Tensor
    selected_lse: Tensor
    sliding_lse: Tensor
    index: Tensor


def run_branches_backward(
    grad: Tensor | None,
    sums: SumGradients,
    inputs: list[Tensor],
    kept: Kept,
    document_start: Tensor | None,
    scale: float,
    config: NSAConfig,
    deterministic: bool,
    short: Short | None = None,
) -> BranchGradients:
    """Gradients of all inputs but the gates, in their order; writes into `sums.signed`.

    grad: (B, S, Hq, Dv), contiguous, or None where `sums.signed` is all there is of it.
    short: of `run_gates_backward`; the first result is its `query` then.
    """
    query, key, value, compressed_key, compressed_value, gates, *own = inputs
    signed = sums.signed
    rows = query.transpose(1, 2).contiguous()
    left_out = _left_out(query, key, value, document_start, config)
    parts, fold, of_compressed = compressed_gradients(
        sums,
        rows,
        compressed_key,
        compressed_value,
        kept.compressed,
        kept.compressed_lse,
        gates,
        document_start,
        config,
        scale,
        left_out,
    )

    plan = _plan(rows.transpose(1, 2), key, value, kept.blocks, document_start, config, True)
    taken_over = (
        InitialLocal.none(plan.block_size) if own else _taken_over(plan, config, deterministic)
    )
    in_place = grad is None
    if grad is None:
        assert short is None  # signs of rows that are left out are anything
        gates_after_zero = after_zero(gates)
        to_compressed, to_selected = gates_after_zero[..., :2], gates_after_zero[..., ::2]
        switch_gate_sign(signed, to_compressed)  # back to no sign, which the window's kernels want
        grad = signed
    else:
        to_selected = gates
    of_rows = QueryRows(
        rows,
        grad,
        kept.selected_lse,
        sums.delta_selected,
        kept.sliding_lse,
        sums.delta_sliding,
    )
    window_key, window_value = own or (key, value)
    of_window = (document_start, taken_over, config.window_size, scale)
    stores_local = taken_over.num_local == 0  # its dK and dV, by the selected branch's kernels
    zeros = None if stores_local else selected_backward.empty_sums(plan, key)
    of_branches = (of_rows, signed, parts, fold, window_key, window_value, gates)
    grad_rows, stats = query_gradients(
        *of_branches, *of_window, zeros, left_out.tokens, None if short is None else short.query
    )
    del of_branches
    del parts  # their memory is large, and the next stage allocates

    selected_sums = selected_backward.add_gradients(
        plan,
        rows.transpose(1, 2),
        rows_contiguous(key),
        rows_contiguous(value),
        kept.blocks,
        sums.selected,
        signed.transpose(1, 2),
        scale,
        deterministic=deterministic,
        index=kept.index,
        grad_query=grad_rows.transpose(1, 2),
        initial_local=stores_local,
        zeros=zeros,
        left_out=left_out,
    )
    if in_place:
        switch_gate_sign(signed, to_selected)
    if own:
        grad_key, grad_value = (
            x_sum[:, : key.shape[2]].to(x.dtype).contiguous()
            for x_sum, x in zip(selected_sums, (key, value), strict=True)
        )
        of_own = key_gradients(
            of_rows, stats, None, window_key, window_value, *of_window, left_out.tokens
        )
        *compressed, own_key, own_value = add_splits(of_compressed, key.dtype, of_own)
    else:
        of_keys = key_gradients(
            of_rows, stats, selected_sums, key, value, *of_window, left_out.tokens
        )
        *compressed, grad_key, grad_value = add_splits(of_compressed, key.dtype, of_keys)
        own_key, own_value = signed.new_empty(0), signed.new_empty(0)
    grads = (grad_rows, grad_key, grad_value, compressed[0], compressed[1], own_key, own_value)
    if short is not None:
        assert left_out.document_start is not None
        overwrite_key_gradients(
            grad.transpose(1, 2),
            tuple(inputs[:6]),
            (window_key, window_value) if own else None,
            short.stats,
            left_out.document_start,
            config,
            scale,
            left_out.tokens,
            grads[1:] if own else grads[1:5],
        )
    return grads


def _left_out(
    query: Tensor, key: Tensor, value: Tensor, document_start: Tensor | None, config: NSAConfig
) -> LeftOut:
    """Documents whose backward is that of documents that are attended whole."""
    tokens = masked_tokens(query, key, value, document_start, config)
    return LeftOut(document_start, tokens) if tokens > 0 else NONE_LEFT_OUT


def _taken_over(plan: SelectedPlan, config: NSAConfig, deterministic: bool) -> InitialLocal:
    """Initial and local blocks that the window's kernels take over from the selected branch's."""
    if not 0 < plan.num_local * plan.block_size <= config.window_size:
        return InitialLocal.none(plan.block_size)
    # Without float atomics the index lists initial blocks as well.
    num_initial = 0 if deterministic else plan.num_initial
    return InitialLocal(plan.block_size, num_initial, plan.num_local)


def _plan(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    differentiable: bool,
    offset_tensor: bool = False,
) -> SelectedPlan:
    return SelectedPlan.of(
        q,
        key,
        value,
        blocks,
        config.select_block_size,
        config.num_initial_blocks if document_start is None else 0,
        config.num_local_blocks,
        0,
        differentiable=differentiable,
        offset_tensor=offset_tensor,
    )


def _positions(tokens: int, offsets: Tensor | None, device: torch.device) -> Tensor:
    """Position of each query: (1, S), or int32 (B, S) with `offsets`."""
    if offsets is None:
        return torch.arange(tokens, device=device)[None]
    return torch.arange(tokens, dtype=torch.int32, device=device)[None] + offsets[:, :1]
