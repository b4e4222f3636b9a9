"""cuDNN's attention through torch's operators, causal or whole, in pieces where it counts too far.

cuDNN's plans are cached by the shapes and strides of query, key and value alone: output and
gradient have to be views of the same kind as the query, so that no plan meets other strides than
it was made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.strides import to_bshd

# The backward's sum of `grad * out` counts elements in 32 bits and reads those behind from
# elsewhere (cuDNN 9.19 under torch 2.11, H200: wrong gradients, no error).
MAX_SPAN = 1 << 31
PIECE = 1 << 29  # elements of a query, output or gradient that are copied at a time


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of square problems, fp16 or bf16 on CUDA.

    Args:
        query: (B, H, N, D); key: (B, Hkv, N, D); value: (B, Hkv, N, Dv).

    Returns:
        (B, H, N, Dv), and the natural log-sum-exp, float32 (B, H, N).
    """
    return _attend(query, key, value, scale, True)


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `causal`, where every query sees every key, however many of these there are."""
    return _attend(query, key, value, scale, False)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.view(query.shape[:3])


class Problem(NamedTuple):
    """What the backward of `causal` and `whole` takes."""

    grad: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """What it gives: in the order of the query's memory, and of key and value as they are."""

    query: Tensor
    key: Tensor
    value: Tensor


def causal_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Gradients:
    """Gradients of query, key and value of `causal`; N at least 2."""
    return _gradients(Problem(grad, query, key, value, out, lse), scale, True)


def whole_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Gradients:
    """Gradients of query, key and value of `whole`."""
    return _gradients(Problem(grad, query, key, value, out, lse), scale, False)


def _gradients(problem: Problem, scale: float, is_causal: bool) -> Gradients:
    grad, query, key, value, out, lse = problem
    if max(map(_span, (grad, query, out))) < MAX_SPAN:
        return _gradients_at_once(problem, scale, is_causal)
    total = Gradients(torch.empty_like(query), *(x.new_empty(x.shape) for x in (key, value)))
    for heads, of_keys in _pieces(problem):
        piece = Problem(
            to_bshd(grad[heads]),
            to_bshd(query[heads]),
            key[of_keys],
            value[of_keys],
            to_bshd(out[heads]),
            lse[heads].contiguous(),
        )
        share = _gradients_at_once(piece, scale, is_causal)
        total.query[heads] = share.query
        total.key[of_keys] = share.key
        total.value[of_keys] = share.value
    return total


def _pieces(problem: Problem) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """(row of the batch, heads) of query and of key, for one call each."""
    batch, num_heads, rows, _ = problem.query.shape
    kv_heads = problem.key.shape[1]
    group = num_heads // kv_heads
    width = max(problem.query.shape[3], problem.value.shape[3])
    step = max(1, PIECE // (rows * group * width))
    for b in range(batch):
        row = slice(b, b + 1)
        for first in range(0, kv_heads, step):
            stop = min(first + step, kv_heads)
            yield (row, slice(first * group, stop * group)), (row, slice(first, stop))


def _span(x: Tensor) -> int:
    """Elements from the first to the last of a tensor in memory."""
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _gradients_at_once(problem: Problem, scale: float, is_causal: bool) -> Gradients:
    """One call of cuDNN."""
    grad, query, key, value, out, lse = problem
    # No dropout: never read. A launch plan keeps it.
    seed = torch.arange(1, device=query.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse[..., None],
        seed,
        seed,
        None,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        scale=scale,
    )
    return Gradients(*grads)
