"""FA-2 varlen attention: torch's own `varlen_attn`, or flash-attn 2.8 where that is installed."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from nsa_flex.installed import HAS_FLASH_ATTN


def fa2_window(window_size: int) -> tuple[int, int]:
    """(left, right) of FA-2, which counts keys before the query, from visible keys.

    >>> fa2_window(1), fa2_window(512)
    ((0, 0), (511, 0))
    """
    return window_size - 1, 0


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: tuple[int, int],
    scale: float,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """FA-2 over a batch of equally long rows.

    Args:
        query: (B, S, Hq, D); key, value: (B, S, Hkv, D); fp16 or bf16 on CUDA, D a multiple of 8
            and at most 256.
        window: (left, right) as FA-2 counts, (-1, 0) for plain causal attention.

    Returns:
        output (B, S, Hq, D) and, if asked, the natural log-sum-exp float32 (B, Hq, S), which
        carries no gradient.
    """
    batch, length, heads = query.shape[:3]
    cu_seqlens = torch.arange(batch + 1, device=query.device, dtype=torch.int32) * length
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    call = _flash_attn if HAS_FLASH_ATTN else _torch
    out, lse = call(q, k, v, cu_seqlens, length, window, scale, need_lse)
    if lse is not None:  # [Hq, B * S]
        lse = lse.view(heads, batch, length).transpose(0, 1).detach()
    return out.view(batch, length, heads, -1), lse


def _torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    length: int,
    window: tuple[int, int],
    scale: float,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    options: dict[str, Any] = {"enable_gqa": True} if _takes_enable_gqa() else {}
    result: Any = varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        length,
        length,
        return_aux=AuxRequest(lse=True) if need_lse else None,
        scale=scale,
        window_size=window,
        **options,
    )
    return result if need_lse else (result, None)


@torch.compiler.assume_constant_result
def _takes_enable_gqa() -> bool:
    """torch 2.11 has no such argument and takes fewer KV heads as they are."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def _flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    length: int,
    window: tuple[int, int],
    scale: float,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    # As flash-attn 2.8 documents it. Log-sum-exps come as (Hq, B * S), its third result is empty.
    from flash_attn import flash_attn_varlen_func

    result = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        length,
        length,
        softmax_scale=scale,
        causal=True,
        window_size=window,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # torch's own asks by itself
        return_attn_probs=need_lse,
    )
    return (result[0], result[1]) if need_lse else (result, None)
