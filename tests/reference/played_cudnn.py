"""cuDNN's attention and its backward, causal or whole, played by PyTorch in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What cuDNN computes, in float64, with the strides of cuDNN's results."""
    return _attend(query, key, value, scale, True)


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `causal`, where every query sees every key."""
    return _attend(query, key, value, scale, False)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT * scale
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0]).triu(1).bool(), float("-inf"))
    return (logits.softmax(-1) @ v).to(query.dtype), logits.logsumexp(-1).float()


def causal_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> list[Tensor]:
    """Of query, key and value; delta comes from `out`, the probabilities from `lse`."""
    return _differentiate(grad, query, key, value, out, lse, scale, True)


def whole_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> list[Tensor]:
    """As `causal_gradients`, where every query sees every key."""
    return _differentiate(grad, query, key, value, out, lse, scale, False)


def _differentiate(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    is_causal: bool,
) -> list[Tensor]:
    group = query.shape[1] // key.shape[1]
    q, k, v, do = (x.double() for x in (query, key, value, grad))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p = (q @ k.mT * scale - lse.double()[..., None]).exp()
    if is_causal:
        p = p.tril()
    delta = (out.double() * do).sum(-1, keepdim=True)
    ds = p * (do @ v.mT - delta) * scale
    of_keys = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q, p.mT @ do))
    return [x.to(query.dtype) for x in (ds @ k, *of_keys)]
