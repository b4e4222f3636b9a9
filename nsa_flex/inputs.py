"""Whether the tensors of one call of `nsa_attention` fit together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nsa_flex.backends.branch import Inputs
from nsa_flex.config import NSAConfig
from nsa_flex.documents import check_max_document_length, is_integral

_OFFSETS = (int, torch.SymInt, Tensor)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_inputs(
    inputs: Inputs,
    config: NSAConfig,
    query_offset: int | Tensor | None,
    document_start: Tensor | None,
) -> None:
    """Raises ValueError or TypeError naming the first thing that does not fit. Reads no values."""
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
    config.specialize()
    tensors = inputs._asdict()
    check_tensors(tensors, own_dtype="gates")
    if not inputs.gates.is_floating_point():
        raise ValueError(f"gates must be floating point, got {inputs.gates.dtype}")
    query, key = inputs.query, inputs.key
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    value_dim = inputs.value.shape[-1]
    num_blocks = _num_compressed(inputs, config)
    expected = {
        "key": (batch, kv_heads, kv_len, dim),
        "value": (batch, kv_heads, kv_len, value_dim),
        "compressed_key": (batch, kv_heads, num_blocks, dim),
        "compressed_value": (batch, kv_heads, num_blocks, value_dim),
        "gates": (batch, heads, q_len, len(config.branches)),
        "sliding_key": (batch, kv_heads, kv_len, dim),
        "sliding_value": (batch, kv_heads, kv_len, value_dim),
    }
    check_shapes(tensors, expected)
    check_positions(query, key, query_offset, document_start)


def check_tensors(tensors: Mapping[str, Any], *, own_dtype: str) -> None:
    """Each a 4-D tensor on the query's device in its dtype; whole groups of heads, nothing empty.

    `own_dtype` names the tensor that need not have the query's dtype.
    """
    query, key = tensors["query"], tensors["key"]
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be 4-D (B, H, S, D), got {tuple(x.shape)}")
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}, query on {query.device}: move one")
        if name != own_dtype and x.dtype != query.dtype:
            raise ValueError(f"{name} is {x.dtype}, query {query.dtype}: cast one")
    if query.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"query is {query.dtype}; supported are {names}")
    if 0 in query.shape or 0 in key.shape:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must not be empty"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads:
        raise ValueError(f"key has {kv_heads} heads; query's {heads} must be a multiple of it")


def check_query_and_key(query: Tensor, key: Tensor) -> None:
    """`check_tensors` of queries and keys that are scored without values, and their sizes."""
    check_tensors({"query": query, "key": key}, own_dtype="")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        got = f"{tuple(query.shape)} and {tuple(key.shape)}"
        raise ValueError(f"query and key must have the same batch size and head dim, got {got}")


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError at the first tensor of another shape."""
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            got = tuple(tensors[name].shape)
            raise ValueError(f"{name} has shape {got}; expected {shape} to fit the other inputs")


def _num_compressed(inputs: Inputs, config: NSAConfig) -> int:
    """N that the compressed tensors must have; below 2, unseen blocks may fill up to 1 or 2."""
    kv_len, got = inputs.key.shape[2], inputs.compressed_key.shape[2]
    whole = (kv_len - config.compress_block_size) // config.compress_stride + 1
    return max(whole, min(got, 2))


def check_documents(document_start: Tensor | None, max_document_length: int | None) -> None:
    """Whether what is said of documents fits; how long they are is not looked at."""
    check_max_document_length(max_document_length)
    if max_document_length is not None and document_start is None:
        raise ValueError(
            f"max_document_length={max_document_length} was given without document_start: pass "
            "both, or leave it out, since each row is one document then"
        )


def check_scale(scale: float) -> None:
    """Raises ValueError unless it is positive and finite."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be positive and finite")


def check_positions(
    query: Tensor, key: Tensor, query_offset: int | Tensor | None, document_start: Tensor | None
) -> None:
    """Whether the queries lie within the keys, as far as shapes and ints tell."""
    is_offset = query_offset is None or isinstance(query_offset, _OFFSETS)
    is_offset = is_offset or hasattr(query_offset, "__index__")  # NumPy's
    if isinstance(query_offset, bool) or not is_offset:
        got = type(query_offset).__name__
        raise TypeError(f"query_offset must be an int or an int Tensor, got {got}")
    if document_start is not None and not isinstance(document_start, Tensor):
        raise TypeError(f"document_start must be a Tensor, got {type(document_start).__name__}")
    for name, x in (("query_offset", query_offset), ("document_start", document_start)):
        if isinstance(x, Tensor) and x.device != query.device:
            raise ValueError(f"{name} is on {x.device}, query on {query.device}: move one")
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if (query_offset is None or isinstance(query_offset, Tensor)) and q_len > kv_len:
        raise ValueError(f"query has {q_len} tokens, key only {kv_len}")
    if isinstance(query_offset, Tensor):
        if query_offset.shape != (batch,) or not is_integral(query_offset):
            got = f"{query_offset.dtype} {tuple(query_offset.shape)}"
            raise ValueError(f"query_offset must be an int or int ({batch},), got {got}")
    elif query_offset is not None and (query_offset < 0 or query_offset + q_len > kv_len):
        raise ValueError(
            f"query_offset={query_offset} with {q_len} queries leaves the {kv_len} keys"
        )
    if document_start is not None and (
        document_start.shape != (batch, q_len) or not is_integral(document_start)
    ):
        got = f"{document_start.dtype} {tuple(document_start.shape)}"
        raise ValueError(f"document_start must be int ({batch}, {q_len}), got {got}")
