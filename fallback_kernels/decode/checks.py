"""What the decode kernels take, by shapes, dtypes and devices; values are never read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_flex.config import PRODUCTS, SUMMING_RULES, NSAConfig
from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_GROUP = 64
MAX_SLOTS = 64
MAX_TOKENS = 16
MAX_BLOCKS = 1 << 14  # ranks in the registers of one CTA
MAX_HEADS = 65535  # KV heads of all batch rows: one axis of the launch grid


def unsupported_reason(
    query: Tensor, key: Tensor, value: Tensor, config: NSAConfig, num_sets: int = 1
) -> str | None:
    """Why the decode kernels do not take these shapes, dtypes or devices; None if they do."""
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        return reason
    sizes = (key.shape[1] // num_sets, key.shape[2], value.shape[3])
    return sizes_unsupported_reason(query, *sizes, config, num_sets)


def sizes_unsupported_reason(
    query: Tensor,
    kv_heads: int,
    capacity: int,
    value_dim: int,
    config: NSAConfig,
    num_sets: int = 1,
) -> str | None:
    """`unsupported_reason` on any device, by the cache's sizes."""
    tokens, dim = query.shape[2], max(query.shape[3], value_dim)
    per_block = config.select_block_size // config.compress_stride
    limits = (
        (query.shape[1] // kv_heads, MAX_GROUP, "query heads share a KV head"),
        (dim, MAX_HEAD_DIM, "is the largest head dim"),
        (tokens, MAX_TOKENS, "new tokens"),
        (config.num_selected_blocks, MAX_SLOTS, "selected blocks"),
        (config.num_select_blocks(capacity), MAX_BLOCKS, "selectable blocks"),
        (per_block, 64, "compressed keys start in a block"),
        (query.shape[0] * kv_heads * num_sets, MAX_HEADS, "KV heads in all batch rows"),
    )
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}; the decode kernels take {DTYPES}"
    if config.selection not in SUMMING_RULES:
        return f"selection is {config.selection!r}; the decode kernels take {SUMMING_RULES}"
    slots = config.num_selected_blocks
    if config.selection == "tiled_top_k" and slots & (slots - 1):
        return f"tiles have {slots} blocks; the decode kernels take powers of two"
    for number, most, meaning in limits:
        if number > most:
            return f"{number} {meaning}; the decode kernels take at most {most}"
    if per_block & (per_block - 1):
        return (
            f"select_block_size / compress_stride is {per_block}; the decode kernels take powers "
            "of two"
        )
    return None


def are_together(query: Tensor, *others: Tensor | None) -> bool:
    """Whether all that is given is on the query's device."""
    device = query.device
    return all(x is None or x.device == device for x in others)


def check_step(
    query: Tensor,
    new_key: Tensor | None,
    new_value: Tensor | None,
    cache: tuple[Tensor, Tensor, Tensor, Tensor],
    gates: Tensor,
    gating: tuple[Tensor | None, Tensor | None],
    lengths: Tensor,
    config: NSAConfig,
    num_sets: int = 1,
    kind: str = "mean",
    phi: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ()),
    may_complete: bool = True,
) -> None:
    """Raises ValueError unless all tensors of a step belong together and the kernels take them.

    gating: offset and bias. phi: parameters of keys, and of values; products (linear, mlp) go
    without any where no block is completed.
    """
    key, value, *_ = cache
    check_cache(*cache, lengths, num_sets, config)
    check_query(query, key, value, gates, config, num_sets)
    check_gating(*gating, query, key, len(config.branches))
    if (new_key is None) != (new_value is None):
        raise ValueError("new_key and new_value must be given together")
    if new_key is not None and new_value is not None:
        check_new(new_key, new_value, key, value)
        if new_key.shape[2] != query.shape[2]:
            raise ValueError(f"new_key has {new_key.shape[2]} tokens; query has {query.shape[2]}")
    if kind in PRODUCTS and not may_complete and not (phi[0] or phi[1]):
        return
    for name, parameters, compressed in zip(("key", "value"), phi, cache[2:], strict=True):
        check_phi(kind, parameters, compressed, config, name)


def check_cache(
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    num_sets: int,
    config: NSAConfig,
) -> None:
    """Raises ValueError unless the four buffers and `lengths` belong together.

    Compressed values that no branch reads may have one row.
    """
    batch, heads, capacity, head_dim = _four(key, "key")
    if num_sets not in (1, 3) or heads % num_sets:
        raise ValueError(f"num_sets is {num_sets}, key has {heads} heads: 1, or a divisor 3")
    blocks, value_dim = _four(compressed_key, "compressed_key")[2], _four(value, "value")[3]
    is_one = not config.has("compressed") and _four(compressed_value, "compressed_value")[2] == 1
    wanted = {
        "value": (value, (batch, heads, capacity, value_dim)),
        "compressed_key": (compressed_key, (batch, heads // num_sets, blocks, head_dim)),
        "compressed_value": (
            compressed_value,
            (batch, heads // num_sets, 1 if is_one else blocks, value_dim),
        ),
    }
    for name, (tensor, shape) in wanted.items():
        check_like(name, tensor, shape, key)
    for name, tensor in ("key", key), *((name, tensor) for name, (tensor, _) in wanted.items()):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise ValueError(f"{name} has stride {tensor.stride(3)} in its last dimension, not 1")
    check_lengths(lengths, key)
    least = config.num_compressed_blocks(capacity) if config.compresses else 0
    if blocks < least:
        raise ValueError(
            f"compressed_key has {blocks} rows; a capacity of {capacity} tokens needs {least}"
        )


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


def check_new(
    new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, most: int = MAX_TOKENS
) -> None:
    """Raises ValueError unless up to `most` new tokens fit the cache's heads; any float dtype."""
    tokens = _four(new_key, "new_key")[2]
    for name, new, cache in ("new_key", new_key, key), ("new_value", new_value, value):
        shape = (cache.shape[0], cache.shape[1], tokens, cache.shape[3])
        if tuple(new.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(new.shape)}; expected {shape}")
        if not new.is_floating_point() or new.device != cache.device:
            raise ValueError(f"{name} is {new.dtype} on {new.device}; the cache is {cache.device}")
    if not 1 <= tokens <= most:
        raise ValueError(f"new_key has {tokens} tokens; the decode kernels take 1 to {most}")
    if tokens > key.shape[2]:
        raise ValueError(f"new_key has {tokens} tokens; the cache has {key.shape[2]} slots")


def check_phi(
    kind: str, parameters: Sequence[Tensor], compressed: Tensor, config: NSAConfig, name: str
) -> None:
    """Raises ValueError unless they are the parameters of a φ for `compressed`'s heads."""
    _, heads, _, dim = compressed.shape
    length = config.compress_block_size
    shapes = {
        "mean": (),
        "weighted": ((heads, length),),
        "linear": ((heads, length, dim, dim),),
        "mlp": ((length, dim), (2, length, dim, dim), (2, dim, dim)),
    }
    if kind not in shapes:
        raise ValueError(f"φ of {name} is of the kind {kind!r}; known are {', '.join(shapes)}")
    found = tuple(tuple(x.shape) for x in parameters)
    if found != shapes[kind]:
        raise ValueError(f"φ of {name} has parameters {found}; {kind} has {shapes[kind]}")
    for x in parameters:
        if x.device != compressed.device or not x.is_contiguous():
            raise ValueError(
                f"φ of {name} must be contiguous on {compressed.device}, got {x.device}"
            )


def check_query(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, config: NSAConfig, num_sets: int
) -> None:
    """Raises ValueError unless query and gates fit the cache and the kernels take them."""
    batch, heads, tokens, dim = _four(query, "query")
    if batch != key.shape[0] or dim != key.shape[3]:
        expected = f"({key.shape[0]}, Hq, T, {key.shape[3]})"
        raise ValueError(f"query has shape {tuple(query.shape)}; expected {expected}")
    kv_heads = key.shape[1] // num_sets
    if heads % kv_heads or not heads:
        raise ValueError(
            f"query has {heads} heads; key's {kv_heads} must divide them: Hq = G * Hkv"
        )
    check_like("query", query, tuple(query.shape), key)
    wanted = (batch, heads, tokens, len(config.branches))
    if tuple(gates.shape) != wanted or gates.device != key.device:
        raise ValueError(
            f"gates has shape {tuple(gates.shape)} on {gates.device}; expected {wanted} on "
            f"{key.device}"
        )
    reason = unsupported_reason(query, key, value, config, num_sets)
    if reason is not None or not tokens:
        raise ValueError(reason or "query has no tokens")


def check_gating(
    offset: Tensor | None, bias: Tensor | None, query: Tensor, key: Tensor, branches: int
) -> None:
    """Raises ValueError unless offset and bias of gates fit the query's heads and `branches`."""
    sizes = (branches, branches * query.shape[1])
    for name, x, size in zip(("offset", "bias"), (offset, bias), sizes, strict=True):
        if x is not None and (x.shape != (size,) or x.device != key.device):
            got = f"{tuple(x.shape)} on {x.device}"
            raise ValueError(f"gate_{name} must be ({size},) on {key.device}, got {got}")
        if x is not None and not x.is_contiguous():
            raise ValueError(f"gate_{name} must be contiguous, got stride {x.stride()}")
    if bias is not None and offset is None:
        raise ValueError("gate_bias is added to logits: give gate_offset too, zeros for none")


def _four(tensor: Tensor, name: str) -> torch.Size:
    if tensor.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected four dimensions")
    if not tensor.shape[1]:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected at least one head")
    return tensor.shape
