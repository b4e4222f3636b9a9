"""Range attention as custom operators: checks, fake implementations, autograd.

Needs triton; import it only where a hand-tuned backend was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.add_splits import add_splits
from nsa_flex.fallback_kernels.common.bwd_preprocess import row_deltas
from nsa_flex.fallback_kernels.common.checks import check_shapes, check_tensors
from nsa_flex.fallback_kernels.common.strides import empty_gradients, empty_results, to_bshd
from nsa_flex.fallback_kernels.launch.direct import directly
from nsa_flex.fallback_kernels.launch.plans import planned
from nsa_flex.fallback_kernels.ranges.bwd import ranges_gradients
from nsa_flex.fallback_kernels.ranges.fwd import ranges_forward


def ranged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor,
    end_key: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over keys first_key ... end_key - 1 of each query.

    A packed document, an offset into a cache, a window and the staircase of the compressed branch
    are all such ranges.

    Args:
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D), Hkv a divisor of Hq.
        value: (B, Hkv, Sk, Dv).
        first_key, end_key: int32 (B or 1, Sq), 0 <= first_key <= end_key <= Sk, neither of which
            decreases from one query to the next (not checked: that would read values).
        scale: factor of the logits, positive.

    Returns:
        Output (B, Hq, Sq, Dv) in query's dtype and natural log-sum-exp (B, Hq, Sq) in float32; 0
        and -inf for an empty range, with zero gradients. Scores, softmax and sums are float32,
        weights are rounded to query's dtype for the product with the values. Both outputs are
        differentiable, once. Strides are free; the memory of results is (B, S, H, D). Nothing is
        added by atomics: equal inputs give equal bits.

    Raises:
        ValueError: a shape, dtype, device or option that the kernels do not take.

    >>> out, lse = ranged_attention(q, k, v, first, end, scale=0.1)  # doctest: +SKIP
    """
    _check(query, key, value, first_key, end_key, scale)
    return _attend(query, key, value, first_key, end_key, scale)


@torch.library.custom_op("nsa_flex::ranges_forward", mutates_args=())
@planned
def forward(
    query: Tensor, key: Tensor, value: Tensor, first_key: Tensor, end_key: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Operator under `ranged_attention`."""
    if query.numel() == 0:
        return empty_results(query, value)
    with torch.cuda.device_of(query):
        return ranges_forward(query, key, value, *_bounds(first_key, end_key), scale)


@forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return empty_results(query, value)


@torch.library.custom_op("nsa_flex::ranges_backward", mutates_args=())
@planned
def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor,
    end_key: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `forward`."""
    if query.numel() == 0:
        return empty_gradients(query, key, value)
    with torch.cuda.device_of(query):
        out, grad_out, lse = to_bshd(out), to_bshd(grad_out), to_bshd(lse)
        delta = row_deltas(out, grad_out, grad_lse, int64_offsets=out[0].numel() >= 2**31)
        bounds = _bounds(first_key, end_key)
        of_call = (query, key, value, *bounds, lse, delta, grad_out, scale)
        grad_query, splits = ranges_gradients(*of_call)
        grad_key, grad_value = add_splits(splits, query.dtype)
        return grad_query, grad_key.transpose(1, 2), grad_value.transpose(1, 2)


@backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(query, key, value)


def _bounds(first_key: Tensor, end_key: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous rows, with a batch stride of 0 where all batch rows share them."""
    shared = first_key.shape[0] == 1

    def laid_out(x: Tensor) -> Tensor:
        x = x.contiguous()
        return x.as_strided(x.shape, (0, 1)) if shared else x

    return laid_out(first_key), laid_out(end_key)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, first_key, end_key, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, first_key, end_key, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: recomputation in a checkpoint gives them once
    if grad_out is None:
        grad_out = torch.zeros_like(saved[5])
    gradients = _attend_gradients(*saved, grad_out, grad_lse, ctx.scale)
    return (*gradients, None, None, None)


forward.register_autograd(_backward, setup_context=_setup_context)
_attend = directly(forward, _setup_context, _backward)
_attend_gradients = directly(backward)


def _check(
    query: Tensor, key: Tensor, value: Tensor, first_key: Tensor, end_key: Tensor, scale: float
) -> None:
    check_tensors(query, key, value)
    check_shapes(query, key, value, key.shape[2])
    if key.shape[2] == 0:
        raise ValueError("key has no tokens; at least one is needed, which no query need see")
    for name, bound in (("first_key", first_key), ("end_key", end_key)):
        rows = {(1, query.shape[2]), (query.shape[0], query.shape[2])}
        if tuple(bound.shape) not in rows or bound.dtype != torch.int32:
            got = f"{bound.dtype} {tuple(bound.shape)}"
            raise ValueError(f"{name} is {got}; it must be int32, of shape {max(rows)}")
    if first_key.shape != end_key.shape:
        raise ValueError(f"first_key has shape {tuple(first_key.shape)}, end_key another")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
