"""transformers' sliding-window layers by chunks: their own SDPA computes S × S under a mask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, window_size: int, scale: float | None = None
) -> Tensor:
    """Causal attention to the `window_size` newest keys: (B, H, S, D) -> (B, H, S, D).

    Each chunk of `window_size` queries sees its own keys and those of the chunk before.
    """
    batch, heads, tokens, _ = query.shape
    missing = -tokens % window_size
    query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    chunks = (tokens + missing) // window_size

    def chunked(x: Tensor) -> Tensor:
        return x.reshape(batch * heads, chunks, window_size, x.shape[-1])

    def with_the_one_before(x: Tensor) -> Tensor:  # [BH, chunks, 2 w, D]
        x = chunked(x)
        return torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1], x], 2)

    place = torch.arange(window_size, device=query.device)
    ago = place[:, None] + window_size - torch.arange(2 * window_size, device=query.device)
    seen = (ago >= 0) & (ago < window_size)  # [w, 2 w]
    first = seen & (torch.arange(2 * window_size, device=query.device) >= window_size)
    mask = torch.stack([first, *[seen] * (chunks - 1)])  # [chunks, w, 2 w]
    out = F.scaled_dot_product_attention(
        chunked(query),
        with_the_one_before(key),
        with_the_one_before(value),
        attn_mask=mask,
        scale=scale,
    )
    return out.reshape(batch, heads, tokens + missing, -1)[:, :, :tokens]


@contextlib.contextmanager
def windows_by_chunks() -> Iterator[None]:
    """Within, "sdpa" layers whose window is shorter than the row run `window_attention`."""
    attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    make_mask: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
    ) -> Any:
        window = named.get("sliding_window")
        if window is None or window >= key.shape[2]:
            return attend(module, query, key, value, *rest, **named)
        groups = query.shape[1] // key.shape[1]
        query = query.to(value.dtype)  # norms and rotations leave float32 under autocast
        key, value = (x.to(value.dtype).repeat_interleave(groups, 1) for x in (key, value))
        out = window_attention(query, key, value, window, named.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    def mask(*given: Any, **named: Any) -> Any:
        window = named.get("local_size")
        if window is not None and window < named["kv_length"]:
            return None
        return make_mask(*given, **named)

    with (
        mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}),
        mock.patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": mask}),
    ):
        yield
