"""What the dense attention operators ask of query, key and value: shapes, dtypes, devices."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """ValueError unless all are 4-D, on one device that runs Triton, and of one dtype it takes."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have 4 dimensions")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}")
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        raise ValueError(reason)
    if query.dtype not in DTYPES:
        raise ValueError(f"query is {query.dtype}; the Triton kernels take {DTYPES}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, query {query.dtype}; they must agree")


def check_shapes(query: Tensor, key: Tensor, value: Tensor, num_keys: int) -> None:
    """ValueError unless key and value have `num_keys` tokens, and heads and dims fit."""
    batch, query_heads, _, head_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
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
    if not (0 < head_dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM):
        raise ValueError(
            f"head dims are {head_dim} (query, key) and {value_dim} (value); "
            f"they must be 1 to {MAX_HEAD_DIM}"
        )
