"""What the decode kernels take, by shapes, dtypes and devices; values are never read."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_GROUP = 64
MAX_SLOTS = 64
MAX_TOKENS = 16
MAX_BLOCKS = 1 << 14  # ranks in the registers of one CTA
MAX_HEADS = 65535  # KV heads of all batch rows: one axis of the launch grid


def unsupported_reason(query: Tensor, key: Tensor, value: Tensor, config: NSAConfig) -> str | None:
    """Why the decode kernels do not take these shapes, dtypes or devices; None if they do."""
    tokens, dim = query.shape[2], max(query.shape[3], value.shape[3])
    per_block = config.select_block_size // config.compress_stride
    limits = (
        (query.shape[1] // key.shape[1], MAX_GROUP, "query heads share a KV head"),
        (dim, MAX_HEAD_DIM, "is the largest head dim"),
        (tokens, MAX_TOKENS, "new tokens"),
        (config.num_selected_blocks, MAX_SLOTS, "selected blocks"),
        (config.num_select_blocks(key.shape[2]), MAX_BLOCKS, "selectable blocks"),
        (per_block, 64, "compressed keys start in a block"),
        (query.shape[0] * key.shape[1], MAX_HEADS, "KV heads in all batch rows"),
    )
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}; the decode kernels take {DTYPES}"
    for number, most, meaning in limits:
        if number > most:
            return f"{number} {meaning}; the decode kernels take at most {most}"
    if per_block & (per_block - 1):
        return (
            f"select_block_size / compress_stride is {per_block}; the decode kernels take powers "
            "of two"
        )
    return None


def check_cache(
    key: Tensor, value: Tensor, compressed_key: Tensor, compressed_value: Tensor, lengths: Tensor
) -> None:
    """Raises ValueError unless the four buffers and `lengths` belong together."""
    batch, kv_heads, capacity, head_dim = _four(key, "key")
    blocks, value_dim = _four(compressed_key, "compressed_key")[2], _four(value, "value")[3]
    wanted = {
        "value": (value, (batch, kv_heads, capacity, value_dim)),
        "compressed_key": (compressed_key, (batch, kv_heads, blocks, head_dim)),
        "compressed_value": (compressed_value, (batch, kv_heads, blocks, value_dim)),
    }
    for name, (tensor, shape) in wanted.items():
        check_like(name, tensor, shape, key)
    for name, tensor in ("key", key), *((name, tensor) for name, (tensor, _) in wanted.items()):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise ValueError(f"{name} has stride {tensor.stride(3)} in its last dimension, not 1")
    check_lengths(lengths, key)


def check_lengths(lengths: Tensor, key: Tensor) -> None:
    """Raises ValueError unless lengths is int32 (B,), dense, beside key."""
    if lengths.shape != key.shape[:1] or lengths.dtype != torch.int32:
        got = f"{lengths.dtype} {tuple(lengths.shape)}"
        raise ValueError(f"lengths must be torch.int32 ({key.shape[0]},), got {got}")
    if lengths.device != key.device or not lengths.is_contiguous():
        raise ValueError(f"lengths must be contiguous on {key.device}, got {lengths.device}")


def check_like(name: str, tensor: Tensor, shape: tuple[int, ...], key: Tensor) -> None:
    """Raises ValueError unless `tensor` has this shape, key's dtype and key's device."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype != key.dtype or tensor.device != key.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}; key is {key.dtype} on {key.device}"
        )


def check_compressed(compressed_key: Tensor, key: Tensor, config: NSAConfig) -> None:
    """Raises ValueError if the compressed buffers are too short for the capacity."""
    least = config.num_compressed_blocks(key.shape[2])
    if compressed_key.shape[2] < least:
        raise ValueError(
            f"compressed_key has {compressed_key.shape[2]} rows; a capacity of {key.shape[2]} "
            f"tokens needs {least}"
        )


def check_sliding(
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
) -> None:
    """Raises ValueError unless both are None, or of the shapes of key and value."""
    if sliding_key is not None and sliding_value is not None:
        check_cache(sliding_key, sliding_value, sliding_key, sliding_value, lengths)
        check_like("sliding_key", sliding_key, tuple(key.shape), key)
        check_like("sliding_value", sliding_value, tuple(value.shape), key)
    elif sliding_key is not None or sliding_value is not None:
        raise ValueError("sliding_key and sliding_value must be given together")


def check_new(new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless the new tokens fit the cache's heads; any float dtype."""
    tokens = _four(new_key, "new_key")[2]
    for name, new, cache in ("new_key", new_key, key), ("new_value", new_value, value):
        shape = (cache.shape[0], cache.shape[1], tokens, cache.shape[3])
        if tuple(new.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(new.shape)}; expected {shape}")
        if not new.is_floating_point() or new.device != cache.device:
            raise ValueError(f"{name} is {new.dtype} on {new.device}; the cache is {cache.device}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"new_key has {tokens} tokens; the decode kernels take 1 to {MAX_TOKENS}")
    if tokens > key.shape[2]:
        raise ValueError(f"new_key has {tokens} tokens; the cache has {key.shape[2]} slots")


def check_weights(
    key_weights: Tensor | None, value_weights: Tensor | None, key: Tensor, config: NSAConfig
) -> None:
    """Raises ValueError unless both are None, or float32 (Hkv, l)."""
    if key_weights is None and value_weights is None:
        return
    shape = (key.shape[1], config.compress_block_size)
    for name, weights in ("key_weights", key_weights), ("value_weights", value_weights):
        if weights is None or tuple(weights.shape) != shape or weights.dtype != torch.float32:
            got = "None" if weights is None else f"{weights.dtype} {tuple(weights.shape)}"
            raise ValueError(f"{name} must be torch.float32 {shape}, got {got}")
        if weights.device != key.device or not weights.is_contiguous():
            raise ValueError(f"{name} must be contiguous on {key.device}, got {weights.device}")


def check_query(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, config: NSAConfig
) -> None:
    """Raises ValueError unless query and gates fit the cache and the kernels take them."""
    batch, heads, tokens, dim = _four(query, "query")
    if batch != key.shape[0] or dim != key.shape[3]:
        expected = f"({key.shape[0]}, Hq, T, {key.shape[3]})"
        raise ValueError(f"query has shape {tuple(query.shape)}; expected {expected}")
    if heads % key.shape[1] or not heads:
        raise ValueError(
            f"query has {heads} heads; key's {key.shape[1]} must divide them: Hq = G * Hkv"
        )
    check_like("query", query, tuple(query.shape), key)
    if tuple(gates.shape) != (batch, heads, tokens, 3) or gates.device != key.device:
        raise ValueError(
            f"gates has shape {tuple(gates.shape)} on {gates.device}; expected "
            f"{(batch, heads, tokens, 3)} on {key.device}"
        )
    reason = unsupported_reason(query, key, value, config)
    if reason is not None or not tokens:
        raise ValueError(reason or "query has no tokens")


def _four(tensor: Tensor, name: str) -> torch.Size:
    if tensor.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected four dimensions")
    if not tensor.shape[1]:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected at least one head")
    return tensor.shape
