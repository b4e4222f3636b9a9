"""New tokens enter a cache by PyTorch operations, where no kernel of a step takes them.

Shapes are constant and nothing waits for the device. The cache is written by an operator alone, so
that compiled code writes it in place: Inductor would copy all of it for some writes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nsa_flex.compression import Compression
from nsa_flex.config import NSAConfig


@torch.library.custom_op("nsa_flex::cache_write", mutates_args=("cached",))
def write_slots(cached: Tensor, slots: Tensor, new: Tensor) -> None:
    """Row `slots[b, i]` of `cached` (B, H, C, D) becomes `new[b, :, i]`, in place.

    Args:
        slots: int (B, L), all in 0 ... C - 1.
        new: (B, H, L, D).
    """
    row = torch.arange(cached.shape[0], device=cached.device)[:, None]
    cached.transpose(1, 2)[row, slots] = new.transpose(1, 2).to(cached.dtype)


@write_slots.register_fake
def _(cached: Tensor, slots: Tensor, new: Tensor) -> None:
    return None


def completes_a_block(lengths: Tensor, num_new: int, config: NSAConfig) -> bool:
    """Whether `num_new` more tokens complete a compressed block of some row.

    Args:
        lengths: int32 (B,) in the host's memory, where looking at it waits for no device.
    """
    assert lengths.device.type == "cpu"
    # Not through PyTorch: what watches for host reads watches code that may run on a GPU.
    rows = np.from_dlpack(lengths)
    count = config.num_compressed_blocks
    return any(count(length) < count(length + num_new) for length in rows.tolist())


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
        write_slots(cached, slots, new)


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
    rows stay as they are, and so does what no branch of the config reads.

    Args:
        key: (B, Hkv, C, D), value: (B, Hkv, C, Dv), the new tokens among them.
        compressed_key, compressed_value: (B, Hkv, max(1, (C - l) // d + 1), D or Dv).
        lengths: int32 (B,), tokens of each row before the new ones.
        compress_key, compress_value: φ.
    """
    config = compress_key.config
    if key.shape[2] < config.compress_block_size:
        return
    if config.compresses:
        _compress(key, compressed_key, lengths, num_new, compress_key)
    if config.has("compressed"):
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
    fresh = compress(take_slots(source, tokens))[:, :, :count]  # [B, Hkv, count, D]
    whole = (rows >= first[:, None]) & (rows * stride + block <= (lengths + num_new)[:, None])
    kept = take_slots(compressed, rows)
    write_slots(compressed, rows, torch.where(whole[:, None, :, None], fresh.to(kept.dtype), kept))


def take_slots(x: Tensor, slots: Tensor) -> Tensor:
    """(B, H, C, D) at int (B, L) slots: (B, H, L, D)."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x.transpose(1, 2)[row, slots].transpose(1, 2)
