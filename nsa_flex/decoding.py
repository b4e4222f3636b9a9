"""One decode step over a cache: store, compress what became whole, attend.

Constant shapes and no host sync, whatever the lengths of the rows are: where tokens go and what a
query sees follows from `lengths`, int32 (B,) on the device, the tokens of each row before the new
ones. Triton kernels where they take the inputs, else PyTorch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.attention import BranchLSE, NSAAux, gated_sum
from nsa_flex.backends.dense import masked_attention
from nsa_flex.compression import Compression
from nsa_flex.config import NSAConfig
from nsa_flex.installed import HAS_TRITON
from nsa_flex.selection import choose_blocks

# So many new tokens are a decode step (speculative ones included); more are a prefill.
MAX_STEP = 16


def store_fused(
    new_key: Tensor,
    new_value: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    compress_key: Compression,
    compress_value: Compression,
) -> bool:
    """`append` and `compress_completed` in one kernel; False, and nothing done, without one.

    There is one for at most `MAX_STEP` tokens on CUDA and for φ of the kinds mean and weighted.
    """
    phi = (compress_key, compress_value)
    if store_unsupported_reason(new_key, key, value, compressed_key, *phi) is not None:
        return False
    weights = {}
    if compress_key.kind == "weighted":
        weights = {
            "key_weights": compress_key.logits.float().softmax(-1),
            "value_weights": compress_value.logits.float().softmax(-1),
        }
    from nsa_flex.fallback_kernels.decode import interface as decode

    decode.append_and_compress(
        new_key,
        new_value,
        key,
        value,
        compressed_key,
        compressed_value,
        lengths,
        compress_key.config,
        **weights,
    )
    return True


def append(
    new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, lengths: Tensor
) -> None:
    """Store T new tokens a row at slots `lengths` ... `lengths + T - 1`, in place.

    Args:
        new_key: (B, Hkv, T, D), new_value: (B, Hkv, T, Dv).
        key: (B, Hkv, C, D), value: (B, Hkv, C, Dv), the cache.
        lengths: int32 (B,), tokens of each row before these.
    """
    slots = lengths[:, None] + torch.arange(new_key.shape[2], device=lengths.device)
    for new, cached in ((new_key, key), (new_value, value)):
        _put(cached, slots, new)


def compress_completed(
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    num_new: int,
    compress_key: Compression,
    compress_value: Compression,
) -> None:
    """Write the row of every block that the last `num_new` tokens made whole, in place.

    Block i is made whole by token i·d + l - 1: `lengths < i·d + l <= lengths + num_new`. Other
    rows stay as they are.

    Args:
        key: (B, Hkv, C, D), value: (B, Hkv, C, Dv), the new tokens among them.
        compressed_key, compressed_value: (B, Hkv, max(1, (C - l) // d + 1), D or Dv).
        lengths: int32 (B,), tokens of each row before the new ones.
        compress_key, compress_value: φ.
    """
    if key.shape[2] >= compress_key.config.compress_block_size:
        _compress(key, compressed_key, lengths, num_new, compress_key)
        _compress(value, compressed_value, lengths, num_new, compress_value)


def _compress(
    source: Tensor, compressed: Tensor, lengths: Tensor, num_new: int, compress: Compression
) -> None:
    block, stride = compress.config.compress_block_size, compress.config.compress_stride
    num_rows = compressed.shape[2]
    count = min(-(-num_new // stride), num_rows)
    first = ((lengths - block) // stride + 1).clamp(min=0)
    base = first.clamp(max=num_rows - count)
    offsets = torch.arange((count - 1) * stride + block, device=lengths.device)
    tokens = (base * stride)[:, None] + offsets
    rows = base[:, None] + offsets[:count]
    fresh = compress(_take(source, tokens))[:, :, :count]  # [B, Hkv, count, D]
    whole = (rows >= first[:, None]) & (rows * stride + block <= (lengths + num_new)[:, None])
    kept = _take(compressed, rows)
    _put(compressed, rows, torch.where(whole[:, None, :, None], fresh.to(kept.dtype), kept))


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    *,
    lengths: Tensor,
    config: NSAConfig,
    scale: float,
    sliding_key: Tensor | None = None,
    sliding_value: Tensor | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, NSAAux]:
    """`nsa_attention` of a few queries at `lengths` ... `lengths + T - 1` over a cache.

    Reads the compressed keys, the tokens of the chosen blocks and the window; nothing else of the
    cache. What lies behind a query may be anything finite.

    Args:
        query: (B, Hq, T, D), T at most `MAX_STEP`.
        key: (B, Hkv, C, D), value: (B, Hkv, C, Dv), the new tokens among them.
        compressed_key, compressed_value: (B, Hkv, Ncap, D or Dv).
        gates: (B, Hq, T, 3), order compressed, selected, sliding.
        lengths: int32 (B,), position of query 0 of each row.
        scale: factor of query . key.
        sliding_key, sliding_value: of the sliding branch, if its own.
        return_aux: also return the chosen blocks and the log-sum-exps.

    Returns:
        (B, Hq, T, Dv) in the query's dtype, and an `NSAAux` if asked.
    """
    config.specialize()
    if unsupported_reason(query, key, value, config) is None:
        from nsa_flex.fallback_kernels.decode import interface as decode

        result: Any = decode.decode_attention(
            query,
            key,
            value,
            compressed_key,
            compressed_value,
            gates,
            lengths,
            config=config,
            scale=scale,
            sliding_key=sliding_key,
            sliding_value=sliding_value,
            return_aux=return_aux,
        )
        if not return_aux:
            return result
        out, aux = result
        return out, NSAAux(aux.blocks, BranchLSE(*aux.lse.unbind(-1)))
    positions = lengths[:, None] + torch.arange(query.shape[2], device=lengths.device)  # [B, T]
    compressed = _compressed(query, compressed_key, compressed_value, positions, config, scale)
    blocks = choose_blocks(
        query,
        compressed_key,
        config=config,
        scale=scale,
        num_blocks=config.num_select_blocks(key.shape[2]),
        positions=positions,
    )
    selected = _selected(query, key, value, blocks, positions, config, scale)
    sliding = _sliding(
        query,
        key if sliding_key is None else sliding_key,
        value if sliding_value is None else sliding_value,
        positions,
        config,
        scale,
    )
    out = gated_sum([compressed[0], selected[0], sliding[0]], gates)
    if not return_aux:
        return out
    return out, NSAAux(blocks, BranchLSE(compressed[1], selected[1], sliding[1]))


def unsupported_reason(query: Tensor, key: Tensor, value: Tensor, config: NSAConfig) -> str | None:
    """Why the Triton kernels do not take a step of such shapes and dtypes; None if they do."""
    if query.device.type != "cuda":
        return f"the decode kernels need a CUDA device, got {query.device.type}"
    if not HAS_TRITON:
        return "triton is not installed"
    from nsa_flex.fallback_kernels.decode import interface as decode

    return decode.unsupported_reason(query, key, value, config)


def store_unsupported_reason(
    new_key: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compress_key: Compression,
    compress_value: Compression,
) -> str | None:
    """Why no one kernel appends and compresses; None if there is one."""
    if new_key.shape[2] > MAX_STEP:
        return f"at most {MAX_STEP} tokens are stored by one kernel, got {new_key.shape[2]}"
    if key.shape[1] != compressed_key.shape[1]:
        return "each branch has keys of its own, of which one kernel compresses no part"
    kinds = (compress_key.kind, compress_value.kind)
    if kinds not in (("mean", "mean"), ("weighted", "weighted")):
        return f"one kernel stores for φ of the kinds mean and weighted, got {' and '.join(kinds)}"
    return unsupported_reason(new_key, key, value, compress_key.config)


def _compressed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    start = torch.arange(key.shape[2], device=key.device) * config.compress_stride
    visible = start + config.compress_block_size - 1 <= positions[..., None]  # [B, T, Ncap]
    return masked_attention(query, key, value, visible[:, None], scale)


def _selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to the gathered tokens of the chosen blocks, each query with keys of its own."""
    batch, kv_heads, num_queries, _ = blocks.shape
    size = config.select_block_size
    tokens = blocks[..., None] * size + torch.arange(size, device=key.device)
    visible = (blocks >= 0)[..., None] & (tokens <= positions[:, None, :, None, None])
    tokens = tokens.clamp(0, key.shape[2] - 1).flatten(2)  # [B, Hkv, T * n * l']
    row = torch.arange(batch, device=key.device)[:, None, None]
    head = torch.arange(kv_heads, device=key.device)[:, None]
    chosen_key, chosen_value = (
        x[row, head, tokens].unflatten(2, (num_queries, -1)).flatten(1, 2) for x in (key, value)
    )  # [B, Hkv * T, n * l', D]
    alone = query.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(1, 3)[:, :, None]
    mask = visible.flatten(3).flatten(1, 2)[:, :, None]  # [B, Hkv * T, 1, n * l']
    out, lse = masked_attention(alone, chosen_key, chosen_value, mask, scale)
    out = out[:, :, 0].unflatten(1, (kv_heads, num_queries, -1)).transpose(2, 3).flatten(1, 2)
    lse = lse[:, :, 0].unflatten(1, (kv_heads, num_queries, -1)).transpose(2, 3).flatten(1, 2)
    return out, lse


def _sliding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to the gathered tokens of all queries' windows."""
    capacity, window = key.shape[2], config.window_size
    width = window + query.shape[2] - 1
    if width >= capacity:
        tokens = torch.arange(capacity, device=key.device)[None]
    else:
        first = positions[:, :1] - window + 1
        tokens = first + torch.arange(width, device=key.device)
        inside = tokens.clamp(0, capacity - 1)
        key, value = _take(key, inside), _take(value, inside)
    now = positions[..., None]
    visible = (tokens[:, None] <= now) & (tokens[:, None] > now - window) & (tokens[:, None] >= 0)
    return masked_attention(query, key, value, visible[:, None], scale)


def _take(x: Tensor, slots: Tensor) -> Tensor:
    """(B, H, C, D) at int (B, L) slots: (B, H, L, D)."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x.transpose(1, 2)[row, slots].transpose(1, 2)


def _put(x: Tensor, slots: Tensor, new: Tensor) -> None:
    """The inverse of `_take`, in place."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    x.transpose(1, 2)[row, slots] = new.transpose(1, 2).to(x.dtype)
