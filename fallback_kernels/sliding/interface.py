"""Sliding attention as custom operators: checks, fake implementations, autograd.

Needs triton; import it only where a hand-tuned backend was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.bwd_preprocess import row_deltas
from nsa_flex.fallback_kernels.common.checks import check_shapes, check_tensors
from nsa_flex.fallback_kernels.common.strides import empty_gradients, empty_results, to_bshd
from nsa_flex.fallback_kernels.launch.direct import directly
from nsa_flex.fallback_kernels.launch.plans import planned
from nsa_flex.fallback_kernels.sliding import bwd as sliding_backward
from nsa_flex.fallback_kernels.sliding import fwd as sliding_forward


def sliding_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window_size: int,
    scale: float,
    document_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the last `window_size` keys up to the query's own.

    Args:
        query: (B, Hq, S, D).
        key: (B, Hkv, S, D), Hkv a divisor of Hq.
        value: (B, Hkv, S, Dv).
        window_size: keys that a query sees, its own among them; at least 1, S or more for all.
        scale: factor of the logits, positive.
        document_start: int32 (B, S), first key of each query's document, which it sees nothing
            before; never decreasing along a row (not checked: that would read values).

    Returns:
        Output (B, Hq, S, Dv) in query's dtype and natural log-sum-exp (B, Hq, S) in float32.
        Scores, softmax and sums are float32, weights are rounded to query's dtype for the
        product with the values. Both outputs are differentiable, once. Strides are free; the
        memory of results is (B, S, H, D). Nothing is added by atomics: equal inputs give equal
        bits.

    Raises:
        ValueError: a shape, dtype, device or option that the kernels do not take.

    Source: arXiv 2502.11089, section 3.3.3 (sliding window).

    >>> out, lse = sliding_attention(q, k, v, window_size=512, scale=0.1)  # doctest: +SKIP
    """
    _check(query, key, value, window_size, scale)
    _check_documents(query, document_start)
    return _attend(query, key, value, document_start, window_size, scale)


@torch.library.custom_op("nsa_flex::sliding_forward", mutates_args=())
@planned
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_start: Tensor | None,
    window_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Operator under `sliding_attention`."""
    if query.numel() == 0:
        return empty_results(query, value)
    with torch.cuda.device_of(query):
        start = None if document_start is None else document_start.contiguous()
        return sliding_forward.sliding_forward(query, key, value, start, window_size, scale)


@forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_options: Any) -> tuple[Tensor, Tensor]:
    return empty_results(query, value)


@torch.library.custom_op("nsa_flex::sliding_backward", mutates_args=())
@planned
def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    document_start: Tensor | None,
    window_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `forward`."""
    if query.numel() == 0:
        return empty_gradients(query, key, value)
    with torch.cuda.device_of(query):
        int64_offsets = out[0].numel() >= 2**31
        delta = row_deltas(to_bshd(out), to_bshd(grad_out), grad_lse, int64_offsets=int64_offsets)
        start = None if document_start is None else document_start.contiguous()
        return sliding_backward.sliding_gradients(
            query, key, value, grad_out, lse, delta, start, window_size, scale
        )


@backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(query, key, value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, document_start, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, document_start)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, document_start = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = _attend_gradients(
        *(query, key, value, out, lse, grad_out, grad_lse, document_start), *ctx.options
    )
    return (*gradients, None, *(None for _ in ctx.options))


forward.register_autograd(_backward, setup_context=_setup_context)
_attend = directly(forward, _setup_context, _backward)
_attend_gradients = directly(backward)


def _check(query: Tensor, key: Tensor, value: Tensor, window_size: int, scale: float) -> None:
    check_tensors(query, key, value)
    check_shapes(query, key, value, query.shape[2])
    if window_size < 1:
        raise ValueError(f"window_size is {window_size}; a query sees at least its own key")
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")


def _check_documents(query: Tensor, document_start: Tensor | None) -> None:
    expected = (query.shape[0], query.shape[2])
    if document_start is not None and (
        tuple(document_start.shape) != expected or document_start.dtype != torch.int32
    ):
        got = f"{document_start.dtype} {tuple(document_start.shape)}"
        raise ValueError(f"document_start is {got}; it must be int32, of shape {expected}")
