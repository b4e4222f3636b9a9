"""The whole attention core as one operator, and one for its backward.

The same kernels as the branches have alone, in an order and in memory that a composition of
operators cannot have: the fold is never copied, one gated gradient at a time is in memory, and the
branches add their shares of dQ into one tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels import selected_backward, selected_forward
from nsa_flex.fallback_kernels.choose import run_choice
from nsa_flex.fallback_kernels.core_compressed import (
    attend_part,
    differentiate_part,
)
from nsa_flex.fallback_kernels.core_inference import end_without_backward, serves
from nsa_flex.fallback_kernels.core_merge import (
    apply_gate,
    gated_sum_gradients,
    slide_and_sum,
    spread_lse,
)
from nsa_flex.fallback_kernels.fold_parts import Fold, fold_of, pieces_of, place_part
from nsa_flex.fallback_kernels.selected_plan import SelectedPlan, index_words, rows_contiguous
from nsa_flex.fallback_kernels.sliding_backward import sliding_gradients


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
    tensors = (
        query,
        key,
        value,
        compressed_key,
        compressed_value,
        sliding_key,
        sliding_value,
        gates,
    )
    results = core_forward(
        *tensors,
        scale,
        config.compress_block_size,
        config.compress_stride,
        config.select_block_size,
        config.num_selected_blocks,
        config.num_initial_blocks,
        config.num_local_blocks,
        config.window_size,
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
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


class _Sizes(NamedTuple):
    """The integers of a call, in the order of the operators' arguments."""

    compress_block_size: int
    compress_stride: int
    select_block_size: int
    num_selected_blocks: int
    num_initial_blocks: int
    num_local_blocks: int
    window_size: int

    def fold(self, num_tokens: int) -> Fold:
        return fold_of(num_tokens, self.compress_block_size, self.compress_stride)


@torch.library.custom_op("nsa_flex::core_forward", mutates_args=())
def core_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    sliding_key: Tensor,
    sliding_value: Tensor,
    gates: Tensor,
    scale: float,
    compress_block_size: int,
    compress_stride: int,
    select_block_size: int,
    num_selected_blocks: int,
    num_initial_blocks: int,
    num_local_blocks: int,
    window_size: int,
    differentiable: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, blocks, output and log-sum-exp of each branch, and the index of the selection.

    Outputs are (B, S, H, D), contiguous, log-sum-exps (B, S, H), that of the compressed branch
    (B, H, S). What only a backward wants is empty unless the call is `differentiable`: the index
    and the outputs of the branches. `deterministic` is for the backward.
    """
    sizes = _Sizes(
        compress_block_size,
        compress_stride,
        select_block_size,
        num_selected_blocks,
        num_initial_blocks,
        num_local_blocks,
        window_size,
    )
    tensors = (
        query,
        key,
        value,
        compressed_key,
        compressed_value,
        sliding_key,
        sliding_value,
        gates,
    )
    with torch.cuda.device_of(query):
        return _forward(tensors, sizes, scale, differentiable)


def _forward(
    tensors: tuple[Tensor, ...], sizes: _Sizes, scale: float, differentiable: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, compressed_key, compressed_value, sliding_key, sliding_value, gates = (
        tensors
    )
    tokens, heads = query.shape[2], query.shape[1]
    fold = sizes.fold(tokens)
    rows = query.transpose(1, 2).contiguous()
    q = rows.transpose(1, 2)
    keys = (rows_contiguous(compressed_key), rows_contiguous(compressed_value))
    parts = [attend_part(rows, *keys, part, scale, fold.reach, fold.stride) for part in fold.parts]
    outs, lses = zip(*parts, strict=True)
    compressed_lse = spread_lse(lses, fold, heads, tokens)
    blocks = run_choice(
        q,
        compressed_key,
        compressed_lse,
        torch.arange(tokens, device=query.device)[None],
        None,
        scale,
        -(-tokens // sizes.select_block_size),
        *sizes[:6],
    )
    words = index_words(q, key, value, blocks, sizes.select_block_size, 0)
    index = torch.empty(words if differentiable else 0, dtype=torch.int32, device=query.device)
    plan = _plan(q, key, value, blocks, sizes)
    selected_keys = (rows_contiguous(key), rows_contiguous(value))
    if not differentiable and serves(
        plan, (key, value), (sliding_key, sliding_value), sizes.window_size
    ):
        out, selected_lse, sliding_lse = end_without_backward(
            selected_forward.prepare(plan, q, *selected_keys, blocks, scale, storage=None),
            sizes.window_size,
            outs,
            fold,
            gates,
        )
        compressed, selected, sliding = (query.new_empty(0) for _ in range(3))
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
    selected, selected_lse = selected_forward.forward(
        plan,
        q,
        *selected_keys,
        blocks,
        scale,
        storage=index if differentiable else None,
    )
    selected = selected.transpose(1, 2)
    finished = slide_and_sum(
        q,
        sliding_key,
        sliding_value,
        sizes.window_size,
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
    sliding_key: Tensor,
    sliding_value: Tensor,
    gates: Tensor,
    scale: float,
    *options: Any,
) -> tuple[Tensor, ...]:
    batch, heads, tokens, _ = query.shape
    dim = value.shape[3]
    sizes, differentiable = _Sizes(*options[:7]), options[7]
    chosen = (batch, key.shape[1], tokens, sizes.num_selected_blocks)
    blocks = query.new_empty(chosen, dtype=torch.int32)
    words = index_words(query, key, value, blocks, sizes.select_block_size, 0)
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
    sizes: list[int],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the eight inputs of `core_forward`.

    Args:
        grad: (B, S, Hq, Dv), gradient of the first result.
        inputs: the eight tensors.
        results: all but the first.
        sizes: as `_Sizes`.
    """
    with torch.cuda.device_of(grad):
        return _backward(grad, inputs, results, scale, _Sizes(*sizes), deterministic)


def _backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    scale: float,
    sizes: _Sizes,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, compressed_key, compressed_value, sliding_key, sliding_value, gates = inputs
    blocks, compressed, compressed_lse, selected, selected_lse, sliding, sliding_lse, index = (
        results
    )
    fold = sizes.fold(query.shape[2])
    rows = query.transpose(1, 2).contiguous()
    grad = grad.contiguous()
    sums = gated_sum_gradients(grad, compressed, selected, sliding, gates)

    grad_rows = torch.empty_like(rows)
    grad_rows[:, : fold.reach] = 0
    grad_keys = (
        torch.zeros(compressed_key.shape, dtype=torch.float32, device=grad.device),
        torch.zeros(compressed_value.shape, dtype=torch.float32, device=grad.device),
    )
    keys = (rows_contiguous(compressed_key), rows_contiguous(compressed_value))
    for part in pieces_of(fold, query.shape[2]):
        of_queries = differentiate_part(
            sums.compressed,
            rows,
            *keys,
            compressed,
            compressed_lse,
            part,
            scale,
            fold.reach,
            fold.stride,
            grad_keys,
        )
        place_part(of_queries, grad_rows, part, fold.reach, fold.stride)
    grad_query = grad_rows.transpose(1, 2)

    # The selection's kernels have no register to spare for a gate; the compressed branch is done
    # with its gradient, whose memory takes theirs.
    apply_gate(grad, gates, 1, sums.compressed)
    q = rows.transpose(1, 2)
    _, grad_key, grad_value = selected_backward.backward(
        _plan(q, key, value, blocks, sizes),
        q,
        rows_contiguous(key),
        rows_contiguous(value),
        blocks,
        selected_lse.transpose(1, 2),
        sums.delta_selected.transpose(1, 2),
        sums.compressed.transpose(1, 2),
        scale,
        deterministic=deterministic,
        index=index,
        grad_query=grad_query,
        add_query=grad_query,
    )
    _, grad_sliding_key, grad_sliding_value = sliding_gradients(
        q,
        sliding_key,
        sliding_value,
        grad.transpose(1, 2),
        sliding_lse.transpose(1, 2),
        sums.delta_sliding,
        gates[..., 2],
        sizes.window_size,
        scale,
        grad_query=grad_query,
        add_query=grad_query,
    )
    grad_compressed_key, grad_compressed_value = (
        x.to(y.dtype) for x, y in zip(grad_keys, (compressed_key, compressed_value), strict=True)
    )
    return (
        grad_rows,
        grad_key.transpose(1, 2),
        grad_value.transpose(1, 2),
        grad_compressed_key,
        grad_compressed_value,
        grad_sliding_key.transpose(1, 2),
        grad_sliding_value.transpose(1, 2),
        sums.gates,
    )


@core_backward.register_fake
def _(
    grad: Tensor, inputs: list[Tensor], results: list[Tensor], *_options: Any
) -> tuple[Tensor, ...]:
    query, key, value, compressed_key, compressed_value, sliding_key, sliding_value, gates = inputs
    return (
        *(_natural(x) for x in (query, key, value)),
        *(x.new_empty(x.shape) for x in (compressed_key, compressed_value)),
        *(_natural(x) for x in (sliding_key, sliding_value, gates)),
    )


def _natural(x: Tensor) -> Tensor:
    """New (B, S, H, D) memory for the gradient of (B, H, S, D)."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]))


def _plan(q: Tensor, key: Tensor, value: Tensor, blocks: Tensor, sizes: _Sizes) -> SelectedPlan:
    return SelectedPlan.of(
        q,
        key,
        value,
        blocks,
        sizes.select_block_size,
        sizes.num_initial_blocks,
        sizes.num_local_blocks,
        0,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (ctx.scale, *sizes, _, ctx.deterministic) = inputs[:8], inputs[8:]
    ctx.sizes = list(sizes)
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_others: Any) -> tuple[Tensor | None, ...]:
    options = (None,) * 10
    if grad is None:
        return *(None,) * 8, *options
    inputs, results = ctx.saved_tensors[:8], ctx.saved_tensors[8:]
    grads = core_backward(
        grad, list(inputs), list(results), ctx.scale, ctx.sizes, ctx.deterministic
    )
    q, k, v, ck, cv, sk, sv, gates = grads
    natural = (x.transpose(1, 2) for x in (sk, sv, gates))
    return (
        *(x.transpose(1, 2) for x in (q, k, v)), ck, cv, *natural, *options
    )  # fmt: skip


core_forward.register_autograd(_differentiate, setup_context=_save)
