"""The whole attention core as one operator, and one for its backward.

In an order and in memory that a composition of operators cannot have: the fold is never copied, no
gradient is multiplied by a gate, and the branches add their shares of dQ into one tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.compressed.cudnn import (
    PartGradients,
    attend_part,
    differentiate_part,
)
from nsa_flex.fallback_kernels.compressed.fold import Fold, fold_of, sum_residues
from nsa_flex.fallback_kernels.fused.bwd_dkdv import key_gradients
from nsa_flex.fallback_kernels.fused.bwd_dq import Forced, Rows, query_gradients
from nsa_flex.fallback_kernels.fused.bwd_gates import (
    gated_part_lse,
    gated_sum_gradients,
    turn_signs,
)
from nsa_flex.fallback_kernels.fused.fwd_epilogue import end_of_forward, serves
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import slide_and_sum, spread_lse
from nsa_flex.fallback_kernels.selected import bwd as selected_backward
from nsa_flex.fallback_kernels.selected import fwd_partial as selected_forward
from nsa_flex.fallback_kernels.selected import prepare as selected_prepare
from nsa_flex.fallback_kernels.selected.config import SelectedPlan, index_words
from nsa_flex.fallback_kernels.topk.interface import run_choice


class CoreResults(NamedTuple):
    """What `core_attention` returns; only `out` carries gradients."""

    out: Tensor  # (B, Hq, S, Dv)
    blocks: Tensor  # int32 (B, Hkv, S, n)
    compressed_lse: Tensor  # float32 (B, Hq, S), as the next two
    selected_lse: Tensor
    sliding_lse: Tensor


def core_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    sliding_key: Tensor,
    sliding_value: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    scale: float,
) -> CoreResults:
    """All of `nsa_attention` where the queries are all the tokens of one document a row.

    Args:
        query: (B, Hq, S, D), float16 or bfloat16 on CUDA, D and Dv multiples of 8 up to 128, or
            192 and 128 from Hopper on.
            Memory ordered (B, S, H, D) is taken as it is, other memory is copied.
        key, value, sliding_key, sliding_value: (B, Hkv, S, D) and (B, Hkv, S, Dv).
        compressed_key, compressed_value: (B, Hkv, N, D) and (B, Hkv, N, Dv), N at least 1.
        gates: (B, Hq, S, 3), any float dtype and strides.
        scale: factor of query . key.

    Returns:
        `CoreResults`. Differentiable once, in all tensors. Sums are float32; the backward of the
        selected branch adds into dK and dV by float32 atomics unless
        `torch.are_deterministic_algorithms_enabled()`.
    """
    tensors = (query, key, value, compressed_key, compressed_value, gates)
    # Which keys are the same is told apart where the operator is called, not by what memory holds.
    shared = sliding_key is key and sliding_value is value
    own = (None, None) if shared else (sliding_key, sliding_value)
    results = core_forward(
        *tensors,
        *own,
        scale,
        config.counts,
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (*tensors, *own)),
        torch.are_deterministic_algorithms_enabled(),
    )
    out, blocks, _, compressed_lse, _, selected_lse, _, sliding_lse, _ = results
    return CoreResults(
        out.transpose(1, 2),
        blocks,
        compressed_lse,
        selected_lse.transpose(1, 2),
        sliding_lse.transpose(1, 2),
    )


@torch.library.custom_op("nsa_flex::core_forward", mutates_args=())
def core_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    scale: float,
    counts: list[int],
    differentiable: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, blocks, output and log-sum-exp of each branch, and the index of the selection.

    Outputs are (B, S, H, D), contiguous, log-sum-exps (B, S, H), that of the compressed branch
    (B, H, S). What only a backward wants is empty unless the call is `differentiable`: the index
    and the outputs of the branches. `deterministic` is for the backward. Without keys and values
    of its own the sliding branch has the selected one's. `counts` are an `NSAConfig`'s.
    """
    tensors = (query, key, value, compressed_key, compressed_value, gates)
    own = None
    if sliding_key is not None and sliding_value is not None:
        own = (sliding_key, sliding_value)
    with torch.cuda.device_of(query):
        return _forward(tensors, own, NSAConfig.of_counts(counts), scale, differentiable)


def _forward(
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    config: NSAConfig,
    scale: float,
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, compressed_key, compressed_value, gates = tensors
    tokens, heads = query.shape[2], query.shape[1]
    fold = _fold(tokens, config)
    rows = query.transpose(1, 2).contiguous()
    q = rows.transpose(1, 2)
    folded = (rows_contiguous(compressed_key), rows_contiguous(compressed_value))
    parts = [
        attend_part(rows, *folded, part, scale, fold.reach, fold.stride) for part in fold.parts
    ]
    outs, lses = zip(*parts, strict=True)
    compressed_lse = spread_lse(lses, fold, heads, tokens)
    blocks = run_choice(
        q,
        compressed_key,
        compressed_lse,
        torch.arange(tokens, device=query.device)[None],
        None,
        scale,
        config.num_select_blocks(tokens),
        config.counts,
    )
    words = index_words(q, value, blocks, config.select_block_size, 0)
    index = torch.empty(words if differentiable else 0, dtype=torch.int32, device=query.device)
    plan = _plan(q, key, value, blocks, config, differentiable)
    selected_keys = (rows_contiguous(key), rows_contiguous(value))
    keys = (key, value)
    window_keys = own or keys
    storage = index if differentiable else None
    if serves(plan, q, keys, window_keys, config.window_size, save=differentiable):
        end = end_of_forward(
            selected_prepare.prepare(plan, q, *selected_keys, blocks, scale, storage=storage),
            config.window_size,
            outs,
            fold,
            gates,
            save=differentiable,
        )
        return (
            end.out,
            blocks,
            end.compressed,
            compressed_lse,
            end.selected,
            end.selected_lse,
            end.sliding,
            end.sliding_lse,
            index,
        )
    selected, selected_lse = selected_forward.forward(
        plan,
        q,
        *selected_keys,
        blocks,
        scale,
        storage=storage,
    )
    selected = selected.transpose(1, 2)
    finished = slide_and_sum(
        q,
        *window_keys,
        config.window_size,
        scale,
        outs,
        fold,
        selected,
        gates,
        save=differentiable,
    )
    return (
        finished.out,
        blocks,
        finished.compressed,
        compressed_lse,
        selected if differentiable else query.new_empty(0),
        selected_lse.transpose(1, 2),
        finished.sliding,
        finished.sliding_lse,
        index,
    )


@core_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    scale: float,
    *options: Any,
) -> tuple[Tensor, ...]:
    batch, heads, tokens, _ = query.shape
    dim = value.shape[3]
    counts, differentiable, _ = options
    config = NSAConfig.of_counts(counts)
    chosen = (batch, key.shape[1], tokens, config.num_selected_blocks)
    blocks = query.new_empty(chosen, dtype=torch.int32)
    words = index_words(query, value, blocks, config.select_block_size, 0)
    branch = (batch, tokens, heads, dim)

    def lse(*shape: Any) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    return (
        query.new_empty(branch),
        blocks,
        query.new_empty(branch if differentiable else 0),
        lse(batch, heads, tokens),
        query.new_empty(branch if differentiable else 0),
        lse(*branch[:3]),
        query.new_empty(branch if differentiable else 0),
        lse(*branch[:3]),
        query.new_empty(words if differentiable else 0, dtype=torch.int32),
    )


@torch.library.custom_op("nsa_flex::core_backward", mutates_args=())
def core_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    scale: float,
    counts: list[int],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the eight tensors that `core_forward` takes; empty for what it did not get.

    Args:
        grad: (B, S, Hq, Dv), gradient of the first result.
        inputs: the six tensors, or all eight.
        results: all but the first.
        counts: `NSAConfig.counts`.
    """
    with torch.cuda.device_of(grad):
        return _backward(grad, inputs, results, scale, NSAConfig.of_counts(counts), deterministic)


def _backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    scale: float,
    config: NSAConfig,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, compressed_key, compressed_value, gates, *own = inputs
    blocks, compressed, compressed_lse, selected, selected_lse, sliding, sliding_lse, index = (
        results
    )
    fold = _fold(query.shape[2], config)
    rows = query.transpose(1, 2).contiguous()
    grad = grad.contiguous()
    sums = gated_sum_gradients(grad, compressed, selected, sliding, selected_lse, gates)
    parts = _compressed_gradients(
        sums.signed, rows, compressed_key, compressed_value, compressed, compressed_lse,
        gates, fold, scale,
    )  # fmt: skip
    grad_compressed_key, grad_compressed_value = (
        _sum_of_parts(shares, like)
        for shares, like in (
            ([part.key for part in parts], compressed_key),
            ([part.value for part in parts], compressed_value),
        )
    )

    plan = _plan(rows.transpose(1, 2), key, value, blocks, config, True)
    forced = _forced(plan, config.window_size, deterministic) if not own else Forced.none()
    of_rows = Rows(rows, grad, selected_lse, sums.delta_selected, sliding_lse, sums.delta_sliding)
    window = (*(own or (key, value)), gates, forced, config.window_size, scale)
    grad_rows = query_gradients(of_rows, [part.query for part in parts], fold, *window)
    del parts

    turn_signs(sums.signed, gates)
    totals = selected_backward.add_gradients(
        plan,
        rows.transpose(1, 2),
        rows_contiguous(key),
        rows_contiguous(value),
        blocks,
        sums.selected_lse.transpose(1, 2),
        sums.signed_delta.transpose(1, 2),
        sums.signed.transpose(1, 2),
        scale,
        deterministic=deterministic,
        index=index,
        grad_query=grad_rows.transpose(1, 2),
        forced=forced.num_local == 0,
    )
    if own:
        grad_key, grad_value = (
            total[:, : key.shape[2]].to(x.dtype).contiguous()
            for total, x in zip(totals, (key, value), strict=True)
        )
        of_window = key_gradients(of_rows, None, *window)
    else:
        grad_key, grad_value = key_gradients(of_rows, totals, *window)
        of_window = (grad.new_empty(0), grad.new_empty(0))
    return (
        grad_rows,
        grad_key,
        grad_value,
        grad_compressed_key,
        grad_compressed_value,
        sums.gates,
        *of_window,
    )


def _compressed_gradients(
    signed: Tensor,
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    gates: Tensor,
    fold: Fold,
    scale: float,
) -> list[PartGradients]:
    keys = (rows_contiguous(key), rows_contiguous(value))
    lses = gated_part_lse(lse, gates[..., 0], fold)
    return [
        differentiate_part(
            signed, rows, *keys, out, part_lse, part, scale, fold.reach, fold.stride
        )
        for part, part_lse in zip(fold.parts, lses, strict=True)
    ]


def _sum_of_parts(shares: list[Tensor], like: Tensor) -> Tensor:
    total = like.new_empty(like.shape)
    sum_residues(shares, total)
    return total


def _forced(plan: SelectedPlan, window: int, deterministic: bool) -> Forced:
    """The blocks that the window's kernels take over from the selection's, of the same keys."""
    if not 0 < plan.num_local * plan.block_size <= window:
        return Forced.none()
    # Without float atomics initial blocks are lists.
    return Forced(plan.block_size, 0 if deterministic else plan.num_initial, plan.num_local)


@core_backward.register_fake
def _(
    grad: Tensor, inputs: list[Tensor], results: list[Tensor], *_options: Any
) -> tuple[Tensor, ...]:
    query, key, value, compressed_key, compressed_value, gates, *own = inputs
    return (
        *(_natural(x) for x in (query, key, value)),
        *(x.new_empty(x.shape) for x in (compressed_key, compressed_value)),
        _natural(gates),
        *((_natural(x) for x in own) if own else (grad.new_empty(0), grad.new_empty(0))),
    )


def _fold(num_tokens: int, config: NSAConfig) -> Fold:
    return fold_of(num_tokens, config.compress_block_size, config.compress_stride)


def _natural(x: Tensor) -> Tensor:
    """New (B, S, H, D) memory for the gradient of (B, H, S, D)."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]))


def _plan(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    config: NSAConfig,
    differentiable: bool,
) -> SelectedPlan:
    return SelectedPlan.of(
        q,
        key,
        value,
        blocks,
        config.select_block_size,
        config.num_initial_blocks,
        config.num_local_blocks,
        0,
        differentiable=differentiable,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (ctx.scale, ctx.counts, _, ctx.deterministic) = inputs[:8], inputs[8:]
    tensors = tuple(x for x in tensors if x is not None)
    ctx.num_tensors = len(tensors)
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_others: Any) -> tuple[Tensor | None, ...]:
    options = (None,) * 4
    if grad is None:
        return *(None,) * 8, *options
    inputs, results = ctx.saved_tensors[: ctx.num_tensors], ctx.saved_tensors[ctx.num_tensors :]
    grads = core_backward(
        grad, list(inputs), list(results), ctx.scale, ctx.counts, ctx.deterministic
    )
    q, k, v, ck, cv, *natural = grads
    gates, *own = (x.transpose(1, 2) if x.dim() > 1 else None for x in natural)
    return *(x.transpose(1, 2) for x in (q, k, v)), ck, cv, gates, *own, *options


core_forward.register_autograd(_differentiate, setup_context=_save)
