"""The stages of the core's backward, in order, for each `BackwardRoute.kernels`.

"lists": gates and deltas, compressed branch, dQ of everything but the top-k blocks, selected
branch (which adds the top-k blocks' dQ), and dK and dV of the window with the selected branch's
sums. After the first stage nobody needs the outputs of the selected and the sliding branch.

For short documents among long ones `short_bwd_dq` runs in the first stage and later kernels skip
those rows; `short_bwd_dkdv` runs last and overwrites dK and dV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.add_splits import add_splits
from nsa_flex.fallback_kernels.common.block_kinds import block_kinds
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.fused.bwd_dkdv import key_gradients
from nsa_flex.fallback_kernels.fused.bwd_dq import InitialLocal, QueryRows, query_gradients
from nsa_flex.fallback_kernels.fused.bwd_gates import (
    SumGradients,
    after_zero,
    gated_sum_gradients,
    num_stats,
    stats_in,
    switch_gate_sign,
)
from nsa_flex.fallback_kernels.fused.compressed_branch import compressed_gradients
from nsa_flex.fallback_kernels.fused.route import (
    BackwardRoute,
    offsets_of,
    past_keys,
    plan_selected,
    rows_kept,
    starts_by_position,
)
from nsa_flex.fallback_kernels.ranges.bwd import tokens_read_around
from nsa_flex.fallback_kernels.selected import bwd as selected_backward
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.short.bwd_dq import query_gradients as short_query_gradients
from nsa_flex.fallback_kernels.short.bwd_dq import stats_shape, with_padding
from nsa_flex.fallback_kernels.short.core import (
    all_key_gradients,
    overwrite_key_gradients,
    short_backward,
)
from nsa_flex.fallback_kernels.short.fwd import ShortResults

BranchGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
CoreGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def run_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    document_start: Tensor | None,
    scale: float,
    config: NSAConfig,
    deterministic: bool,
    route: BackwardRoute,
) -> CoreGradients:
    """The results of `core_backward` by lists, all in one operator."""
    if route.short_documents:
        grad = grad.contiguous()  # the first stage copies no rows of short documents
    rows = grad if grad.is_contiguous() else grad.new_empty(grad.shape)
    of_call = (document_start, scale, config)
    first = run_gates_backward(
        grad, inputs, results, *of_call, route, None if rows is grad else rows
    )
    blocks, compressed, compressed_lse, _, selected_lse, _, sliding_lse, index = results
    kept = Kept(blocks, compressed, compressed_lse, selected_lse, sliding_lse, index)
    of_branches = run_branches_backward(
        *(rows, first.sums, inputs, kept, *of_call, deterministic, route, first.short)
    )
    return *of_branches[:5], first.gates, *of_branches[5:]


@dataclass(frozen=True)
class Short:
    """Short documents beside long ones: what the first stage computes of their queries."""

    query: Tensor  # dQ (B, S, Hq, D), contiguous; other rows are still to be written
    stats: Tensor  # as `query_gradients` of `short/` returns them
    kinds: Tensor  # of `backward_kinds`


@dataclass(frozen=True)
class GateGradients:
    """Results of the first stage."""

    gates: Tensor  # (B, S, Hq, 3)
    sums: SumGradients
    short: Short | None  # None where no document can be short


def backward_kinds(
    document_start: Tensor | None, config: NSAConfig, route: BackwardRoute
) -> Tensor | None:
    """Of `block_kinds`, where documents may be short. As a result of the forward every call would
    have it; this is a launch an operator.
    """
    if document_start is None or not route.short_documents:
        return None
    return block_kinds(document_start, config, route.short_documents)


def run_gates_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    document_start: Tensor | None,
    scale: float,
    config: NSAConfig,
    route: BackwardRoute,
    rows: Tensor | None = None,
    memory: Tensor | None = None,
) -> GateGradients:
    """The first stage. Arguments as of `core_backward`; rows, memory: of `gated_sum_gradients`.

    Queries of short documents get all their gradients here, in one pass over the outputs.
    """
    query, *_, gates = inputs[:6]
    blocks, compressed, compressed_lse, selected, selected_lse, sliding, *_ = results
    kinds = backward_kinds(document_start, config, route)
    grad_gates, sums = gated_sum_gradients(
        *(grad, compressed, selected, sliding, selected_lse, gates),
        compressed_lse if route.compressed == "ranges" else None,
        rows=rows,
        kinds=kinds,
        block_size=config.select_block_size,
        around=tokens_read_around(config.compress_stride),
        memory=memory,
    )
    if kinds is None:
        return GateGradients(grad_gates, sums, None)
    batch, heads, tokens, dim = query.shape
    of_short = short_query_gradients(
        grad.transpose(1, 2),
        tuple(inputs[:6]),
        (inputs[6], inputs[7]) if len(inputs) > 6 else None,
        ShortResults(grad, *results[1:-1]),  # the output itself is not needed
        document_start,
        config,
        scale,
        route.short_documents,
        blocks,
        kinds,
        (query.new_empty((batch, tokens, heads, dim)), grad_gates),
    )
    return GateGradients(grad_gates, sums, Short(of_short.query, of_short.stats, kinds))


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
    route: BackwardRoute,
    short: Short | None = None,
) -> BranchGradients:
    """Gradients of all inputs but the gates, in their order; writes into `sums.signed`.

    grad: (B, S, Hq, Dv), contiguous, or None where `sums.signed` is all there is of it.
    short: of `run_gates_backward`; the first result is its `query` then.
    """
    query, key, value, compressed_key, compressed_value, gates, *own = inputs
    signed = sums.signed
    rows = query.transpose(1, 2).contiguous()
    grad_query, kinds = (None, None) if short is None else (short.query, short.kinds)
    offsets = offsets_of(query, key)
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
        route.compressed,
        kinds,
        offsets,
        past_keys(query, key),
    )

    plan = plan_selected(
        *(rows.transpose(1, 2), key, value, config, document_start is not None, True),
        offsets is not None,
    )
    taken_over = (
        InitialLocal.none(plan.block_size) if own else _taken_over(plan, config, deterministic)
    )
    in_place = grad is None
    if grad is None:
        assert short is None  # `signed` is not written there
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
    starts = starts_by_position(document_start, past_keys(query, key))
    of_window = (starts, taken_over, config.window_size, scale)
    stores_local = taken_over.num_local == 0  # its dK and dV, by the selected branch's kernels
    zeros = None if stores_local else selected_backward.empty_sums(plan, key)
    of_branches = (of_rows, signed, parts, fold, window_key, window_value, gates)
    grad_rows, stats = query_gradients(*of_branches, *of_window, zeros, kinds, grad_query)
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
        kinds=kinds,
        offsets=offsets,
    )
    if in_place:
        switch_gate_sign(signed, to_selected)
    if own:
        grad_key, grad_value = (
            x_sum[:, : key.shape[2]].to(x.dtype).contiguous()
            for x_sum, x in zip(selected_sums, (key, value), strict=True)
        )
        of_own = key_gradients(of_rows, stats, None, window_key, window_value, *of_window, kinds)
        *compressed, own_key, own_value = add_splits(of_compressed, key.dtype, of_own)
    else:
        of_keys = key_gradients(of_rows, stats, selected_sums, key, value, *of_window, kinds)
        *compressed, grad_key, grad_value = add_splits(of_compressed, key.dtype, of_keys)
        own_key, own_value = signed.new_empty(0), signed.new_empty(0)
    grads = (grad_rows, grad_key, grad_value, compressed[0], compressed[1], own_key, own_value)
    if short is not None:
        assert document_start is not None
        overwrite_key_gradients(
            grad.transpose(1, 2),
            tuple(inputs[:6]),
            (window_key, window_value) if own else None,
            short.stats,
            document_start,
            short.kinds,
            config,
            scale,
            route.short_documents,
            grads[1:] if own else grads[1:5],
        )
    return grads


def _taken_over(plan: SelectedPlan, config: NSAConfig, deterministic: bool) -> InitialLocal:
    """Initial and local blocks that the window's kernels take over from the selected branch's."""
    if not 0 < plan.num_local * plan.block_size <= config.window_size:
        return InitialLocal.none(plan.block_size)
    # Without float atomics the index lists initial blocks as well.
    num_initial = 0 if deterministic else plan.num_initial
    return InitialLocal(plan.block_size, num_initial, plan.num_local)


def any_stats(query: Tensor) -> Tensor:
    """Flat memory of the first stage's statistics, whatever the route."""
    size = math.prod(stats_shape(*query.shape[:3], masked=True))
    return torch.empty(size, dtype=torch.float32, device=query.device)


def run_first_of_any_length(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    scale: float,
    config: NSAConfig,
    route: BackwardRoute,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gates' gradients, what the second stage takes, `any_stats` with statistics, and `grad`.

    The second is `SumGradients.signed`, all that lists need; with other kernels dQ, (B, S, H, D).
    Of `grad` there is a copy for these alone, else memory with anything in it.
    """
    memory = any_stats(inputs[0])
    batch, tokens, heads, dim = grad.shape
    kept = grad.new_empty((batch, rows_kept(tokens, config), heads, dim))
    if route.kernels == "lists":
        call = (grad, inputs, results, None, scale, config, route)
        first = run_gates_backward(*call, memory=memory)
        return first.gates, first.sums.signed, memory, kept
    found = short_query_gradients(
        grad.transpose(1, 2),
        tuple(inputs[:6]),
        (inputs[6], inputs[7]) if len(inputs) > 6 else None,
        ShortResults(grad, *results[1:-1]),  # the output itself is not needed
        *(None, config, scale, _longest_of_short(config, route)),
        results[0] if route.kernels == "masked" else None,
    )
    stats = with_padding(found.stats)
    stats_in(memory, tuple(stats.shape)).copy_(stats)
    return found.gates, found.query, memory, kept.copy_(grad)


def run_second_of_any_length(
    grad: Tensor,
    first: Tensor,
    memory: Tensor,
    inputs: list[Tensor],
    kept: Kept,
    scale: float,
    config: NSAConfig,
    deterministic: bool,
    route: BackwardRoute,
) -> BranchGradients:
    """`run_branches_backward` with what `run_first_of_any_length` returned, `grad` the last."""
    batch, heads, tokens, _ = inputs[0].shape
    if route.kernels == "lists":
        number = num_stats(kept.compressed if route.compressed == "ranges" else None)
        sums = SumGradients(first, stats_in(memory, (number, batch, tokens, heads)))
        call = (inputs, kept, None, scale, config, deterministic, route)
        return run_branches_backward(None, sums, *call)
    is_masked = route.kernels == "masked"
    shape = stats_shape(batch, heads, tokens, masked=is_masked)
    own = (inputs[6], inputs[7]) if len(inputs) > 6 else None
    of_keys, of_window = all_key_gradients(
        grad.transpose(1, 2),
        tuple(inputs[:6]),
        own,
        stats_in(memory, shape)[..., :tokens],
        *(None, config, scale, _longest_of_short(config, route)),
        masked=is_masked,
    )
    window_key, window_value = of_window or (grad.new_empty(0), grad.new_empty(0))
    # An operator returns no memory that it was given.
    return first.clone(), *of_keys, window_key, window_value  # type: ignore[return-value]


def _longest_of_short(config: NSAConfig, route: BackwardRoute) -> int:
    return route.longest if route.kernels == "masked" else config.num_selected_tokens


def run_short_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    document_start: Tensor | None,
    scale: float,
    config: NSAConfig,
    route: BackwardRoute,
) -> CoreGradients:
    """The results of `core_backward` by the kernels "short" or "masked"."""
    is_masked = route.kernels == "masked"
    own = (inputs[6], inputs[7]) if len(inputs) > 6 else None
    saved = ShortResults(grad, *results[1:-1])  # the output itself is not needed
    grads = short_backward(
        grad.transpose(1, 2),
        tuple(inputs[:6]),
        own,
        saved,
        document_start,
        config,
        scale,
        _longest_of_short(config, route),
        results[0] if is_masked else None,
    )
    dq, dk, dv, dck, dcv, gates, *of_window = grads
    window_key, window_value = of_window or (grad.new_empty(0), grad.new_empty(0))
    return dq, dk, dv, dck, dcv, gates, window_key, window_value
