"""All branches at once for few queries against a longer past: the kernels of a decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig

if TYPE_CHECKING:
    from nsa_flex.fallback_kernels.decode.interface import DecodeAux


def attend(
    inputs: tuple[Tensor, ...],
    config: NSAConfig,
    scale: float,
    query_offset: int | Tensor | None,
    *,
    return_aux: bool,
) -> tuple[Tensor, DecodeAux | None]:
    """`nsa_attention` of `Inputs`, checked, without gradients."""
    from nsa_flex.fallback_kernels.common.strides import rows_contiguous
    from nsa_flex.fallback_kernels.decode.interface import decode_attention

    query, key, value, *_, gates = inputs
    if isinstance(query_offset, Tensor):
        lengths = query_offset.to(torch.int32).contiguous()
    else:
        first = key.shape[2] - query.shape[2] if query_offset is None else query_offset
        lengths = torch.full((query.shape[0],), first, dtype=torch.int32, device=query.device)
    compressed_key, compressed_value = inputs[3:5]
    if not config.has("compressed"):  # nobody reads the values, and one row will do
        compressed_value = value.new_empty((*value.shape[:2], 1, value.shape[3]))
    if not config.compresses:
        compressed_key = key.new_empty((*key.shape[:2], 1, key.shape[3]))
    cache = (rows_contiguous(x) for x in (key, value, compressed_key, compressed_value))
    result: Any = decode_attention(
        *(query, *cache, gates, lengths), config=config, scale=scale, return_aux=return_aux
    )
    return result if return_aux else (result, None)
