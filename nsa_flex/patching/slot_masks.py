"""Masks for models that have sparse attention of their own: which slots of a row are real tokens.

No mask has a row of keys for each query: what queries see follows from causality, from the real
tokens and from `position_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.documents import align_packed, align_positions
from nsa_flex.patching.hf_versions import is_custom_mask
from nsa_flex.patching.rows import Rows, packed_rows, padded_rows

# What a mask of `mask_for_rows` says of each slot of a row.
REAL, NEW = 1, 2

_POSITIONS = (
    "position_ids must count the tokens of a row without padding: packed documents need "
    "use_cache=False and no attention_mask, padding an attention_mask"
)


def mask_for_rows(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers makes masks of such a model with: uint8 (B, 1, 1, Sk), bits REAL and NEW.

    None where all slots are real tokens and the queries are the last; (B, 1, 1, 0) where the row
    holds packed documents, which `position_ids` tell. In four dimensions: one that `generate`
    prepared ahead of a static cache goes through a model as it is.

    Raises:
        ValueError: a mask of the caller's own.
    """
    if kwargs.get("use_vmap") or is_custom_mask(mask_function):
        raise ValueError("a custom mask function is not supported: attention is causal")
    if attention_mask is None and kwargs.get("allow_is_causal_skip") is False and q_length > 1:
        return torch.empty((batch_size, 1, 1, 0), dtype=torch.uint8, device=kwargs["device"])
    ends = isinstance(q_offset, int) and q_offset + q_length == kv_length
    if attention_mask is None and ends:
        return None
    device = kwargs["device"] if attention_mask is None else attention_mask.device
    place = torch.arange(kv_length, device=device)
    new = (place >= q_offset) & (place < q_offset + q_length)
    if attention_mask is None:
        real = (place < q_offset + q_length).expand(batch_size, -1)
    else:
        real = attention_mask.to(torch.uint8) & REAL != 0
        real = torch.nn.functional.pad(real, (0, kv_length - real.shape[1]))
    mask = real.to(torch.uint8) * REAL + new.to(torch.uint8) * NEW
    return mask[:, None, None]


def rows_of_call(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    config: NSAConfig,
    position_ids: Tensor | None,
    arguments: Mapping[str, Any],
) -> Rows:
    """`rows_of_mask`, or the lengths of packed documents (cu_seq_lens_q), if they are given.

    Raises:
        ValueError: these beside a cache or padding, or a mask of the caller's own.
    """
    check_mask(mask)
    offsets = arguments.get("cu_seq_lens_q")
    if offsets is None:
        return rows_of_mask(mask, query.shape[2], key.shape[2], config, position_ids)
    padded = mask is not None and mask.shape[3] > 0
    if padded or query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise ValueError(
            "cu_seq_lens_q is for one row of packed documents: leave attention_mask out, and pass "
            "use_cache=False"
        )
    return packed_rows(align_packed(offsets, query.shape[2], config))


def rows_of_mask(
    mask: Tensor | None,
    num_queries: int,
    num_keys: int,
    config: NSAConfig,
    position_ids: Tensor | None,
) -> Rows:
    """How the tokens of a call are moved so that blocks begin where rows and documents do."""
    if mask is None:
        if position_ids is not None:
            expected = torch.arange(num_keys - num_queries, num_keys, device=position_ids.device)
            torch._assert_async((position_ids == expected).all(), _POSITIONS)
        return Rows()
    if mask.shape[3] == 0:
        assert position_ids is not None  # of which transformers told that there are documents
        each = position_ids.expand(mask.shape[0], -1)  # transformers makes one row for all
        return packed_rows(align_positions(each, config))
    return padded_rows(real_slots(mask), num_queries, _first_new(mask))


def check_mask(mask: Tensor | None) -> None:
    """ValueError for a mask that `mask_for_rows` did not make: transformers hands on 4-D ones."""
    if mask is not None and (mask.dtype != torch.uint8 or mask.shape[1:3] != (1, 1)):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected padding (batch, tokens): "
            "attention is causal, and custom masks are not supported"
        )


def real_slots(mask: Tensor) -> Tensor:
    """Which slots are real tokens, bool (B, Sk), by a mask of `mask_for_rows`."""
    return mask[:, 0, 0] & REAL != 0


def _first_new(mask: Tensor) -> Tensor:
    """The slot of query 0, the same in all rows: int64 (1,)."""
    return (mask[:1, 0, 0] >= NEW).to(torch.int32).argmax(1)


def dense_mask(
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    position_ids: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor | None:
    """What SDPA takes, bool (1 or B, 1, Sq, Sk), of a mask of `mask_for_rows`; None for causal.

    offsets: int (documents + 1,), where packed documents begin and the last ends.

    Raises:
        ValueError: a mask of the caller's own.
    """
    check_mask(mask)
    num_queries, num_keys = query.shape[2], key.shape[2]
    place = torch.arange(num_keys, device=key.device)
    if offsets is not None:
        document = torch.searchsorted(offsets[1:].contiguous(), place, right=True)
        return ((place <= place[:, None]) & (document == document[:, None]))[None, None]
    if mask is None:
        if num_queries in (1, num_keys):
            return None
        own = place[num_keys - num_queries :]
        return (place <= own[:, None])[None, None]
    if mask.shape[3] == 0:
        assert position_ids is not None
        first = place - position_ids  # [B, S]
        return ((place <= place[:, None]) & (place >= first[..., None]))[:, None]
    own = (_first_new(mask) + torch.arange(num_queries, device=key.device))[:, None]  # [Sq, 1]
    real = real_slots(mask)[:, None]  # [B, 1, Sk]
    # Padding sees itself: a row of nothing would give NaN.
    return ((real & (place <= own)) | (place == own))[:, None]
