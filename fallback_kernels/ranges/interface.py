"""Range attention as custom operators: checks, fake implementations, autograd.

Needs triton; import it only where a hand-tuned backend was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason
from nsa_flex.fallback_kernels.common.bwd_preprocess import row_deltas
from nsa_flex.fallback_kernels.ranges.bwd import ranges_gradients
from nsa_flex.fallback_kernels.ranges.fwd import ranges_forward

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


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
    return forward(query, key, value, first_key, end_key, scale)


@torch.library.custom_op("nsa_flex::ranges_forward", mutates_args=())
def forward(
    query: Tensor, key: Tensor, value: Tensor, first_key: Tensor, end_key: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Operator under `ranged_attention`."""
    if query.numel() == 0:
        return _empty_results(query, value)
    with torch.cuda.device_of(query):
        return ranges_forward(query, key, value, *_bounds(first_key, end_key), scale)


@forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(query, value)


@torch.library.custom_op("nsa_flex::ranges_backward", mutates_args=())
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
        return _empty_gradients(query, key, value)
    with torch.cuda.device_of(query):
        out, grad_out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, grad_out))
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        delta = row_deltas(out, grad_out, grad_lse, int64_offsets=out[0].numel() >= 2**31)
        bounds = _bounds(first_key, end_key)
        return ranges_gradients(query, key, value, *bounds, lse, delta, grad_out, scale)


@backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(query, key, value)


def _bounds(first_key: Tensor, end_key: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous rows, with a batch stride of 0 where all batch rows share them."""
    shared = first_key.shape[0] == 1

    def laid_out(x: Tensor) -> Tensor:
        x = x.contiguous()
        return x.as_strided(x.shape, (0, 1)) if shared else x

    return laid_out(first_key), laid_out(end_key)


def _tokens_first(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """New (B, H, S, width) tensor with memory (B, S, H, width)."""
    batch, heads, tokens, _ = x.shape
    return x.new_empty((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)


def _empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out = _tokens_first(query, value.shape[3], query.dtype)
    return out, _tokens_first(query, 1, torch.float32)[..., 0]


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_tokens_first(x, x.shape[3], x.dtype) for x in (query, key, value))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, first_key, end_key, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, first_key, end_key, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    out = ctx.saved_tensors[5]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = backward(*ctx.saved_tensors, grad_out, grad_lse, ctx.scale)
    return (*gradients, None, None, None)


forward.register_autograd(_backward, setup_context=_setup_context)


def _check(
    query: Tensor, key: Tensor, value: Tensor, first_key: Tensor, end_key: Tensor, scale: float
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have 4 dimensions")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, query {query.dtype}; they must agree")
    problem = triton_unsupported_reason(query.device)
    if problem is not None:
        raise ValueError(problem)
    if query.dtype not in DTYPES:
        raise ValueError(f"query is {query.dtype}; the Triton kernels take {DTYPES}")
    _check_shapes(query, key, value)
    for name, bound in (("first_key", first_key), ("end_key", end_key)):
        rows = {(1, query.shape[2]), (query.shape[0], query.shape[2])}
        if tuple(bound.shape) not in rows or bound.dtype != torch.int32:
            got = f"{bound.dtype} {tuple(bound.shape)}"
            raise ValueError(f"{name} is {got}; it must be int32, of shape {max(rows)}")
    if first_key.shape != end_key.shape:
        raise ValueError(f"first_key has shape {tuple(first_key.shape)}, end_key another")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    batch, query_heads, _, head_dim = query.shape
    kv_heads, num_keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    expected = {
        "key": (key, (batch, kv_heads, num_keys, head_dim)),
        "value": (value, (batch, kv_heads, num_keys, value_dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(
            f"key has {kv_heads} heads; query's {query_heads} must be a multiple of it"
        )
    if num_keys == 0:
        raise ValueError("key has no tokens; at least one is needed, which no query need see")
    if not (0 < head_dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM):
        raise ValueError(
            f"head dims are {head_dim} (query, key) and {value_dim} (value); "
            f"they must be 1 to {MAX_HEAD_DIM}"
        )
